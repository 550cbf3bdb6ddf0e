"""The reasoning of an answer: where records store it, and the spellings that chat templates read.

A record has the reasoning in a field of the message, as a part of its content, or inline before
`</think>`. A template reads one of these. A `ReasonedAnswer` holds reasoning and answer apart and
writes them in any spelling.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from litft.data.chat_template import Message

# fields of a message that hold its reasoning, the usual one first
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
# spelling: content with a part of type "thinking", as in Mistral's templates
PARTS = "parts"
# spelling: content that begins with <think>...</think>
INLINE = "inline"

# variables with which templates switch thinking on and off
THINKING_ON = ({"enable_thinking": True}, {"thinking": True})
THINKING_OFF = ({"enable_thinking": False}, {"thinking": False})
BOTH_ON = {"enable_thinking": True, "thinking": True}

# <think>, <seed:think>, <mm:think>, <think:opensource>
_TAG = r"(?:\w+:)?think(?:ing)?(?::\w+)?"
_OPENING_MARKS = (
    rf"<{_TAG}>",
    r"\[THINK\]",
    r"<\|START_THINKING\|>",
    r"<\|channel>thought",
    r"<\|open\|>think<\|sep\|>",
    r"<\|inner_prefix\|>",
)
_CLOSING_MARKS = (
    rf"</{_TAG}>",
    r"\[/THINK\]",
    r"<\|END_THINKING\|>",
    r"<channel\|>",
    r"<\|close\|>think<\|sep\|>",
    r"<\|inner_suffix\|>",
)
_OPEN = f"(?:{'|'.join(_OPENING_MARKS)})"
_CLOSE = f"(?:{'|'.join(_CLOSING_MARKS)})"
# what a template writes for an answer without reasoning;
# the prompt may have written the opening mark
EMPTY_THOUGHT = re.compile(rf"\s*(?:{_OPEN}\s*)?{_CLOSE}\s*")
ENDS_IN_OPEN_THOUGHT = re.compile(rf"{_OPEN}\s*\Z")
ENDS_IN_EMPTY_THOUGHT = re.compile(rf"{_OPEN}\s*{_CLOSE}\s*\Z")
# some prompts close a thought that they have not opened
ENDS_IN_CLOSED_THOUGHT = re.compile(rf"(?:{_OPEN}\s*)?{_CLOSE}\s*\Z")
OPENING_MARK = re.compile(_OPEN)
OPENS_THOUGHT = re.compile(rf"\s*{_OPEN}")
# of a template that writes a mark, or an empty thought, before content that has it, too
REPEATED_THOUGHT = re.compile(rf"{_OPEN}\s*{_OPEN}|{_CLOSE}\s*(?:{_OPEN}\s*)?{_CLOSE}")
CLOSES_THOUGHT = re.compile(_CLOSE)
_INLINE_OPENING = re.compile(r"\s*<think>\s*")
_INLINE_CLOSING_LINE = re.compile(r"^[ \t]*</think>[ \t]*$", re.MULTILINE)


def is_thought_mark(text: str) -> bool:
    """Return whether a token's text opens or closes reasoning in any template."""
    return re.fullmatch(f"{_OPEN}|{_CLOSE}", text) is not None


def prints_parts(text: str) -> bool:
    """Return whether a template that does not know parts of a content has printed them as data."""
    return '"thinking"' in text or "'thinking'" in text


def thought_marks(template: str) -> tuple[tuple[str, str], ...]:
    """Return the pairs of texts around reasoning that a template mentions; always <think> and
    </think>."""
    pairs = [("<think>", "</think>")]
    for opening, closing in zip(_OPENING_MARKS, _CLOSING_MARKS, strict=True):
        openings = re.findall(opening, template)
        closings = re.findall(closing, template)
        if openings and closings:
            pairs.append((openings[0], closings[0]))
    return tuple(dict.fromkeys(pairs))


@dataclass(frozen=True)
class InlineThought:
    """A content with reasoning at its beginning, in the parts that it consists of."""

    # with the white space around it; empty if the prompt has written it
    opening: str
    reasoning: str
    closing: str  # with the white space around it
    answer: str

    @classmethod
    def of(cls, content: str) -> "InlineThought | None":
        """Return the parts of a content; None without reasoning.

        The thought is opened, or its closing mark has a line of its own: elsewhere </think> is a
        part of the answer.
        """
        if "</think>" not in content:
            return None
        opening = _INLINE_OPENING.match(content)
        if opening:
            closing_start = content.find("</think>", opening.end())
            if closing_start >= 0:
                return cls._divided(
                    content, opening.end(), closing_start, closing_start + len("</think>")
                )
        closing = _INLINE_CLOSING_LINE.search(content)
        # an answer that shows a thought has its opening mark, too
        if closing and "<think>" not in content[: closing.start()]:
            return cls._divided(content, 0, closing.start(), closing.end())
        return None

    @classmethod
    def _divided(
        cls, content: str, start: int, closing_start: int, closing_end: int
    ) -> "InlineThought":
        """Return the parts around the opening and the closing mark; white space beside a mark is a
        part of the mark."""
        reasoning = content[start:closing_start].rstrip()
        answer = content[closing_end:].lstrip()
        closing = content[start + len(reasoning) : len(content) - len(answer)]
        return cls(content[:start], reasoning, closing, answer)


@dataclass(frozen=True)
class ReasonedAnswer:
    """An assistant message with its reasoning and the rest of its text apart.

    spelling: a field of REASONING_FIELDS, PARTS or INLINE; `opening` and `closing` are the marks
    around inline reasoning.
    """

    message: Message  # with neither reasoning nor content
    reasoning: str
    answer: str
    spelling: str
    opening: str = "<think>\n"
    closing: str = "\n</think>\n\n"

    @classmethod
    def read(cls, message: Message) -> "ReasonedAnswer":
        """Take a message apart. A field with reasoning has priority over inline reasoning."""
        rest = {}
        for name, value in message.items():
            if name not in (*REASONING_FIELDS, "content"):
                rest[name] = value
        content = message.get("content") or ""
        field = next((name for name in REASONING_FIELDS if message.get(name)), None)
        if field is not None:
            return cls(rest, message[field], content, field)
        thought = InlineThought.of(content)
        if thought is None:
            return cls(rest, "", content, REASONING_FIELDS[0])
        return cls(
            rest,
            thought.reasoning,
            thought.answer,
            INLINE,
            thought.opening,
            thought.closing,
        )

    def write(self) -> Message:
        """Return the message in its spelling."""
        # also with empty reasoning: an inline thought is written back as it was read
        if self.spelling == INLINE:
            return {
                **self.message,
                "content": self.opening + self.reasoning + self.closing + self.answer,
            }
        if not self.reasoning.strip():
            return {**self.message, "content": self.answer}
        if self.spelling == PARTS:
            parts = [{"type": "thinking", "thinking": self.reasoning}]
            if self.answer:
                parts.append({"type": "text", "text": self.answer})
            return {**self.message, "content": parts}
        return {**self.message, "content": self.answer, self.spelling: self.reasoning}

    def spelled(self, spelling: str) -> "ReasonedAnswer":
        """Return the same message in another spelling, if it has reasoning."""
        if not self.reasoning.strip():
            return self
        # the white space around reasoning belongs to the spelling, not to the text
        return replace(self, spelling=spelling, reasoning=self.reasoning.strip())

    def bare(self) -> "ReasonedAnswer":
        """Return the answer without its reasoning, whatever its text is."""
        return ReasonedAnswer(self.message, "", self.answer, REASONING_FIELDS[0])


def with_opening_mark(message: Message) -> Message:
    """Return an answer with <think> in front if it has </think> alone: the prompt from which it was
    sampled had the mark. For templates whose prompts have it; to others, the mark is text."""
    content = message.get("content")
    if not isinstance(content, str) or any(map(message.get, REASONING_FIELDS)):
        return message
    thought, closing, _ = content.partition("</think>")
    if not closing or OPENING_MARK.search(thought):
        return message
    # the closing mark has a line of its own, and so has the opening one
    opening = "<think>\n" if thought.endswith("\n") else "<think>"
    return {**message, "content": opening + content.lstrip()}


def drop_reasoning(messages: list[Message]) -> list[Message]:
    """Return the conversation without any reasoning of the assistant."""
    dropped = []
    for message in messages:
        if message["role"] == "assistant":
            message = ReasonedAnswer.read(message).bare().write()
        dropped.append(message)
    return dropped


def has_reasoning(message: Message) -> bool:
    """Return whether a message of the assistant has reasoning that is not empty."""
    return message["role"] == "assistant" and bool(
        ReasonedAnswer.read(message).reasoning.strip()
    )


def without_opening(answer: ReasonedAnswer) -> Message:
    """Return an answer whose inline reasoning has only the mark that ends it."""
    bare = replace(answer.spelled(INLINE), opening="")
    # a mark within a line would be read as text
    if bare.reasoning and InlineThought.of(bare.write()["content"]) is None:
        bare = replace(bare, closing="\n</think>\n\n")
    return bare.write()


def spellings(messages: list[Message], inline: bool) -> Iterator[list[Message]]:
    """Yield the conversation with its reasoning in each spelling, first as it is; `inline`: also
    inline.

    Without reasoning there is one more form if the content has an empty inline thought: without it,
    for templates that write an empty thought themselves.
    """
    yield messages
    answers = {}
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            answers[number] = ReasonedAnswer.read(message)
    if any(answer.reasoning.strip() for answer in answers.values()):
        spellings = [*REASONING_FIELDS, PARTS]
        if inline:
            spellings.append(INLINE)
        for spelling in spellings:
            written = list(messages)
            for number, answer in answers.items():
                written[number] = answer.spelled(spelling).write()
            yield written
        # for a template that writes <think> before every answer
        if inline:
            written = list(messages)
            for number, answer in answers.items():
                written[number] = without_opening(answer)
            yield written
    elif any(answer.spelling == INLINE for answer in answers.values()):
        yield drop_reasoning(messages)
