"""The question of a rendered prompt, for people to read."""

from collections.abc import Callable
from typing import NamedTuple

from litft.data.answer_format import EXAMPLE_QUESTION, example_answer, example_result
from litft.data.chat_template import Message
from litft.data.turn_rendering import common_length

RenderPrompt = Callable[[list[Message]], str]

# texts that no template contains
_MESSAGE = "user-message-mark"
_ANSWER = "assistant-message-mark"
_RESULT = "tool-result-mark"


class _UserMessage(NamedTuple):
    """What a template writes around a message of the user."""

    opening: str
    closing: str


def shown_question(prompt: str, render: RenderPrompt) -> str:
    """Return the last message of the user in a rendered prompt, or the whole prompt if none can be
    found in it.

    The result of a tool is not a message of the user, although some templates write it as one.
    render: renders messages up to the answer, with the template of the prompt.
    """
    around = _user_message(render)
    if around is None:
        return prompt
    result_opening = _tool_result_opening(render, around)
    # what precedes the first message is a system prompt, or nothing
    _, *parts = prompt.rstrip().split(around.opening)
    for part in reversed(parts):
        if result_opening and part.startswith(result_opening):
            continue
        message, closing, _ = part.partition(around.closing)
        if closing and message.strip():
            return message.strip()
    return prompt


def _user_message(render: RenderPrompt) -> _UserMessage | None:
    """Return what a template writes around messages of the user; None if that cannot be found."""
    question = {"role": "user", "content": _MESSAGE}
    earlier = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
    try:
        head, found, tail = render([question]).partition(_MESSAGE)
        later_head, found_later, later_tail = render([*earlier, question]).partition(
            _MESSAGE
        )
        history = render([question, *earlier[1:], earlier[0]])
    except ValueError:  # raised by the template
        return None
    if not found or not found_later or tail.rstrip() != later_tail.rstrip():
        return None

    # what stands before the first message of a conversation and before a later one
    length = common_length(head[::-1], later_head[::-1])
    opening = head[len(head) - length :].lstrip()
    # what follows a message that is answered already, and one that is to be answered
    answered_tail = history.partition(_MESSAGE)[2].partition(_ANSWER)[0]
    closing = tail[: common_length(tail, answered_tail)].rstrip()
    if not opening.strip() or not closing:
        return None
    return _UserMessage(opening, closing)


def _tool_result_opening(render: RenderPrompt, around: _UserMessage) -> str:
    """Return what a template writes before the result of a tool, inside of a message of the user;
    empty if results have a form of their own."""
    calling = example_answer("")
    result = example_result(calling, _RESULT)
    try:
        head, found, _ = render([EXAMPLE_QUESTION, calling, result]).partition(_RESULT)
    except ValueError:  # the template has no tools
        return ""
    last = head.rpartition(around.opening)[2]
    # a part with the closing in it is the question, and the result stands outside of it
    if not found or around.closing in last:
        return ""
    return last
