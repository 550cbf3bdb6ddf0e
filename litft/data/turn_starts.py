"""Where an assistant turn begins: after the prompt from which it is generated."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from litft.data.reasoning import ENDS_IN_CLOSED_THOUGHT, THINKING_OFF, THINKING_ON
from litft.data.turn_rendering import (
    CONTENT_MARK,
    OTHER_TEMPLATE,
    Places,
    TurnRendering,
    common_length,
    places_of,
)


@dataclass(frozen=True)
class BegunTurn:
    """A text with a turn behind the prompt that the model would see."""

    text: str
    start: int  # of the turn, where the prompt ends
    places: Places  # of the answer's parts in the text


def begun_turn(rendering: TurnRendering) -> BegunTurn:
    """Return the text of a conversation, with the prompt in front of its last message."""
    text = rendering.text()
    places = places_of(rendering, text)
    start = _turn_start(rendering, text, places.first)

    # the prompt has more than the beginning of the text, such as a system prompt before the last
    # message, which answers lack (Mistral Nemo): join it to what comes after the earlier messages
    if start is None:
        prompt = rendering.usual_prompt
        # without a usual prompt, `_turn_start` returns the start of the message
        assert prompt is not None
        before = next(
            (part for part in _before(text, places.first) if _ends_alike(prompt, part)),
            None,
        )
        if before is None:
            raise ValueError(
                f"the chat template renders a turn differently from its prompt; {OTHER_TEMPLATE}"
            )
        text = prompt + text[len(before) :]
        start = len(prompt)
        places = replace(places, first=places.first + start - len(before))
    prompt = _prompt_of_other_history(rendering, text, start)
    if prompt is not None:
        text = prompt + text[start:]
        places = replace(places, first=places.first + len(prompt) - start)
        start = len(prompt)
    return BegunTurn(text, start, places)


def _prompt_of_other_history(rendering: TurnRendering, text: str, start: int) -> str | None:
    """Return the generation prompt if the turn begins as after it, but follows another history.

    gpt-oss renders the reasoning before a tool call until an answer follows; Hermes 3 writes a line
    after the result of a tool, and Command R+ its instructions, only there. None: the text begins
    with a prompt of the template, or the prompt ends in another way.
    """
    prompt = rendering.usual_prompt
    if prompt is None or rendering.following or text.startswith(prompt):
        return None
    if text.endswith(prompt[rendering.opening_start :], 0, start):
        return prompt
    return None


def prompt_with_empty_thought(
    rendering: TurnRendering, text: str, start: int
) -> str | None:
    """Return the generation prompt if it ends as the text before an answer without reasoning, but
    for an empty thought (Gemma 4's with 31 billion weights); else None."""
    prompt = rendering.usual_prompt
    if prompt is None or rendering.following or text.startswith(prompt):
        return None
    thought = ENDS_IN_CLOSED_THOUGHT.search(prompt)
    if thought is None:
        return None
    opening = prompt[rendering.opening_start : thought.start()]
    if text[:start].rstrip().endswith(opening.rstrip()):
        return prompt
    return None


def _before(text: str, first: int) -> tuple[str, str]:
    """Return what precedes an answer, with and without the spaces that may be the answer's own."""
    return text[:first], text[:first].rstrip()


def _ends_alike(prompt: str, before: str) -> bool:
    """Return whether a prompt has all that comes before an answer, and more in front of it.

    Mistral Nemo's template renders the system prompt with the last message only if that is the
    user's.
    """
    common = common_length(prompt[::-1], before[::-1])
    rest = before[: len(before) - common]
    return bool(common) and prompt.startswith(rest)


def _turn_start(rendering: TurnRendering, text: str, first: int) -> int | None:
    """Return where a turn begins: after the generation prompt, of which thinking templates have
    several.

    None: the prompt has something in front of the last message that is left out before an answer.
    """
    prompt = rendering.usual_prompt
    # some templates render no empty conversation
    if prompt is None:
        return first
    thinking = rendering.answer.reasoning.strip()
    if thinking:
        variables = (*THINKING_ON, *THINKING_OFF)
    else:
        variables = (*THINKING_OFF, *THINKING_ON)

    # the usual prompt, else the first of those with thinking on or off that the text begins with
    if text.startswith(prompt) and len(prompt) <= first:
        return len(prompt)
    for switch in variables:
        other = rendering.prompt(**switch)
        if other is not None and text.startswith(other) and len(other) <= first:
            return len(other)
    # the earlier messages are rendered differently before an answer, or the prompt opens a thought
    # that answers lack: find the end of the prompt's own text, or of its beginning
    opening = prompt[rendering.opening_start :]
    floor = _end_of_earlier(rendering, text, first)
    for beginning in _beginnings(opening):
        position = text.rfind(beginning, floor, first)
        if position >= 0:
            return position + len(beginning)
    common = _outside_tag(text, common_length(prompt, text[:first]))
    # with a system prompt in front of the last message, the common part may end before it, or
    # within what looks like it
    if common >= max(floor, _end_in_prompt(rendering, prompt)):
        return common
    return None


def _end_of_earlier(rendering: TurnRendering, text: str, first: int) -> int:
    """Return where the content of the last earlier message ends in a text, whose answer begins at
    `first`; 0 if it is not found."""
    return _content_end(rendering, text[:first], TurnRendering.text)


def _end_in_prompt(rendering: TurnRendering, prompt: str) -> int:
    """Return where the content of the last earlier message ends in the prompt; 0 if it is not
    found."""
    return _content_end(rendering, prompt, lambda marked: marked.usual_prompt)


def _content_end(
    rendering: TurnRendering, text: str, render: Callable[[TurnRendering], str | None]
) -> int:
    """Return where the content of the last earlier message ends in a text that `render` gives;
    0 if it is not found."""
    if not rendering.earlier or not isinstance(rendering.earlier[-1].get("content"), str):
        return 0
    *earlier, last = rendering.earlier
    marked_last = {**last, "content": CONTENT_MARK}
    try:
        marked = render(replace(rendering, earlier=[*earlier, marked_last]))
    except ValueError:
        return 0
    if marked is None:
        return 0
    position = common_length(marked.partition(CONTENT_MARK)[0], text)
    # templates may strip the content
    for written in (last["content"], last["content"].strip()):
        if text.startswith(written, position):
            return position + len(written)
    return position


def _beginnings(opening: str) -> Iterator[str]:
    """Yield a generation prompt, then shorter beginnings of it that end with a tag or a line; none
    is blank."""
    if opening.strip():
        yield opening
    for length in range(len(opening) - 1, 0, -1):
        if opening[length - 1] in ">]\n" and opening[:length].strip():
            yield opening[:length]


def _outside_tag(text: str, position: int) -> int:
    """Return `position`, or the beginning of the tag that it would divide."""
    opened = max(text.rfind("<", 0, position), text.rfind("[", 0, position))
    closed = max(text.rfind(">", 0, position), text.rfind("]", 0, position))
    if opened > closed:
        return opened
    return position
