"""Earlier answers of a conversation, in training and at inference: their reasoning and calls in the
form that the template reads."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from litft.data.answer_format import (
    EXAMPLE_QUESTION,
    EXAMPLE_TOOL,
    example_answer,
    example_result,
    has_example_call,
)
from litft.data.chat_template import Message
from litft.data.formats import strip_end_token
from litft.data.messages import SYSTEM_ROLES
from litft.data.reasoning import (
    BOTH_ON,
    INLINE,
    PARTS,
    REASONING_FIELDS,
    REPEATED_THOUGHT,
    ReasonedAnswer,
    prints_parts,
    with_opening_mark,
    without_opening,
)
from litft.data.tokenizer import Tokenizer
from litft.data.turn_rendering import writes_think_tags

# texts that no template contains
_REASONING = "\ue000reasoning\ue000"
_ANSWER = "\ue000answer\ue000"
_SYSTEM = "\ue000system\ue000"


class ThinkingMode(NamedTuple):
    """What a conversation itself says about thinking; None: nothing."""

    enable_thinking: bool | None = None
    thinking: bool | None = None

    @classmethod
    def of(cls, variables: Mapping[str, Any]) -> "ThinkingMode":
        """Return the mode that the variables of a template say."""
        given = {}
        for name in cls._fields:
            if isinstance(variables.get(name), bool):
                given[name] = variables[name]
        return cls(**given)

    @property
    def variables(self) -> dict[str, bool]:
        """The variables of a template that say it."""
        return {name: value for name, value in self._asdict().items() if value is not None}


@dataclass(frozen=True)
class AnswerForm:
    """What decides how a template reads the reasoning of an answer."""

    # a field of REASONING_FIELDS, PARTS or INLINE
    spelling: str
    # an inline thought begins with <think>
    is_opened: bool
    # it is not empty
    has_reasoning: bool
    has_content: bool
    has_calls: bool

    @classmethod
    def of(cls, answer: ReasonedAnswer) -> "AnswerForm":
        """Return the form of an answer with a thought."""
        return cls(
            spelling=answer.spelling,
            is_opened=bool(answer.opening),
            has_reasoning=bool(answer.reasoning.strip()),
            has_content=bool(answer.answer.strip()),
            has_calls=bool(answer.message.get("tool_calls")),
        )


def readable_history(
    tokenizer: Tokenizer,
    messages: list[Message],
    tools: list | None = None,
    checks_system: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> list[Message]:
    """Return the messages in the spelling that the template reads; variables: of the template.

    Training and inference both write earlier answers so, and then have the same prompts. Reasoning
    in a field that the template does not read is written where it reads it: in another field, or
    inline. Calls that it writes only without a content have none, and end tokens after an answer
    are removed. Raises ValueError if it leaves out calls, or with `checks_system` the system
    prompt.
    """
    template = tokenizer.template_for(tools)
    mode = ThinkingMode.of(variables or {})
    has_system = bool(messages) and messages[0].get("role") in SYSTEM_ROLES
    if checks_system and has_system and not _reads_system(tokenizer, template, bool(tools)):
        raise ValueError(
            "the chat template leaves out the system prompt; write it into the first question, or "
            "pass another --template"
        )
    readable = []
    for message in messages:
        is_text = isinstance(message.get("content") or "", str)
        if message.get("role") == "assistant" and is_text:
            message = _readable_answer(tokenizer, template, bool(tools), mode, message)
        if message.get("tool_calls") and not message.get("content"):
            content = _content_beside_calls(tokenizer, template, bool(tools))
            message = {**message, "content": content}
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
    tokenizer: Tokenizer,
    template: str,
    has_tools: bool,
    mode: ThinkingMode,
    message: Message,
) -> Message:
    """Return an answer without an end token, and with its reasoning where the template reads it, if
    it reads any."""
    if message.get("content"):
        own_ends = tokenizer.end_tokens.special_stops
        content = strip_end_token(message["content"], own_ends)
        message = {**message, "content": content}
    if opens_thoughts(tokenizer, template, has_tools):
        message = with_opening_mark(message)
    answer = ReasonedAnswer.read(message)
    form = AnswerForm.of(answer)
    repeats = _repeats_thought(tokenizer, template, has_tools, mode, form)
    if not answer.reasoning.strip():
        return answer.bare().write() if repeats else message
    spelling = _spelling(tokenizer, template, has_tools, form)
    if spelling == answer.spelling == INLINE and repeats:
        return without_opening(answer)
    # the white space around reasoning belongs to its spelling
    if spelling is None or spelling == answer.spelling:
        return message
    return answer.spelled(spelling).write()


@lru_cache(maxsize=64)
def opens_thoughts(tokenizer: Tokenizer, template: str, has_tools: bool) -> bool:
    """Return whether prompts have <think>, in any mode. template: of `tokenizer`, a part of the
    key."""
    tools = [EXAMPLE_TOOL] if has_tools else None
    return writes_think_tags(tokenizer.apply_chat_template, tools)


@lru_cache(maxsize=64)
def _repeats_thought(
    tokenizer: Tokenizer,
    template: str,
    has_tools: bool,
    mode: ThinkingMode,
    form: AnswerForm,
) -> bool:
    """Return whether a template writes the opening mark, or an empty thought, before an inline
    thought that an answer has already.

    template: of `tokenizer`, a part of the key.
    """
    if form.spelling != INLINE or not form.has_content:
        return False
    thought = f"{_REASONING}\n" if form.has_reasoning else "\n"
    opening = "<think>\n" if form.is_opened else ""
    content = f"{opening}{thought}</think>\n\n{_ANSWER}"
    messages = [
        EXAMPLE_QUESTION,
        {"role": "assistant", "content": content},
        EXAMPLE_QUESTION,
    ]
    tools = [EXAMPLE_TOOL] if has_tools else None
    try:
        text = tokenizer.apply_chat_template(messages, tools, **mode.variables)
    except ValueError:
        return False
    return REPEATED_THOUGHT.search(text.partition(_ANSWER)[0]) is not None


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
    tokenizer: Tokenizer, template: str, has_tools: bool, form: AnswerForm
) -> str | None:
    """Return the spelling in which a template reads reasoning: that of `form` if it can; None if it
    reads none.

    template: of `tokenizer`, a part of the key.
    """
    fields = [*REASONING_FIELDS, PARTS]
    if form.spelling != INLINE:
        fields.insert(0, form.spelling)
    read = None
    text = None
    for spelling in fields:
        text = _text_with_reasoning(tokenizer, has_tools, replace(form, spelling=spelling))
        if text is not None:
            read = spelling
            break
    # to a template without this mark, inline reasoning is a part of the answer
    if "<think>" not in template and not _takes_no_reasoning(
        tokenizer, template, has_tools
    ):
        return read
    inline = _text_with_reasoning(tokenizer, has_tools, replace(form, spelling=INLINE))
    if inline is None:
        return read
    if text is None:
        return INLINE
    # many clients send the thought back within the content, and many templates take it out again
    if form.spelling == INLINE and "".join(inline.split()) == "".join(text.split()):
        return INLINE
    return read


@lru_cache(maxsize=64)
def _takes_no_reasoning(tokenizer: Tokenizer, template: str, has_tools: bool) -> bool:
    """Return whether a template has no place for reasoning, so that a model writes it, if any, into
    its answers, and learns it so.

    template: of `tokenizer`, a part of the key.
    """
    for spelling, has_calls in product((*REASONING_FIELDS, PARTS), (False, True)):
        form = AnswerForm(
            spelling=spelling,
            is_opened=True,
            has_reasoning=True,
            has_content=not has_calls,
            has_calls=has_calls,
        )
        if _text_with_reasoning(tokenizer, has_tools, form) is not None:
            return False
    return True


def _text_with_reasoning(
    tokenizer: Tokenizer, has_tools: bool, form: AnswerForm
) -> str | None:
    """Return a conversation with an answer of this form as the template renders it; None if it
    leaves out the answer's reasoning or content."""
    rest: Message = {"role": "assistant"}
    following = []
    if form.has_calls:
        rest = example_answer("")
        following = [example_result(rest, "15 degrees")]
    answer = ReasonedAnswer(
        message=rest,
        reasoning=_REASONING,
        answer=_ANSWER if form.has_content else "",
        spelling=form.spelling,
        opening="<think>\n" if form.is_opened else "",
    )
    messages = [EXAMPLE_QUESTION, answer.write(), *following]
    # a tokenizer may have another template for conversations with tools
    tools = [EXAMPLE_TOOL] if has_tools else None
    # some templates write reasoning only where thinking is switched on
    for switch in ({}, BOTH_ON):
        try:
            text = tokenizer.apply_chat_template(messages, tools, **switch)
        except ValueError:
            continue
        has_content = _ANSWER in text or not form.has_content
        if _REASONING in text and has_content and not prints_parts(text):
            return text
    return None
