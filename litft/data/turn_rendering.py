"""An assistant message as a chat template renders it: where its values are in the text, and whether
all of them are."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from litft.data.chat_template import Message, Render
from litft.data.reasoning import (
    INLINE,
    PARTS,
    THINKING_OFF,
    THINKING_ON,
    ReasonedAnswer,
    prints_parts,
)

# stand for the reasoning, the content and the last argument of a message in a second rendering,
# which shows where they are
REASONING_MARK = "qzxreasoningxzq"
CONTENT_MARK = "qzxcontentxzq"
ARGUMENT_MARK = "qzxargumentxzq"

OTHER_TEMPLATE = (
    "pass another --data.template, such as the chat_template.jinja of a "
    "model that supports it"
)


@dataclass(frozen=True)
class TurnRendering:
    """Renders the messages before an assistant message, that message or a changed one, and what
    follows it."""

    render: Render
    earlier: list[Message]
    message: Message
    tools: list | None
    following: list[Message] = field(default_factory=list)
    # the message taken apart, if it is not to be read anew
    split: ReasonedAnswer | None = None
    # of the template, which the prompt of generation does not have
    variables: dict[str, Any] = field(default_factory=dict)

    @property
    def answer(self) -> ReasonedAnswer:
        """The reasoning and the answer of the message."""
        if self.split is not None:
            return self.split
        if self.content_is_text:
            return ReasonedAnswer.read(self.message)
        return _read_parts(self.message)

    @property
    def content_is_text(self) -> bool:
        return not isinstance(self.message.get("content"), list)

    @property
    def calls(self) -> list[dict[str, Any]]:
        return self.message.get("tool_calls") or []

    @property
    def next_message(self) -> Message:
        """A message that may follow: the result of the last call, or the user."""
        if not self.calls:
            return {"role": "user", "content": "next"}
        call = self.calls[-1]
        result = {"role": "tool", "name": call["function"]["name"], "content": "result"}
        # templates match a result with its call by the id
        if "id" in call:
            return {**result, "tool_call_id": call["id"]}
        return result

    def text(self, message: Message | None = None) -> str:
        """Render everything, with `message` in place of the assistant's."""
        messages = [*self.earlier, message or self.message, *self.following]
        return self.render(messages, tools=self.tools, **self.variables)

    @cached_property
    def generation_prompt(self) -> str | None:
        """The prompt with which the answer is generated; None if the template cannot render it."""
        return self._prompt({})

    @cached_property
    def usual_prompt(self) -> str | None:
        """The generation prompt with `variables`; None if the template cannot render it."""
        if not self.variables:
            return self.generation_prompt
        return self._prompt(self.variables)

    def prompt(self, **switch: Any) -> str | None:
        """Render the generation prompt with `variables` and others; None if the template cannot."""
        return self._prompt({**self.variables, **switch})

    def _prompt(self, variables: dict[str, Any]) -> str | None:
        try:
            return self.render(
                self.earlier, tools=self.tools, add_generation_prompt=True, **variables
            )
        except ValueError:
            return None

    @cached_property
    def opening_start(self) -> int:
        """Where the usual prompt leaves the earlier messages, and opens the turn."""
        return common_length(self.before(), self.usual_prompt or "")

    def before(self) -> str:
        """Render the messages before the assistant's without a generation prompt; "" if the
        template cannot."""
        try:
            return self.render(self.earlier, tools=self.tools, **self.variables)
        except ValueError:
            return ""

    def without_reasoning(self) -> "TurnRendering":
        """Return the rendering of the message without its reasoning."""
        bare = self.answer.bare()
        return replace(self, message=bare.write(), split=bare)

    def followed(self) -> "TurnRendering":
        """Return the rendering in which another message follows."""
        return replace(self, following=[self.next_message])


def writes_think_tags(render: Render, tools: list | None) -> bool:
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


def _read_parts(message: Message) -> ReasonedAnswer:
    """Take a message apart whose content is a list of parts: see `reasoning.PARTS`."""
    rest = {}
    for name, value in message.items():
        if name != "content":
            rest[name] = value
    texts = {"thinking": "", "text": ""}
    for part in message["content"]:
        texts[part["type"]] += part[part["type"]]
    return ReasonedAnswer(rest, texts["thinking"], texts["text"], PARTS)


@dataclass(frozen=True)
class Places:
    """Where a rendered text has what the model produces: the first of it begins at `first`; `tail`
    follows the last.

    tail: None if the last is not found. has_reasoning, has_content: whether they are rendered; None
    if that cannot be told.
    """

    first: int
    tail: str | None
    has_reasoning: bool | None = None
    has_content: bool | None = None


def places_of(rendering: TurnRendering, text: str) -> Places:
    """Find the places in `text` by rendering the message once more, with marks for its values."""
    answer = rendering.answer
    has_content = bool(answer.answer.strip())
    # all marks at once, else those of one kind: a template may check the arguments, or leave out
    # the content beside calls
    choices = [(True, True)]
    if rendering.calls:
        choices += [(has_content, False), (False, True)]
    for with_texts, with_calls in choices:
        marked_message = _marked(rendering, with_texts, with_calls)
        try:
            marked = rendering.text(marked_message)
        except ValueError:
            continue
        found = []
        for mark in (REASONING_MARK, CONTENT_MARK, ARGUMENT_MARK):
            if mark in marked:
                found.append(mark)
        if not found:
            continue

        # values may be rendered in any order
        first = min(marked.index(mark) for mark in found)
        after = marked[max(marked.rindex(mark) + len(mark) for mark in found) :]
        # shorter than what follows the mark if that depends
        # on the value: a number has no quotation marks
        length = common_length(after[::-1], text[::-1])
        # up to the first value, both renderings are the same text
        places = Places(common_length(marked[:first], text), text[len(text) - length :])
        if not with_texts:
            return places
        return replace(
            places,
            has_reasoning=REASONING_MARK in found,
            has_content=CONTENT_MARK in found,
        )
    return Places(len(text), None)


def _marked(rendering: TurnRendering, with_texts: bool, with_calls: bool) -> Message:
    """Return the message with marks in place of reasoning and content, and of the last call's
    arguments."""
    answer = rendering.answer
    if with_texts and answer.reasoning.strip():
        answer = replace(answer, reasoning=REASONING_MARK)
    if with_texts and answer.answer.strip():
        answer = replace(answer, answer=CONTENT_MARK)
    marked = answer.write()
    # some templates treat null and an empty text differently
    if rendering.message.get("content") is None and not answer.answer:
        marked["content"] = None
    if with_calls and rendering.calls:
        *calls, last = rendering.calls
        # the arguments keep their form, which the template may depend on
        arguments: Any = {ARGUMENT_MARK: ARGUMENT_MARK}
        if isinstance(last["function"]["arguments"], str):
            arguments = json.dumps(arguments)
        marked["tool_calls"] = [
            *calls,
            {**last, "function": {**last["function"], "arguments": arguments}},
        ]
    return marked


def check_complete(rendering: TurnRendering, span: str, places: Places) -> None:
    """Raise ValueError if a turn lacks content, reasoning or a tool call."""
    answer = rendering.answer
    content = answer.answer.strip()
    # the words of the content may also be those of a call
    if content and (content not in span or places.has_content is False):
        raise ValueError(
            f"the chat template leaves out the assistant's content; {OTHER_TEMPLATE}"
        )
    reasoning = answer.reasoning.strip()
    printed = not rendering.content_is_text and prints_parts(span)
    if reasoning and (reasoning not in span or printed or places.has_reasoning is False):
        name = answer.spelling if answer.spelling != INLINE else "reasoning"
        reason = f"the chat template leaves out the assistant's {name}"
        raise ValueError(
            f"{reason}; train without it (--data.reasoning drop), or {OTHER_TEMPLATE}"
        )

    # calls are rendered in their order: look for each one after the name of the previous one
    rest = span
    for number, call in enumerate(rendering.calls):
        position = rest.find(call["function"]["name"])
        is_found = position >= 0 and _has_arguments(rendering, number, rest[position:])
        # the words of a call may also be those of the content, or of another call
        if is_found and _is_ambiguous(rendering, call["function"]["name"]):
            is_found = _changes_text(rendering, number)
        if not is_found:
            reason = (
                "the chat template leaves out a tool call (no built-in template has tools)"
            )
            raise ValueError(f"{reason}; {OTHER_TEMPLATE}")
        rest = rest[position + len(call["function"]["name"]) :]


def _is_ambiguous(rendering: TurnRendering, name: str) -> bool:
    """Return whether the content, or the arguments of a call, have a function's name."""
    if name in rendering.answer.answer:
        return True
    for call in rendering.calls:
        if name in json.dumps(call["function"]["arguments"], ensure_ascii=False):
            return True
    return False


def _has_arguments(rendering: TurnRendering, number: int, text: str) -> bool:
    """Return whether a text has the names and values of a call's arguments; if unclear, whether
    they change it."""
    arguments = rendering.calls[number]["function"]["arguments"]
    if isinstance(arguments, str):
        return arguments in text or _changes_text(rendering, number)
    if all(any(form in text for form in _forms(value)) for value in _leaves(arguments)):
        return True
    return _changes_text(rendering, number)


def _changes_text(rendering: TurnRendering, number: int) -> bool:
    """Return whether the template renders another text for other arguments of a call."""
    calls = list(rendering.calls)
    function = calls[number]["function"]
    if isinstance(function["arguments"], str):
        other = json.dumps({ARGUMENT_MARK: 0})
    else:
        other = {ARGUMENT_MARK: 0}
    calls[number] = {**calls[number], "function": {**function, "arguments": other}}
    try:
        return ARGUMENT_MARK in rendering.text({**rendering.message, "tool_calls": calls})
    except ValueError:
        return False


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the names and values inside a JSON value."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def _forms(value: Any) -> tuple[str, ...]:
    """Return how templates may write a value: as JSON, as JSON in ASCII, as Python does, or as
    plain text."""
    if isinstance(value, str):
        return (
            value,
            value.strip() or value,
            json.dumps(value, ensure_ascii=False)[1:-1],
            json.dumps(value)[1:-1],
            repr(value)[1:-1],
        )
    return (json.dumps(value), repr(value))


def common_length(first: str, second: str) -> int:
    """Return the length of the common beginning of two texts."""
    # bisection over slices, which are compared much faster than characters in a loop
    low = 0
    high = min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[:middle] == second[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
