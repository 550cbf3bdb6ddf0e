"""Earlier answers of a conversation at inference: their reasoning in the form that the template
reads, as in training."""

from functools import lru_cache

from litft.data.chat_template import Message
from litft.data.reasoning import INLINE, PARTS, REASONING_FIELDS, ReasonedAnswer, prints_parts
from litft.data.tokenizer import Tokenizer
from litft.data.turns import BOTH_ON

# texts that no template contains
_REASONING = "\ue000reasoning\ue000"
_ANSWER = "\ue000answer\ue000"


def readable_history(
    tokenizer: Tokenizer, messages: list[Message], tools: list | None = None
) -> list[Message]:
    """Return the messages with reasoning in a field that the template does not read written where
    it reads it: in another field, or inline.

    Programs return reasoning in `reasoning_content`, and training writes it where the template
    reads it.
    """
    template = tokenizer.template_for(tools)
    readable = []
    for message in messages:
        field = next((name for name in REASONING_FIELDS if message.get(name)), None)
        is_text = isinstance(message.get("content") or "", str)
        if message.get("role") != "assistant" or field is None or not is_text:
            readable.append(message)
            continue
        spelling = _spelling(tokenizer, template, field)
        readable.append(ReasonedAnswer.read(message).spelled(spelling).write())
    return readable


@lru_cache(maxsize=64)
def _spelling(tokenizer: Tokenizer, template: str, field: str) -> str:
    """Return the spelling in which a template reads reasoning: `field` if it can."""
    spellings = [field, *REASONING_FIELDS, PARTS]
    # to a template without this mark, inline reasoning would be a part of the answer
    if "<think>" in template:
        spellings.append(INLINE)
    for spelling in spellings:
        if _is_read(tokenizer, template, spelling):
            return spelling
    return field


def _is_read(tokenizer: Tokenizer, template: str, spelling: str) -> bool:
    """Return whether a template renders the reasoning of the last answer in a spelling."""
    written = ReasonedAnswer({"role": "assistant"}, _REASONING, _ANSWER, spelling).write()
    messages = [{"role": "user", "content": "a"}, written]
    # some templates write reasoning only where thinking is switched on
    for switch in ({}, BOTH_ON):
        try:
            text = tokenizer.apply_chat_template(messages, tools=None, **switch)
        except ValueError:
            continue
        if _REASONING in text and _ANSWER in text and not prints_parts(text):
            return True
    return False
