"""The assistant's turns in a rendered conversation: what the model has to produce, and where
reasoning and turns end.

A turn is text that the template renders: after the generation prompt it contains the reasoning, the
content and every tool call, and ends with the token that ends the turn. A conversation for which
this cannot be found is refused with the reason.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from litft.data.chat_template import Message, Render
from litft.data.reasoning import (
    CLOSES_THOUGHT,
    EMPTY_THOUGHT,
    ENDS_IN_EMPTY_THOUGHT,
    ENDS_IN_OPEN_THOUGHT,
    INLINE,
    OPENS_THOUGHT,
    ReasonedAnswer,
    has_reasoning,
)
from litft.data.turn_ends import NO_ENDS, EndTokens, turn_end
from litft.data.turn_rendering import (
    CONTENT_MARK,
    OTHER_TEMPLATE,
    Places,
    TurnRendering,
    check_complete,
    common_length,
    places_of,
)
from litft.data.variants import variants

# variables with which templates switch thinking on and off
THINKING_ON = ({"enable_thinking": True}, {"thinking": True})
THINKING_OFF = ({"enable_thinking": False}, {"thinking": False})
BOTH_ON = {"enable_thinking": True, "thinking": True}

# characters, more than any mark of a thought has
MARK_LENGTH = 40


@dataclass(frozen=True)
class Turn:
    """One assistant turn as the model generates it: text[start:end], with the end token.

    text[start:answer] is reasoning, or an empty thought that the template writes. other_prompt: the
    prompt is that of the conversation's history, as the prompt of generation opens a thought.
    thought_is_off: there is reasoning, but the prompt of generation has an empty thought.
    """

    message: int  # its index in the conversation
    text: str
    start: int
    answer: int
    end: int
    empty_thought: bool = False
    other_prompt: bool = False
    thought_is_off: bool = False


@dataclass(frozen=True)
class RenderedTurns:
    """A text with the assistant turns to train on."""

    text: str
    turns: list[Turn]


def assistant_turns(
    render: Render,
    messages: list[Message],
    tools: list | None = None,
    ends: EndTokens = NO_ENDS,
) -> list[RenderedTurns]:
    """Return the rendered conversation as texts, each with the assistant turns to train on.

    Usually the result is one text with all turns. If the template renders a turn differently once
    others follow (it drops the reasoning, or ends the turn with another token or none), each turn
    has a text of its own, as the model reads it when it generates the turn.

    The conversation is rendered as it is, as transformers does, if the turns then contain all that
    the model has to produce. Otherwise the spellings of reasoning and tool calls that other
    templates read are tried. Raises ValueError if none of them works.
    """
    reasons = any(has_reasoning(message) for message in messages)
    inline = any(
        ReasonedAnswer.read(message).spelling == INLINE for message in _answers(messages)
    )
    spells_inline = reasons and _writes_think_tags(render, tools)
    first_error = None
    # some templates write reasoning only where thinking is switched on
    switches = ({}, BOTH_ON) if reasons else ({},)
    # the turns of the conversation with its inline reasoning as it is, and the form of its calls
    plain = None
    plain_calls = None
    for variant in variants(messages, spells_inline):
        # another form of the calls is not another spelling of the reasoning
        if plain is not None and variant.calls != plain_calls:
            continue
        for variables in switches:
            try:
                texts = _texts(partial(render, **variables), variant.messages, tools, ends)
            except ValueError as error:
                first_error = first_error or error
                continue
            if not inline:
                return texts
            # inline reasoning may be plain text to this template: compare with another spelling
            if variant.is_as_written:
                plain = texts
                plain_calls = variant.calls
                break
            if not any(
                _closes_unopened(turn) for rendered in texts for turn in rendered.turns
            ):
                return _better(plain, texts, reasons)
    if plain is not None:
        return plain
    if reasons:
        try:
            return _generated_texts(render, messages, tools, ends)
        except ValueError:
            pass
    # the first variant, the conversation as it is, has failed: otherwise there were plain texts
    assert first_error is not None
    raise first_error


def _better(
    plain: list[RenderedTurns] | None, respelled: list[RenderedTurns], reasons: bool
) -> list[RenderedTurns]:
    """Choose between inline reasoning as it is and in another spelling.

    To a template with marks of its own, inline reasoning is text. If both give the same text but
    for spaces, the template knows it; an empty thought may then be left out.
    """
    if plain is None:
        return respelled
    texts = [
        "".join("".join(rendered.text.split()) for rendered in turns)
        for turns in (plain, respelled)
    ]
    if (texts[0] == texts[1]) == reasons:
        return plain
    return respelled


def _closes_unopened(turn: Turn) -> bool:
    """Return whether a turn has a mark that ends a thought, but neither it nor its prompt has one
    that opens it."""
    closing = CLOSES_THOUGHT.search(turn.text, turn.start, turn.answer)
    opened = ENDS_IN_OPEN_THOUGHT.search(turn.text, 0, turn.start)
    return bool(
        closing
        and not turn.empty_thought
        and not opened
        and not OPENS_THOUGHT.match(turn.text, turn.start)
    )


def _answers(messages: list[Message]) -> Iterator[Message]:
    return (message for message in messages if message["role"] == "assistant")


def _writes_think_tags(render: Render, tools: list | None) -> bool:
    """Return whether a prompt of the template has <think>, or a system prompt that asks for it, in
    any mode."""
    rendering = TurnRendering(
        render,
        [{"role": "user", "content": "a"}],
        {"role": "assistant", "content": "b"},
        tools,
    )
    prompts = [rendering.prompt(**switch) for switch in ({}, *THINKING_ON, *THINKING_OFF)]
    return any(prompt is not None and "<think>" in prompt for prompt in prompts)


def _texts(
    render: Render, messages: list[Message], tools: list | None, ends: EndTokens
) -> list[RenderedTurns]:
    turns = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            rendering = TurnRendering(render, messages[:index], message, tools)
            if not _renders(rendering):
                rendering = replace(
                    rendering, following=_up_to_question(messages[index + 1 :])
                )
            turns.append(_turn(rendering, ends))
    return _joined(turns, ends)


def _renders(rendering: TurnRendering) -> bool:
    """Return whether the template renders a conversation that ends with this answer."""
    try:
        rendering.text()
    except ValueError:
        return False
    return True


def _up_to_question(messages: list[Message]) -> list[Message]:
    """Return the messages up to the first of the user, which some templates need in every
    conversation."""
    for index, message in enumerate(messages):
        if message["role"] == "user":
            return messages[: index + 1]
    return []


def _joined(turns: list[Turn], ends: EndTokens) -> list[RenderedTurns]:
    """Return one text with all turns if each is a beginning of the last one's text, else a text for
    each turn."""
    full_text = turns[-1].text
    earlier = turns[:-1]
    # the end of a turn is known by a special token
    # only; without one, what follows could belong to it
    end_known = all(turn.text[: turn.end].endswith(ends.special) for turn in earlier)
    if end_known and all(full_text.startswith(turn.text[: turn.end]) for turn in earlier):
        return [RenderedTurns(full_text, turns)]
    return [RenderedTurns(turn.text, [turn]) for turn in turns]


@dataclass(frozen=True)
class BegunTurn:
    """A text with a turn behind the prompt that the model would see."""

    text: str
    start: int  # of the turn, where the prompt ends
    places: Places  # of the answer's parts in the text


def _with_its_prompt(rendering: TurnRendering) -> BegunTurn:
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
    # gpt-oss: the prompt has another history than the text before the turn, and replaces it
    prompt = _prompt_of_other_history(rendering, text, start, places.first)
    if prompt is not None:
        text = prompt + text[start:]
        places = replace(places, first=places.first + len(prompt) - start)
        start = len(prompt)
    return BegunTurn(text, start, places)


def _turn(rendering: TurnRendering, ends: EndTokens) -> Turn:
    """Return the last message of a conversation as a turn."""
    begun = _with_its_prompt(rendering)
    text = begun.text
    start = begun.start
    places = begun.places
    has_thought = bool(rendering.answer.reasoning.strip())
    opened = ENDS_IN_OPEN_THOUGHT.search(text, 0, start) and not CLOSES_THOUGHT.search(
        text, start
    )
    if opened and not has_thought and not rendering.following and not rendering.calls:
        # the prompt opens a thought that the last answer does not close; once others follow, the
        # template leaves it out
        return _turn(rendering.followed(), ends)
    if opened and not has_thought:
        raise ValueError(
            "the chat template renders the answer inside a thought that is never closed; "
            f"{OTHER_TEMPLATE}"
        )
    text, end = turn_end(rendering, text, places.tail, ends)
    check_complete(rendering, text[start:end], places)

    # an empty thought that reaches into the content is the record's, not the template's; white
    # space after it may be the answer's own
    empty = EMPTY_THOUGHT.match(text, start, end)
    if empty and start + len(empty[0].rstrip()) > places.first:
        empty = None
    if empty and EMPTY_THOUGHT.match(text, empty.end(), end):
        raise ValueError(
            f"the chat template writes an empty thought of its own; {OTHER_TEMPLATE}"
        )
    if has_thought:
        _check_single_thought(text, start, has_empty=bool(empty))
        answer = _answer_start(rendering, text, max(start, places.first), ends)
        _check_calls_after_thought(rendering, text[answer:end])
    else:
        if empty:
            thought_end = min(empty.end(), places.first)
            answer = _after_empty_thought(rendering, text, start, thought_end)
        else:
            answer = start
        is_inline = rendering.answer.spelling == INLINE
        if is_inline and CLOSES_THOUGHT.search(text, answer, places.first):
            raise ValueError(
                "the chat template writes an empty thought as a part of the answer; "
                f"{OTHER_TEMPLATE}"
            )
    return Turn(
        message=len(rendering.earlier),
        text=text,
        start=start,
        answer=min(answer, end),
        end=end,
        empty_thought=bool(empty),
        other_prompt=not has_thought and _lacks_open_thought(rendering, text[:start]),
        thought_is_off=has_thought and _has_empty_thought(rendering.usual_prompt),
    )


def _prompt_of_other_history(
    rendering: TurnRendering, text: str, start: int, first: int
) -> str | None:
    """Return the generation prompt if it has another history than the text before the turn.

    gpt-oss renders the reasoning before a tool call until an answer follows. None: the text begins
    with a prompt of the template, or they differ after the earlier messages.
    """
    prompt = rendering.usual_prompt
    if prompt is None or rendering.following or text.startswith(prompt):
        return None
    floor = _end_of_earlier(rendering, text, first)
    opening = text[floor:start]
    if common_length(prompt, text) < floor and opening.strip() and prompt.endswith(opening):
        return prompt
    return None


def _has_empty_thought(prompt: str | None) -> bool:
    """Return whether a generation prompt ends with a thought that is closed."""
    return prompt is not None and ENDS_IN_EMPTY_THOUGHT.search(prompt) is not None


def _lacks_open_thought(rendering: TurnRendering, prompt: str) -> bool:
    """Return whether generation has a prompt with a thought, open or empty, and never this one."""
    usual = rendering.usual_prompt
    if usual is None or usual == prompt:
        return False
    if not ENDS_IN_OPEN_THOUGHT.search(usual) and not ENDS_IN_EMPTY_THOUGHT.search(usual):
        return False
    return all(rendering.prompt(**switch) != prompt for switch in THINKING_OFF)


def _check_single_thought(text: str, start: int, has_empty: bool) -> None:
    """Raise ValueError if a turn with reasoning has another thought before it, or an opening mark
    twice.

    Templates with marks of their own take inline reasoning for a part of the answer.
    """
    if has_empty:
        raise ValueError(
            f"the chat template writes an empty thought of its own; {OTHER_TEMPLATE}"
        )
    if ENDS_IN_EMPTY_THOUGHT.search(text, max(start - 2 * MARK_LENGTH, 0), start):
        raise ValueError(
            "the prompt of the chat template has an empty thought before the reasoning; "
            f"{OTHER_TEMPLATE}"
        )
    if ENDS_IN_OPEN_THOUGHT.search(text, 0, start) and OPENS_THOUGHT.match(text, start):
        raise ValueError(f"the chat template opens a thought twice; {OTHER_TEMPLATE}")


def _check_calls_after_thought(rendering: TurnRendering, after: str) -> None:
    """Raise ValueError if a template writes a call before the reasoning, with which it would be
    masked; `after`: what follows the reasoning."""
    for call in rendering.calls:
        if call["function"]["name"] not in after:
            raise ValueError(
                f"the chat template writes a tool call before the reasoning; {OTHER_TEMPLATE}"
            )


def _after_empty_thought(rendering: TurnRendering, text: str, start: int, end: int) -> int:
    """Return where the answer begins after an empty thought; `end`: of the thought and the spaces
    after it.

    The prompt without thinking shows which spaces are the thought's. They may be those before a
    tool call.
    """
    for switch in THINKING_OFF:
        prompt = rendering.prompt(**switch)
        if prompt is not None and len(prompt) > start and text.startswith(prompt):
            return len(prompt)
    has_content = rendering.answer.answer.strip()
    if has_content:
        return end
    return start + len(text[start:end].rstrip())


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
    before = rendering.before()
    opening = prompt[common_length(before, prompt) :]
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


def _answer_start(rendering: TurnRendering, text: str, first: int, ends: EndTokens) -> int:
    """Return where the answer begins after its reasoning: with what the template writes before an
    answer without any.

    first: where the reasoning begins.
    """
    reasoning = rendering.answer.reasoning.strip()
    found = text.find(reasoning, first)
    after_reasoning = first if found < 0 else found + len(reasoning)
    close = CLOSES_THOUGHT.search(text, after_reasoning)
    fallback = close.end() if close else after_reasoning

    # the same turn without reasoning shows what the answer consists of
    try:
        bare = _turn(rendering.without_reasoning(), ends)
    except ValueError:
        return fallback
    position = text.rfind(bare.text[bare.answer : bare.end], after_reasoning)
    if position >= 0:
        return position
    return fallback


def _generated_texts(
    render: Render, messages: list[Message], tools: list | None, ends: EndTokens
) -> list[RenderedTurns]:
    """Return the turns as the model generates them, where the prompt opens a thought that finished
    turns leave out.

    DeepSeek R1's template renders no reasoning at all: its prompt ends with <think>, and what the
    model writes is cut after </think> before it is rendered. Raises ValueError if the prompt opens
    no thought.
    """
    texts = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            turn = _generated_turn(
                TurnRendering(render, messages[:index], message, tools), ends
            )
            texts.append(RenderedTurns(turn.text, [turn]))
    return texts


def _generated_turn(rendering: TurnRendering, ends: EndTokens) -> Turn:
    """Return a turn of its prompt, which opens a thought, the reasoning, and what the template
    renders without it."""
    answer = rendering.answer
    bare = _turn(rendering.without_reasoning(), ends)
    if not answer.reasoning.strip():
        return bare
    prompt = _thinking_prompt(rendering)
    closes_line = prompt.endswith("\n") or answer.spelling == INLINE
    thought = answer.reasoning + (answer.closing if closes_line else "</think>")
    start = len(prompt)
    answer_start = start + len(thought)
    return Turn(
        message=bare.message,
        text=prompt + thought + bare.text[bare.answer :],
        start=start,
        answer=answer_start,
        end=answer_start + bare.end - bare.answer,
    )


def _thinking_prompt(rendering: TurnRendering) -> str:
    """Return the generation prompt that ends with <think>; raise ValueError if there is none."""
    for switch in ({}, *THINKING_ON):
        prompt = rendering.prompt(**switch)
        if prompt is not None and prompt.rstrip().endswith("<think>"):
            return prompt
    raise ValueError(
        f"the chat template leaves out the assistant's reasoning; {OTHER_TEMPLATE}"
    )
