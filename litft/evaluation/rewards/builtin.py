"""The reward functions that are built in, by name. Each is made from the text after the colon."""

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

# a number as people write it: 1,234.5 or -3 or −3 (with the minus sign) or -$3 or .5 or 1e3
SIGN = r"(?:(?<![\w.])[-\u2212](?:[$€£¥](?=[\d.]))?)?"
# digits in groups of three, so not 1,500 of (1,5000)
THOUSANDS = r"\d{1,3}(?:,\d{3})+(?!\d|,\d)"
DIGITS = rf"(?:{THOUSANDS}|\d+)?(?:\.\d+)?(?<=\d)"
NUMBER = re.compile(SIGN + DIGITS + r"(?:[eE][-+]?\d+)?")
# what a number is written with, and what Python reads
READABLE = str.maketrans({",": "", "$": "", "€": "", "£": "", "¥": "", "\u2212": "-"})
# a thought and what follows; the opening tag may be in the prompt
THOUGHT = re.compile(r"\s*(?:<think>)?(.*?)</think>(.*)", re.DOTALL)

RewardFunction = Callable[..., float | None]


def exact(completion: str, answer: Any) -> float | None:
    """1 if the completion is the answer, apart from white space at its ends; None without an
    answer."""
    if _is_missing(answer):
        return None
    return float(completion.strip() == str(answer).strip())


def contains(completion: str, answer: Any) -> float | None:
    """1 if the completion contains the answer; None without one."""
    if _is_missing(answer):
        return None
    return float(str(answer).strip() in completion)


def _is_missing(answer: Any) -> bool:
    """Return whether a record has null, or nothing but white space, for its answer."""
    return answer is None or not str(answer).strip()


def number(completion: str, answer: Any) -> float | None:
    """1 if the last number of the completion equals the last number of the answer; None if the
    answer has none."""
    expected = _last_number(str(answer))
    if expected is None:
        return None
    return float(_last_number(completion) == expected)


def _last_number(text: str) -> Decimal | None:
    found = [match for match in NUMBER.findall(text) if match]
    if not found:
        return None
    try:
        return Decimal(found[-1].translate(READABLE))
    except InvalidOperation:
        return None


def math(completion: str, answer: Any) -> float | None:
    """1 if both are the same by the package math-verify; None if it reads nothing in the answer."""
    from math_verify import parse, verify

    if _is_missing(answer):
        return None
    text = str(answer)
    # of LaTeX without its marks, math-verify would read a single number: 3 of 3\sqrt{13}
    if _is_formula(text):
        expected = parse(f"${text}$") or parse(text)
    else:
        expected = parse(text) or parse(f"${text}$")
    if not expected:
        return None
    return float(verify(expected, parse(completion)))


def _is_formula(text: str) -> bool:
    """Return whether a text is mathematics without marks around it: neither a number, nor words
    such as `14 dollars`, nor LaTeX between dollar signs or in a box."""
    has_marks = any(mark in text for mark in ("$", "\\(", "\\[", "\\boxed"))
    is_number = NUMBER.fullmatch(text.strip()) is not None
    # which is no command, such as \sqrt, nor within one, such as \text{cm}
    has_words = re.search(r"(?<![\\{A-Za-z])[A-Za-z]{3,}", text) is not None
    return not (has_marks or is_number or has_words)


def make_regex(pattern: str) -> RewardFunction:
    """Return a function that gives 1 if a pattern is found in the completion."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression ({error})") from None

    def regex(completion: str) -> float:
        return float(compiled.search(completion) is not None)

    return regex


def make_format(name: str) -> RewardFunction:
    """Return a function that gives 1 to one thought that an answer follows."""
    if name != "think":
        raise ValueError(f"format:{name} is not known; use format:think")

    def think(completion: str) -> float:
        match = THOUGHT.fullmatch(completion)
        if match is None:
            return 0.0
        thought, answer = match.groups()
        has_further = "<think>" in thought or "think>" in answer
        return float(not has_further and bool(thought.strip()) and bool(answer.strip()))

    return think


def make_brief(limit: str) -> RewardFunction:
    """Return a function that gives 1 up to `limit` tokens, falling to 0 at twice as many."""
    if not limit.isdigit() or int(limit) == 0:
        raise ValueError(f"brief:{limit}: give a number of tokens, such as brief:200")
    most = int(limit)

    def brief(completion_tokens: int) -> float:
        return min(1.0, max(0.0, 2.0 - completion_tokens / most))

    return brief


# without and with an argument after a colon
PLAIN: dict[str, RewardFunction] = {
    "exact": exact,
    "contains": contains,
    "number": number,
    "math": math,
}
MADE: dict[str, Callable[[str], RewardFunction]] = {
    "regex": make_regex,
    "format": make_format,
    "brief": make_brief,
}
EXAMPLES = (*PLAIN, "regex:PATTERN", "format:think", "brief:TOKENS", "FILE.py:FUNCTION")
