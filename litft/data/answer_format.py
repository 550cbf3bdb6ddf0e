"""Find how a chat template writes reasoning and tool calls, by what it renders for an example of
each."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial

from litft.data.answer_parser import AnswerFormat, make_parser
from litft.data.chat_template import Message, Render, render
from litft.data.reasoning import (
    CLOSES_THOUGHT,
    ENDS_IN_OPEN_THOUGHT,
    OPENS_THOUGHT,
    is_thought_mark,
    thought_marks,
)
from litft.data.tool_calls import CALL_MARKS, ToolCall, call_texts
from litft.data.turn_ends import EndTokens
from litft.data.turns import Turn, assistant_turns

# the end of a header of gpt-oss, after which the answer's content begins; a client that asked for
# JSON may be answered with `<|channel|>final <|constrain|>json<|message|>`
FINAL_HEADER = re.compile(
    r"<\|channel\|>final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>\Z"
)
CHANNEL_MARKS = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)

_CONTENT = "It is warm."
_REASONING = "The town matters."
_CALL = ToolCall("weather", {"town": "Oslo", "days": 3})
EXAMPLE_TOOL = {
    "type": "function",
    "function": {
        "name": _CALL.name,
        "description": "Return the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "town": {"type": "string", "description": "the town"},
                "days": {"type": "integer", "description": "the days"},
            },
            "required": ["town"],
        },
    },
}


EXAMPLE_QUESTION: Message = {"role": "user", "content": "How warm is it?"}


def example_answer(content: str | None) -> Message:
    """Return a message that calls EXAMPLE_TOOL."""
    function = {"name": _CALL.name, "arguments": _CALL.arguments}
    # Mistral's templates refuse ids that do not have nine letters and digits
    call = {"type": "function", "id": "a1b2c3d40", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def example_result(calling: Message, content: str) -> Message:
    """Return a message with the result of the call in a message of `example_answer`."""
    (call,) = calling["tool_calls"]
    return {
        "role": "tool",
        "tool_call_id": call["id"],
        "name": call["function"]["name"],
        "content": content,
    }


def has_example_call(text: str) -> bool:
    """Return whether a text has the call of `example_answer`: its value, since a prompt may list
    the tool with all of its names."""
    return _CALL.arguments["town"] in text


@lru_cache(maxsize=32)
def _format_of(template: str, ends: EndTokens, variables: str) -> AnswerFormat:
    thoughts = thought_marks(template)
    write = partial(render, template, day="2026-01-01", **json.loads(variables))
    # a template that needs text fails on an object, or prints it in Python's form
    as_text = "tool" in template and not _takes_objects(write)
    # the marks of gpt-oss are known, and a call is a message in a channel
    if "<|channel|>" in template and "<|message|>" in template:
        return AnswerFormat(thoughts, channels=True, arguments_as_text=as_text)
    opening, closing = _around_content(write, ends)
    thought = _around_reasoning(write, ends, opening)
    if thought is not None and thought not in thoughts:
        thoughts = (*thoughts, thought)
    plain = AnswerFormat(
        thoughts, arguments_as_text=as_text, opening=opening, closing=closing
    )
    if "tool" in template:
        written = list(_written_calls(write, ends))
    else:
        written = []

    # of the marks that occur in the call, those with which it can be read back
    for marks in CALL_MARKS:
        found = replace(plain, calls=marks)
        if any(marks.opening in text and _reads(found, text) for text in written):
            return found
    return plain


def _example_turn(
    write: Render, answer: Message, ends: EndTokens, tools: list | None = None
) -> Turn | None:
    """Return the turn of an answer to EXAMPLE_QUESTION; None if the template cannot render it."""
    try:
        (rendered,) = assistant_turns(write, [EXAMPLE_QUESTION, answer], tools, ends)
    except ValueError:
        return None
    (turn,) = rendered.turns
    return turn


def _around_content(write: Render, ends: EndTokens) -> tuple[str, str]:
    """Return the special tokens that a template writes before and after the content of an answer,
    without those of its prompt and its end."""
    turn = _example_turn(write, {"role": "assistant", "content": _CONTENT}, ends)
    if turn is None:
        return "", ""
    text = turn.text[turn.answer : turn.end]
    end = max(
        (token for token in ends.special if text.endswith(token)), key=len, default=""
    )
    before, content, after = text.removesuffix(end).partition(_CONTENT)
    around = []
    for part in (before.strip(), after.strip()):
        is_mark = bool(content) and _has_special(part, ends)
        around.append(part if is_mark else "")
    return around[0], around[1]


def _around_reasoning(
    write: Render, ends: EndTokens, opening: str
) -> tuple[str, str] | None:
    """Return the texts that a template writes before and after reasoning, of which the second has a
    special token; None if there are none. Its source may put them together from parts.

    opening: of the content, after the reasoning.
    """
    answer = {"role": "assistant", "content": _CONTENT, "reasoning_content": _REASONING}
    turn = _example_turn(write, answer, ends)
    if turn is None:
        return None
    before, _, after = turn.text[turn.start : turn.end].partition(_REASONING)
    opened = ENDS_IN_OPEN_THOUGHT.search(turn.text, 0, turn.start)
    # the prompt may have opened it
    first = before.strip()
    if not first and opened:
        first = opened[0].strip()
    last = after.partition(_CONTENT)[0].strip().removesuffix(opening).strip()
    if first and _has_special(last, ends):
        return first, last
    return None


def _has_special(text: str, ends: EndTokens) -> bool:
    """Return whether a text has a special token: a mark of the answer's form, not a word that the
    model might write."""
    return any(token in text for token in ends.special if token)


def _takes_objects(write: Render) -> bool:
    """Return whether a template writes arguments that are an object; one that takes text fails, or
    writes Python's form."""
    # some templates write a call only if the content is null
    for content in ("", None):
        try:
            text = write([EXAMPLE_QUESTION, example_answer(content)], [EXAMPLE_TOOL])
        except ValueError:
            return False
        if has_example_call(text):
            return str(_CALL.arguments) not in text
    return True


def answer_format(template: str, special: dict[str, str], ends: EndTokens) -> AnswerFormat:
    """Return how a template writes answers. special: bos_token and other variables of the
    template."""
    # as text, since the arguments of a cached function must be hashable
    return _format_of(template, ends, json.dumps(special, sort_keys=True))


def _written_calls(write: Render, ends: EndTokens) -> Iterator[str]:
    """Yield what the template renders for a call after some content, and for a call alone."""
    # a template may write a call beside content and a call alone in different ways
    for content in (_CONTENT, ""):
        turn = _example_turn(write, example_answer(content), ends, [EXAMPLE_TOOL])
        if turn is None:
            continue
        text = turn.text[turn.start : turn.end]
        # the token that ends the turn is not a part of the call
        for token in ends.special:
            text = text.removesuffix(token)
        yield text


def _reads(answer_format: AnswerFormat, written: str) -> bool:
    """Return whether the call is read back from what the template has written."""
    # the prompt may have opened the thought that the answer closes
    in_thought = False
    for opening, closing in answer_format.thoughts:
        if closing in written and opening not in written:
            in_thought = True
    parsed = make_parser(answer_format, in_thought, [EXAMPLE_TOOL]).parse(written)
    return parsed.calls == [_CALL] and _CALL.name not in parsed.content


def opens_thought(prompt: str) -> bool:
    """Return whether a prompt ends in reasoning that is not closed."""
    return ENDS_IN_OPEN_THOUGHT.search(prompt) is not None


def is_in_thought(content: str) -> bool:
    """Return whether the beginning of an answer is reasoning that is not closed."""
    return OPENS_THOUGHT.match(content) is not None and not CLOSES_THOUGHT.search(content)


def end_of_thought(answer_format: AnswerFormat, prompt: str) -> str:
    """Return the text that ends the reasoning which a prompt has opened."""
    for opening, closing in reversed(answer_format.thoughts):
        if prompt.rstrip().endswith(opening):
            return closing
    return answer_format.thoughts[0][1]


@lru_cache(maxsize=1)
def _structure_texts() -> frozenset[str]:
    return frozenset((*call_texts(), *CHANNEL_MARKS))


def is_structure(text: str) -> bool:
    """Return whether a special token marks reasoning or calls, in any template."""
    return text in _structure_texts() or is_thought_mark(text)
