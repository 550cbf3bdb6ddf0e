"""Take an answer apart while it is generated: reasoning, content and tool calls, by the marks of
its chat template.

Text that does not parse stays content, with its marks.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from litft.data.tool_calls import BARE_PREFIXES, CallMarks, ToolCall, read_calls, tool_names

PartKind = Literal["content", "reasoning", "call"]


@dataclass(frozen=True)
class AnswerFormat:
    """How a template writes answers.

    thoughts: pairs of texts around the reasoning. calls: the marks of tool calls; None if the
    template writes none.
    channels: whether answers are messages in channels (gpt-oss). arguments_as_text: whether the
    template takes the arguments of a call as JSON, not as an object. opening, closing: what it
    writes around the content (Command R7B), which is no part of it.
    """

    thoughts: tuple[tuple[str, str], ...] = (("<think>", "</think>"),)
    calls: CallMarks | None = None
    channels: bool = False
    arguments_as_text: bool = False
    opening: str = ""
    closing: str = ""


@dataclass(frozen=True)
class AnswerPart:
    """A piece of reasoning or content, or a complete tool call."""

    kind: PartKind
    text: str = ""
    call: ToolCall | None = None


@dataclass
class ParsedAnswer:
    """An answer taken apart."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, parts: list[AnswerPart]) -> None:
        """Append parts."""
        for part in parts:
            if part.call is not None:
                self.calls.append(part.call)
            elif part.kind == "reasoning":
                self.reasoning += part.text
            else:
                self.content += part.text


# characters of one answer that may be read as calls and turn out to be none: a model that repeats a
# broken call writes thousands of marks, and each could begin or end a call
MAX_FAILED = 400_000


class AnswerParser:
    """Takes one answer apart, chunk by chunk.

    in_thought: the prompt has opened the reasoning. tools: the functions that the model may call;
    None: unknown. Calls that have no opening mark are looked for only with tools, since they look
    like any JSON. reads_calls: whether calls are looked for; otherwise they are content.
    """

    def __init__(
        self,
        answer_format: AnswerFormat,
        in_thought: bool = False,
        tools: list[dict[str, Any]] | None = None,
        reads_calls: bool = True,
    ) -> None:
        self.reads_calls = reads_calls
        if not reads_calls:
            answer_format = replace(answer_format, calls=None)
        self.format = answer_format
        self.tools = tools
        # whether the answer ended before the model had finished it
        self.is_cut = False
        self.buffer = ""
        self.state = "thought" if in_thought else "start"
        self.closing_marks = tuple(closing for _, closing in answer_format.thoughts)
        # white space at the end of what was returned, which only counts if more text follows
        self.spaces = ""
        self.started: set[str] = set()  # the kinds of text returned so far
        self.has_calls = False
        # characters of the buffer in which no closing mark has completed a call
        self.tried = 0
        # characters that were read as calls and are none
        self.failed = 0

    @property
    def gives_up(self) -> bool:
        """Whether too many attempts to read a call have failed; the rest of the answer is then
        content."""
        return self.failed > MAX_FAILED

    def push(self, text: str) -> list[AnswerPart]:
        """Add text; return what is complete now."""
        self.buffer += text
        return list(self._parts(is_last=False))

    def finish(self, is_cut: bool = False) -> list[AnswerPart]:
        """Return the rest, at the end of the answer.

        is_cut: the model had not finished, so that a call without its end is content.
        """
        self.is_cut = is_cut
        parts = list(self._parts(is_last=True))
        if self.spaces and not self.has_calls and self.state == "content":
            parts.append(AnswerPart("content", self.spaces))
        self.spaces = ""
        return parts

    def parse(self, text: str, is_cut: bool = False) -> ParsedAnswer:
        """Take a whole answer apart; is_cut: see `finish`."""
        parsed = ParsedAnswer()
        parsed.add(self.push(text))
        parsed.add(self.finish(is_cut))
        return parsed

    def _parts(self, is_last: bool) -> Iterator[AnswerPart]:
        """Advance from state to state as far as the buffer decides."""
        while True:
            before = (self.state, len(self.buffer))
            yield from getattr(self, f"_in_{self.state}")(is_last)
            # nothing has changed: the state waits for more text
            if (self.state, len(self.buffer)) == before:
                return

    def _in_start(self, is_last: bool) -> Iterator[AnswerPart]:
        """Decide whether the answer begins with reasoning, with a bare call or with content."""
        text = self.buffer.lstrip()
        for opening, closing in self.format.thoughts:
            if text.startswith(opening):
                self.buffer = text.removeprefix(opening)
                self.closing_marks = (closing,)
                self.state = "thought"
                return
            # an empty thought that the prompt has opened
            if text.startswith(closing):
                self.buffer = text.removeprefix(closing)
                self.state = "after_thought"
                return
            # the text so far may become a mark
            if not is_last and (opening.startswith(text) or closing.startswith(text)):
                return
        self._begin_answer(text, is_last)
        # a generator without parts, like the other states
        yield from ()

    def _begin_answer(self, text: str, is_last: bool) -> None:
        """Decide whether the answer after any reasoning is a bare call or content, once `text`
        shows which; `text`: the buffer without white space before it."""
        opening = self.format.opening
        if opening and text.startswith(opening):
            self.buffer = text.removeprefix(opening)
            self.state = "content"
            return
        if opening and not is_last and opening.startswith(text):
            return
        calls = self.format.calls
        takes_bare_calls = calls is not None and not calls.opening and bool(self.tools)
        if (
            takes_bare_calls
            and not is_last
            and any(prefix.startswith(text) for prefix in BARE_PREFIXES)
        ):
            return
        is_bare_call = takes_bare_calls and text.startswith(("{", *BARE_PREFIXES))
        self.state = "call" if is_bare_call else "content"

    def _in_thought(self, is_last: bool) -> Iterator[AnswerPart]:
        """Return reasoning up to its closing mark."""
        end, mark = first_mark(self.buffer, self.closing_marks)
        if mark:
            yield from self._text("reasoning", self.buffer[:end])
            self.buffer = self.buffer[end + len(mark) :].lstrip()
            self.spaces = ""
            self.state = "after_thought"
            return
        yield from self._safe_text("reasoning", self.closing_marks, is_last)

    def _in_after_thought(self, is_last: bool) -> Iterator[AnswerPart]:
        """Skip the white space after the reasoning."""
        self.buffer = self.buffer.lstrip()
        if self.buffer:
            self._begin_answer(self.buffer, is_last)
        yield from ()

    def _in_content(self, is_last: bool) -> Iterator[AnswerPart]:
        """Return content up to the mark that opens calls."""
        calls = self.format.calls
        marks: tuple[str, ...] = ()
        if calls is not None and calls.opening and not self.gives_up:
            marks = (calls.opening,)
        if self.format.closing:
            marks = (*marks, self.format.closing)
        start, mark = first_mark(self.buffer, marks)
        if mark and mark == self.format.closing:
            yield from self._text("content", self.buffer[:start])
            self.buffer = self.buffer[start + len(mark) :]
            return
        if mark:
            yield from self._text("content", self.buffer[:start])
            self.buffer = self.buffer[start:]
            self.state = "call"
            return
        yield from self._safe_text("content", marks, is_last)

    @property
    def _call_marks(self) -> CallMarks:
        """The marks around calls. Without them no state leads to that of a call."""
        assert self.format.calls is not None
        return self.format.calls

    def _in_call(self, is_last: bool) -> Iterator[AnswerPart]:
        """Read calls once they are complete. The buffer begins with the opening mark.

        A closing mark may be a part of an argument: then a later one completes the calls.
        """
        marks = self._call_marks
        # earlier closing marks of this buffer have been tried
        start = max(self.tried, len(marks.opening))
        while marks.closing and not self.gives_up:
            end = self.buffer.find(marks.closing, start)
            if end < 0:
                break
            calls = self._calls_in(self.buffer[:end])
            start = end + len(marks.closing)
            if calls:
                yield from self._after_calls(calls, start)
                return
        self.tried = start
        if not is_last and not self.gives_up:
            return
        calls = [] if self.gives_up else self._calls_in(self.buffer)
        if calls:
            yield from self._after_calls(calls, len(self.buffer))
            return
        # the mark is content, and another one may follow
        self.tried = 0
        self.state = "content"
        mark = marks.opening or self.buffer
        yield from self._text("content", mark)
        self.buffer = self.buffer[len(mark) :]

    def _calls_in(self, region: str) -> list[ToolCall]:
        """Return the calls from the opening mark on; none if it is no call, which counts as an
        attempt that failed."""
        calls = self._read_calls(region)
        if not calls:
            self.failed += len(region)
        return calls

    def _read_calls(self, region: str) -> list[ToolCall]:
        """Return the calls from the opening mark on; none if it is no call."""
        opening = self._call_marks.opening
        body = region
        if not opening:
            body = _without_prefixes(region)
        elif not opening.startswith(("<function=", "<function name=")):
            # such a mark is a part of the syntax of its calls
            body = region.removeprefix(opening)
            if not self._call_marks.closing:  # the mark may come before each call
                body = _without_marks(body, opening)
        try:
            calls = read_calls(body.lstrip(), self.tools, self.is_cut)
        except ValueError:
            return []
        # without a mark, JSON is a call only if it names a function
        if not opening and not all(call.name in tool_names(self.tools) for call in calls):
            return []
        return calls

    def _after_calls(self, calls: list[ToolCall], length: int) -> Iterator[AnswerPart]:
        """Return calls, and go on after the first `length` characters of the buffer."""
        self.buffer = self.buffer[length:]
        self.tried = 0
        self.state = "content"
        self.has_calls = True
        self.spaces = ""
        for call in calls:
            yield AnswerPart("call", call=call)

    def _safe_text(
        self, kind: PartKind, marks: tuple[str, ...], is_last: bool
    ) -> Iterator[AnswerPart]:
        """Return the buffer but for an end that may be the beginning of a mark."""
        held_back = 0
        if not is_last:
            held_back = max((overlap(self.buffer, mark) for mark in marks), default=0)
        end = len(self.buffer) - held_back
        text = self.buffer[:end]
        self.buffer = self.buffer[end:]
        yield from self._text(kind, text)

    def _text(self, kind: PartKind, text: str) -> Iterator[AnswerPart]:
        """Return text without the white space around reasoning and between content and calls."""
        text = self.spaces + text
        if kind not in self.started and (kind == "reasoning" or self.has_calls):
            text = text.lstrip()
        stripped = text.rstrip()
        self.spaces = text[len(stripped) :]
        if stripped:
            self.started.add(kind)
            yield AnswerPart(kind, stripped)


_RECIPIENT = re.compile(r"to=functions\.(?P<name>[\w.\-]+)")


class ChannelParser(AnswerParser):
    """Takes apart the answers of gpt-oss: messages in the channels analysis, commentary and final.

    Source: OpenAI's harmony format. A message is HEADER<|message|>TEXT<|end|>; its header names the
    channel and, for a call, the recipient.
    """

    ENDS = ("<|end|>", "<|call|>", "<|return|>")

    def __init__(
        self,
        answer_format: AnswerFormat,
        in_thought: bool = False,
        tools: list | None = None,
        reads_calls: bool = True,
    ) -> None:
        super().__init__(answer_format, in_thought, tools, reads_calls)
        self.state = "header"
        self.header = ""

    def continue_message(self, prompt: str) -> None:
        """Begin within a message if the prompt ends within one."""
        before, mark, text = prompt.rpartition("<|message|>")
        # no end after the last mark: the prompt ends within this message
        if mark and first_mark(text, self.ENDS)[0] < 0:
            self.header = before.rpartition("<|start|>")[2]
            self.state = "message"

    def _in_header(self, is_last: bool) -> Iterator[AnswerPart]:
        """Read up to the text of a message."""
        # text that cannot become a header is content: the model has left the header out
        if not _may_be_header(self.buffer):
            self.state = "content"
            return
        header, mark, rest = self.buffer.partition("<|message|>")
        if mark:
            self.header = header
            self.buffer = rest
            self.state = "message"
        yield from ()

    def _in_message(self, is_last: bool) -> Iterator[AnswerPart]:
        """Return the text of a message, or its call once it is complete."""
        recipient = _RECIPIENT.search(self.header)
        end, mark = first_mark(self.buffer, self.ENDS)
        if recipient is not None:
            if not mark and not is_last:
                return
            text = self.buffer[:end] if mark else self.buffer
            # an empty text is a call without arguments, unless they were about to follow
            if self.reads_calls and (mark or text.strip() or not self.is_cut):
                yield from self._call(recipient["name"], text)
            else:
                yield from self._text("content", f"{self.header}<|message|>{text}")
            self._next_message(len(text) + len(mark))
            return
        kind: PartKind = "reasoning" if "analysis" in self.header else "content"
        if not mark:
            yield from self._safe_text(kind, self.ENDS, is_last)
            return
        yield from self._text(kind, self.buffer[:end])
        self._next_message(end + len(mark))

    def _next_message(self, length: int) -> None:
        """Go on to the next message, after the first `length` characters of the buffer."""
        self.buffer = self.buffer[length:]
        self.state = "header"
        if "content" in self.started:
            self.spaces = "\n\n"  # between two messages

    def _call(self, name: str, text: str) -> Iterator[AnswerPart]:
        try:
            # as an object, so that arguments are checked as in other formats
            (call,) = read_calls(json.dumps({"name": name, "arguments": text}))
        except ValueError:
            yield from self._text("content", f"{self.header}<|message|>{text}")
            return
        self.has_calls = True
        self.spaces = ""
        yield AnswerPart("call", call=call)


def _may_be_header(text: str) -> bool:
    """Return whether a text may become the header of a message."""
    text = text.lstrip()
    beginnings = ("<|channel|>", "<|start|>", "to=")
    return not text or any(
        text.startswith(start) or start.startswith(text) for start in beginnings
    )


def make_parser(
    answer_format: AnswerFormat,
    in_thought: bool = False,
    tools: list | None = None,
    reads_calls: bool = True,
) -> AnswerParser:
    """Return a parser for one answer."""
    parser = ChannelParser if answer_format.channels else AnswerParser
    return parser(answer_format, in_thought, tools, reads_calls)


def _without_marks(calls: str, mark: str) -> str:
    """Return calls on lines of their own, without the mark before each; a mark within the text of
    an argument stays."""
    text_or_mark = re.compile(rf'"(?:[^"\\]|\\.)*"|{re.escape(mark)}', re.DOTALL)

    def keep_text(match: re.Match) -> str:
        return "\n" if match[0] == mark else match[0]

    return text_or_mark.sub(keep_text, calls)


def _without_prefixes(text: str) -> str:
    """Return a bare call without the special tokens before it."""
    while text.startswith(BARE_PREFIXES):
        for prefix in BARE_PREFIXES:
            text = text.removeprefix(prefix)
    return text


def first_mark(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Return the position of the first of several marks, and this mark; (-1, "") if there is
    none."""
    found = (-1, "")
    for mark in marks:
        position = text.find(mark)
        if position >= 0 and (found[0] < 0 or position < found[0]):
            found = (position, mark)
    return found


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `mark`, but not the
    whole mark."""
    # the longest first
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0
