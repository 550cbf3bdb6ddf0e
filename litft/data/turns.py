"""The assistant's turns in a rendered conversation: what the model has to produce, and where
reasoning and turns end.

A turn is text that the template renders: after the generation prompt it contains the reasoning, the
content and every tool call, and ends with the token that ends the turn. A conversation for which
this cannot be found is refused with the reason.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from litft.data.chat_template import Message, Render
from litft.data.reasoning import (
    BOTH_ON,
    CLOSES_THOUGHT,
    EMPTY_THOUGHT,
    ENDS_IN_CLOSED_THOUGHT,
    ENDS_IN_EMPTY_THOUGHT,
    ENDS_IN_OPEN_THOUGHT,
    INLINE,
    OPENS_THOUGHT,
    THINKING_OFF,
    THINKING_ON,
    ReasonedAnswer,
    has_reasoning,
)
from litft.data.turn_ends import NO_ENDS, EndTokens, turn_end
from litft.data.turn_rendering import (
    OTHER_TEMPLATE,
    TurnRendering,
    check_complete,
    writes_think_tags,
)
from litft.data.turn_starts import begun_turn, prompt_with_empty_thought
from litft.data.variants import variants

# characters, more than any mark of a thought has
MARK_LENGTH = 40


@dataclass(frozen=True)
class Turn:
    """One assistant turn as the model generates it: text[start:end], with the end token.

    text[start:answer] is reasoning, or an empty thought that the template writes. empty_thought:
    there is one, here or at the end of the prompt, which that of generation does not have.
    other_prompt: text[:start] differs otherwise from the prompt of generation. thought_is_off:
    there is reasoning, which the prompt of generation switches off.
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


@dataclass(frozen=True)
class TurnContext:
    """What the turns of a conversation share."""

    render: Render
    # the messages as they are in the prompts of later answers
    history: list[Message]
    tools: list | None
    ends: EndTokens


def assistant_turns(
    render: Render,
    messages: list[Message],
    tools: list | None = None,
    ends: EndTokens = NO_ENDS,
    history: list[Message] | None = None,
) -> list[RenderedTurns]:
    """Return the rendered conversation as texts, each with the assistant turns to train on.

    history: the messages as the prompts of later answers have them at inference: see
    `history.readable_history`. None: as the turns themselves are written.

    Usually the result is one text with all turns. If the template renders a turn differently once
    others follow (it drops the reasoning, or ends the turn with another token or none), the turn
    has a text of its own, as the model reads it when it generates the turn.

    The conversation is rendered as it is, as transformers does, if the turns then contain all that
    the model has to produce. Otherwise the spellings of reasoning and tool calls that other
    templates read are tried. Raises ValueError if none of them works.
    """
    reasons = any(has_reasoning(message) for message in messages)
    inline = any(
        ReasonedAnswer.read(message).spelling == INLINE for message in _answers(messages)
    )
    spells_inline = reasons and writes_think_tags(render, tools)
    context = TurnContext(render, history or [], tools, ends)
    first_error = None
    # some templates write reasoning only where thinking is switched on
    switches = ({}, BOTH_ON) if reasons else ({},)
    # the turns of the conversation with its inline reasoning as it is, and the form of its calls
    plain = None
    plain_calls = None
    for variant in variants(messages, spells_inline):
        if history is None:
            context = replace(context, history=variant.messages)
        # another form of the calls is not another spelling of the reasoning
        if plain is not None and variant.calls != plain_calls:
            continue
        for variables in switches:
            try:
                texts = _texts(context, variant.messages, variables)
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
            if not _count(texts, _closes_unopened):
                return _better(plain, texts, reasons)
    if plain is not None:
        return plain
    if reasons:
        try:
            return _generated_texts(replace(context, history=history or messages), messages)
        except ValueError:
            pass
    # the first variant, the conversation as it is, has failed: otherwise there were plain texts
    assert first_error is not None
    raise first_error


def _better(
    plain: list[RenderedTurns] | None, respelled: list[RenderedTurns], reasons: bool
) -> list[RenderedTurns]:
    """Choose between inline reasoning as it is and in another spelling.

    To a template with marks of its own, inline reasoning is text. If what is learned is the same
    but for spaces, the template knows it; an empty thought may then be left out.
    """
    if plain is None:
        return respelled
    # the opening mark may be in the prompt, where the other spelling has it
    is_lost = _count(plain, _closes_unopened) or (
        _count(plain, _has_other_prompt) > _count(respelled, _has_other_prompt)
    )
    if reasons and is_lost:
        return respelled
    if (_learned(plain) == _learned(respelled)) == reasons:
        return plain
    return respelled


def _count(texts: list[RenderedTurns], condition: Callable[[Turn], bool]) -> int:
    """Return how many turns meet a condition."""
    return sum(condition(turn) for rendered in texts for turn in rendered.turns)


def _has_other_prompt(turn: Turn) -> bool:
    return turn.other_prompt


def _learned(texts: list[RenderedTurns]) -> list[str]:
    """Return the learned text of each turn, without white space."""
    learned = []
    for rendered in texts:
        for turn in rendered.turns:
            learned.append("".join(turn.text[turn.start : turn.end].split()))
    return learned


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


def _texts(
    context: TurnContext, messages: list[Message], variables: dict[str, Any]
) -> list[RenderedTurns]:
    """Return the texts of the answers in `messages`; variables: of the template."""
    turns = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            rendering = TurnRendering(
                render=context.render,
                earlier=context.history[:index],
                message=message,
                tools=context.tools,
                # an answer without reasoning is generated without them
                variables=variables if has_reasoning(message) else {},
            )
            if not _renders(rendering):
                rendering = replace(
                    rendering, following=_up_to_question(messages[index + 1 :])
                )
            turns.append(_turn(rendering, context.ends))
    return _joined(turns, context.ends)


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
    """Return texts with all turns: a turn is in the text of the next one if that begins with it."""
    texts: list[RenderedTurns] = []
    for turn in reversed(turns):
        beginning = turn.text[: turn.end]
        # the end of a turn is known by a special token only; without one, what follows could
        # belong to it
        is_known = beginning.endswith(ends.special)
        if texts and is_known and texts[-1].text.startswith(beginning):
            texts[-1].turns.insert(0, turn)
        else:
            texts.append(RenderedTurns(turn.text, [turn]))
    return texts[::-1]


def _turn(rendering: TurnRendering, ends: EndTokens) -> Turn:
    """Return the last message of a conversation as a turn."""
    begun = begun_turn(rendering)
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
        if is_inline:
            _check_not_repeated(text, start)
        if is_inline and CLOSES_THOUGHT.search(text, answer, places.first):
            raise ValueError(
                "the chat template writes an empty thought as a part of the answer; "
                f"{OTHER_TEMPLATE}"
            )
        prompt = prompt_with_empty_thought(rendering, text, start)
        if prompt is not None:
            text = prompt + text[answer:]
            end += len(prompt) - answer
            start = answer = len(prompt)
            empty = None
            if is_inline:
                _check_not_repeated(text, start)
    turn = Turn(
        message=len(rendering.earlier),
        text=text,
        start=start,
        answer=min(answer, end),
        end=end,
        empty_thought=bool(empty),
    )
    return _compared_with_generation(rendering, turn)


def _compared_with_generation(rendering: TurnRendering, turn: Turn) -> Turn:
    """Return a turn that says how its prompt differs from that of generation."""
    generation = rendering.generation_prompt
    if generation is None or turn.text[: turn.start] == generation:
        return turn
    if rendering.answer.reasoning.strip():
        # a prompt with other variables switches thinking on, one without a closed thought, too
        closes_thought = ENDS_IN_CLOSED_THOUGHT.search(generation) is not None
        is_off = bool(rendering.variables) or closes_thought
        return replace(turn, thought_is_off=is_off, other_prompt=not is_off)
    without_thinking = [rendering.prompt(**switch) for switch in THINKING_OFF]
    # the second one is with the empty thought that the template writes
    for prompt in (turn.text[: turn.start], turn.text[: turn.answer]):
        is_off = prompt == generation or prompt in without_thinking
        if is_off or ENDS_IN_EMPTY_THOUGHT.search(prompt):
            return replace(turn, empty_thought=True)
    return replace(turn, other_prompt=True)


def _check_single_thought(text: str, start: int, has_empty: bool) -> None:
    """Raise ValueError if a turn with reasoning has another thought before it, or an opening mark
    twice.

    Templates with marks of their own take inline reasoning for a part of the answer.
    """
    if has_empty:
        raise ValueError(
            f"the chat template writes an empty thought of its own; {OTHER_TEMPLATE}"
        )
    if _follows_thought(text, start):
        raise ValueError(
            "the prompt of the chat template has an empty thought before the reasoning; "
            f"{OTHER_TEMPLATE}"
        )
    if _is_opened_twice(text, start):
        raise ValueError(f"the chat template opens a thought twice; {OTHER_TEMPLATE}")


def _follows_thought(text: str, start: int) -> bool:
    """Return whether the prompt, text[:start], ends with a closed thought."""
    first = max(start - 2 * MARK_LENGTH, 0)
    return ENDS_IN_CLOSED_THOUGHT.search(text, first, start) is not None


def _is_opened_twice(text: str, start: int) -> bool:
    """Return whether the prompt, text[:start], ends with an opening mark, and a turn begins with
    one."""
    # looked at first: the search reads the whole prompt
    if not OPENS_THOUGHT.match(text, start):
        return False
    return ENDS_IN_OPEN_THOUGHT.search(text, 0, start) is not None


def _check_not_repeated(text: str, start: int) -> None:
    """Raise ValueError if an empty thought of the record comes after one, or after an opening mark,
    of the prompt."""
    after_thought = _follows_thought(text, start) and EMPTY_THOUGHT.match(text, start)
    after_mark = _is_opened_twice(text, start)
    if after_thought or after_mark:
        raise ValueError(
            f"the chat template writes an empty thought of its own; {OTHER_TEMPLATE}"
        )


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


def _generated_texts(context: TurnContext, messages: list[Message]) -> list[RenderedTurns]:
    """Return the turns as the model generates them, where the prompt opens a thought that finished
    turns leave out.

    DeepSeek R1's template renders no reasoning at all: its prompt ends with <think>, and what the
    model writes is cut after </think> before it is rendered. Raises ValueError if the prompt opens
    no thought.
    """
    texts = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            rendering = TurnRendering(
                render=context.render,
                earlier=context.history[:index],
                message=message,
                tools=context.tools,
            )
            turn = _generated_turn(rendering, context.ends)
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
        # DeepSeek V3.1 opens a thought only where thinking is switched on
        thought_is_off=prompt != rendering.generation_prompt,
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
