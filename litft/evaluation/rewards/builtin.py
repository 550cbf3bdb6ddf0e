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
    texts = alternatives(answer)
    if not texts:
        return None
    return float(completion.strip() in texts)


def contains(completion: str, answer: Any) -> float | None:
    """1 if the completion contains the answer; None without one."""
    texts = alternatives(answer)
    if not texts:
        return None
    return float(any(text in completion for text in texts))


def alternatives(answer: Any) -> list[str]:
    """Return the answers of a record as texts: those of a list are alternatives, and null and white
    space are none. Raises ValueError for an object."""
    if isinstance(answer, dict):
        raise ValueError(
            "the answer is an object; give a text, a number, or a list of alternatives"
        )
    answers = answer if isinstance(answer, list) else [answer]
    texts = []
    for item in answers:
        if item is not None and str(item).strip():
            texts.append(str(item).strip())
    return texts


def number(completion: str, answer: Any) -> float | None:
    """1 if the last number of the completion equals the last number of the answer; None if the
    answer has none."""
    expected = [_last_number(text) for text in alternatives(answer)]
    known = [value for value in expected if value is not None]
    if not known:
        return None
    return float(_last_number(completion) in known)


def _last_number(text: str) -> Decimal | None:
    # as LaTeX writes thousands and dollars: 10\,080, 10{,}080, 10,\!080 and \$5
    text = re.sub(r"(?<=\d)\\[, ](?=\d{3}(?!\d))", ",", text)
    for written, plain in (("{,}", ","), (",\\!", ","), ("\\$", "$")):
        text = text.replace(written, plain)
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

    found = parse(completion)
    values = []
    for text in alternatives(answer):
        # of LaTeX without its marks, math-verify would read a single number: 3 of 3\sqrt{13}
        if _is_formula(text):
            expected = parse(f"${text}$") or parse(text)
        else:
            expected = parse(text) or parse(f"${text}$")
        if expected:
            values.append(float(verify(expected, found)))
    return max(values, default=None)


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
