"""The spellings of reasoning and of tool calls in which templates read a conversation."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from litft.data.chat_template import Message
from litft.data.messages import with_arguments_as_text
from litft.data.reasoning import (
    spellings,
)


class CallForm(NamedTuple):
    """A form of messages with tool calls."""

    no_content: bool  # null in place of empty content
    as_text: bool  # the arguments are JSON text


class Variant(NamedTuple):
    """A conversation in another spelling."""

    messages: list[Message]
    is_as_written: bool  # its reasoning has the spelling of the record
    calls: CallForm


def variants(messages: list[Message], spells_inline: bool) -> Iterator[Variant]:
    """Yield the conversation in the spellings of reasoning and of tool calls that templates
    read."""
    has_calls = any(message.get("tool_calls") for message in messages)
    call_forms = [CallForm(no_content=False, as_text=False)]
    if has_calls:
        call_forms = [CallForm(*form) for form in product((False, True), (False, True))]
    for spelled in spellings(messages, spells_inline):
        for form in call_forms:
            written = [_with_call_form(message, form) for message in spelled]
            yield Variant(written, spelled == messages, form)


def _with_call_form(message: Message, form: CallForm) -> Message:
    """Return a message with its tool calls in another form."""
    if not message.get("tool_calls"):
        return message
    changed = dict(message)
    if form.no_content and not message.get("content"):
        changed["content"] = None
    if form.as_text:
        return with_arguments_as_text(changed)
    return changed
