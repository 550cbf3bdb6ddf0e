"""Earlier answers of a conversation at inference: their reasoning in the form that the template
reads, as in training."""

from functools import lru_cache

from litft.data.answer_format import (
    EXAMPLE_QUESTION,
    EXAMPLE_TOOL,
    example_answer,
    example_result,
    has_example_call,
)
from litft.data.chat_template import Message
from litft.data.messages import SYSTEM_ROLES
from litft.data.reasoning import (
    INLINE,
    PARTS,
    REASONING_FIELDS,
    ReasonedAnswer,
    prints_parts,
)
from litft.data.tokenizer import Tokenizer
from litft.data.turns import BOTH_ON

# texts that no template contains
_REASONING = "\ue000reasoning\ue000"
_ANSWER = "\ue000answer\ue000"


_SYSTEM = "\ue000system\ue000"


def readable_history(
    tokenizer: Tokenizer,
    messages: list[Message],
    tools: list | None = None,
    checks_system: bool = True,
) -> list[Message]:
    """Return the messages in the spelling that the template reads, as in training.

    Reasoning in a field that it does not read is written where it reads it: in another field, or
    inline. Calls that it writes only without a content have none. Raises ValueError if it leaves
    out calls, or with `checks_system` the system prompt.
    """
    template = tokenizer.template_for(tools)
    has_system = bool(messages) and messages[0].get("role") in SYSTEM_ROLES
    if checks_system and has_system and not _reads_system(tokenizer, template, bool(tools)):
        raise ValueError(
            "the chat template leaves out the system prompt; write it into the first question, or "
            "pass another --template"
        )
    readable = []
    for message in messages:
        if message.get("tool_calls") and not message.get("content"):
            content = _content_beside_calls(tokenizer, template, bool(tools))
            message = {**message, "content": content}
        is_text = isinstance(message.get("content") or "", str)
        if message.get("role") == "assistant" and is_text:
            message = _readable_answer(tokenizer, template, bool(tools), message)
        readable.append(message)
    return readable


@lru_cache(maxsize=64)
def _reads_system(tokenizer: Tokenizer, template: str, has_tools: bool) -> bool:
    """Return whether a template shows a system prompt, or refuses it, which the real conversation
    will say."""
    messages = [{"role": "system", "content": _SYSTEM}, EXAMPLE_QUESTION]
    tools = [EXAMPLE_TOOL] if has_tools else None
    try:
        return _SYSTEM in tokenizer.apply_chat_template(messages, tools)
    except ValueError:
        return True


def _readable_answer(
    tokenizer: Tokenizer, template: str, has_tools: bool, message: Message
) -> Message:
    """Return an answer with its reasoning where the template reads it, if it reads any."""
    answer = ReasonedAnswer.read(message)
    # many clients send the thought back as a part of the content
    if answer.spelling == INLINE and "<think>" in template:
        return message
    if not answer.reasoning.strip():
        return message
    spelling = _spelling(tokenizer, template, has_tools, answer.spelling)
    if spelling is None:
        return message
    return answer.spelled(spelling).write()


@lru_cache(maxsize=64)
def _content_beside_calls(
    tokenizer: Tokenizer, template: str, has_tools: bool
) -> str | None:
    """Return the content with which a template writes a call alone: an empty text, or None.

    template: of `tokenizer`, a part of the key. Raises ValueError if it writes no call.
    """
    tools = [EXAMPLE_TOOL] if has_tools else None
    fails_with_text = False
    for content in ("", None):
        calling = example_answer(content)
        result = example_result(calling, "15 degrees")
        try:
            text = tokenizer.apply_chat_template([EXAMPLE_QUESTION, calling, result], tools)
        except ValueError:
            if content == "":
                fails_with_text = True
            continue
        if has_example_call(text):
            return content
    # a template that cannot render this conversation says so for the real one
    if fails_with_text:
        return ""
    raise ValueError(
        "the chat template leaves out the tool calls of earlier answers; pass another --template, "
        "or a conversation without calls"
    )


@lru_cache(maxsize=64)
def _spelling(
    tokenizer: Tokenizer, template: str, has_tools: bool, preferred: str
) -> str | None:
    """Return the spelling in which a template reads reasoning: `preferred` if it can; None if it
    reads none."""
    spellings = [*REASONING_FIELDS, PARTS]
    if preferred != INLINE:
        spellings.insert(0, preferred)
    # to a template without this mark, inline reasoning would be a part of the answer
    if "<think>" in template:
        spellings.append(INLINE)
    for spelling in spellings:
        if _is_read(tokenizer, has_tools, spelling):
            return spelling
    return None


def _is_read(tokenizer: Tokenizer, has_tools: bool, spelling: str) -> bool:
    """Return whether a template renders the reasoning of the last answer in a spelling."""
    written = ReasonedAnswer({"role": "assistant"}, _REASONING, _ANSWER, spelling).write()
    messages = [{"role": "user", "content": "a"}, written]
    # a tokenizer may have another template for conversations with tools
    tools = [EXAMPLE_TOOL] if has_tools else None
    # some templates write reasoning only where thinking is switched on
    for switch in ({}, BOTH_ON):
        try:
            text = tokenizer.apply_chat_template(messages, tools, **switch)
        except ValueError:
            continue
        if _REASONING in text and _ANSWER in text and not prints_parts(text):
            return True
    return False
