"""Messages to text, by the checkpoint's own jinja chat template (in a sandbox) or one of the styles in templates/."""

import datetime
import json
from collections.abc import Callable, Collection
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]
Render = Callable[..., str]

# errors that arithmetic, look-ups and recursion in a template can raise
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    LookupError,
    AttributeError,
    ValueError,
    ArithmeticError,
    MemoryError,
    RecursionError,
)

STYLES = {path.stem: path.read_text("utf-8") for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
ALPACA = STYLES["alpaca"]  # for a checkpoint without a template


class _Generation(Extension):
    """transformers' {% generation %} tag, rendered as its content; `assistant_turns` does not need it to find the turns."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    """Compile a template with transformers' settings, so that it renders the same text."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    return environment.from_string(source)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **kwargs: Any) -> str:
    """Dump plain JSON: jinja's own filter escapes HTML, and models were trained without these escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **kwargs)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def render(
    source: str,
    messages: list[Message],
    tools: list | None = None,
    add_generation_prompt: bool = False,
    day: str | None = None,
    **variables: Any,
) -> str:
    """Render `messages`, each {"role": ..., "content": ...}; `variables` are bos_token and other template variables.

    day: the date (ISO 8601) for templates that print today's date; None: today. Raise ValueError if the template is broken
    or rejects the messages, as some reject a system turn.
    """
    today = datetime.date.fromisoformat(day) if day else datetime.date.today()
    context = dict(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, documents=None, **variables)
    try:
        return _compile(source).render(strftime_now=today.strftime, **context)
    except _TEMPLATE_ERRORS as error:
        if tools is None and "tools" in source:  # some templates take len(tools) without checking for None
            return render(source, messages, [], add_generation_prompt, day, **variables)
        raise ValueError(f"the chat template cannot render this conversation: {error}") from None


class Turn(NamedTuple):
    """One assistant turn as the model generates it: text[start:end], including the end token; text[start:answer] reasons."""

    message: int  # its index in the conversation
    text: str
    start: int
    answer: int
    end: int


def assistant_turns(
    render: Render, messages: list[Message], tools: list | None = None, special: Collection[str] = ()
) -> list[tuple[str, list[Turn]]]:
    """Return the rendered conversation as texts, each with the assistant turns to train on.

    A turn begins after the generation prompt, and ends with the first of the `special` tokens after its content (whitespace
    after that belongs to the template). Usually the result is one text with all turns. If the template renders a turn
    differently once others follow (it drops the reasoning, or ends the turn with another token or none), each turn has a
    text of its own, as the model reads it when it generates the turn. Raise ValueError if the template omits content of the
    assistant.
    """
    try:
        turns = _turns(render, messages, tools, special)
    except _CallOmitted as error:  # some templates render a call only if the message has no text
        messages = [{**m, "content": None} if m.get("tool_calls") and not m["content"] else m for m in messages]
        try:
            turns = _turns(render, messages, tools, special)
        except ValueError:
            raise error from None
    full_text = render(messages, tools=tools)
    ended = all(turn.text[: turn.end].endswith(tuple(special)) for turn in turns[:-1])
    if ended and all(full_text.startswith(turn.text[: turn.end]) for turn in turns):
        return [(full_text, turns)]
    return [(turn.text, [turn]) for turn in turns]


class _CallOmitted(ValueError):
    """A template omits a tool call."""


_PLACEHOLDER = "\ue000words\ue000"  # private use characters, which no template contains


def _turns(render: Render, messages: list[Message], tools: list | None, special: Collection[str]) -> list[Turn]:
    indices = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return [_turn(render, messages[: index + 1], tools, special) for index in indices]


def _turn(render: Render, messages: list[Message], tools: list | None, special: Collection[str]) -> Turn:
    """Return the last message as a turn."""
    *earlier, message = messages
    content, calls = message["content"] or "", message.get("tool_calls")
    # some generation prompts contain an empty thought unless thinking is enabled
    thinking = {"enable_thinking": True} if "</think>" in content else {}
    prompt = render(earlier, tools=tools, add_generation_prompt=True, **thinking)
    text = render(messages, tools=tools)
    if calls and not (
        _affects(render, messages, tools, text, tool_calls=None) and _renders_all_calls(render, messages, tools, text)
    ):
        raise _CallOmitted("the chat template leaves out a tool call; pass another --data.template")
    for field in ("reasoning_content", "thinking"):
        if message.get(field) and not _affects(render, messages, tools, text, **{field: None}):
            raise ValueError(f"the chat template leaves out the assistant's {field}; pass another --data.template")
    head, mark, tail = render([*earlier, {**message, "content": _PLACEHOLDER}], tools=tools).partition(_PLACEHOLDER)
    if not text.startswith(prompt):
        # the prompt opens a thought that finished turns omit, or has a system prompt that they lack
        if calls and text.startswith(head):
            text = prompt + text[len(head) :]
        elif mark and not calls:
            text = prompt + content.removeprefix(prompt.removeprefix(head)) + tail
        else:
            raise ValueError("the chat template renders a turn differently from its prompt; pass another --data.template")
    if content.strip() and not mark:
        raise ValueError("the chat template leaves out the assistant's content; pass another --data.template")
    end = _turn_end(text, tail if mark and not calls else "", special)
    answer = len(head) if mark and text.startswith(head) and message.get("reasoning_content") else len(prompt)
    if "</think>" in content:  # some records have the reasoning in the content
        answer = max(answer, text.index("</think>", len(prompt)) + len("</think>"))
    return Turn(len(earlier), text, len(prompt), min(max(answer, len(prompt)), end), end)


def _affects(render: Render, messages: list[Message], tools: list | None, text: str, **changes: Any) -> bool:
    """Return whether `text` changes with these values in the last message (None: without the field)."""
    *earlier, message = messages
    changed = {name: value for name, value in {**message, **changes}.items() if value is not None or name not in changes}
    try:
        return text != render([*earlier, changed], tools=tools)
    except ValueError:
        return True


def _renders_all_calls(render: Render, messages: list[Message], tools: list | None, text: str) -> bool:
    """Return whether the template renders all tool calls of the last message: some render only the first."""
    calls = messages[-1]["tool_calls"]
    return len(calls) == 1 or _affects(render, messages, tools, text, tool_calls=calls[:-1])


def _turn_end(text: str, tail: str, special: Collection[str]) -> int:
    """Return the position where the last turn of a text ends; `tail` is the template's text after its content."""
    ends = [tail.index(token) + len(token) for token in special if token in tail]
    if ends:
        return len(text) - len(tail) + min(ends)
    return len(text.rstrip()) or len(text)


def user_content(instruction: str, context: str, source: str) -> str:
    """Join an Alpaca record's instruction and input to one user message, in the style of the template `source`."""
    if not context:
        return instruction
    return f"{instruction}\n\n### Input:\n{context}" if "### Response:" in source else f"{instruction}\n\n{context}"


def last_user_message(prompt: str, render: Callable[[list[Message]], str]) -> str:
    """Return the last user message of a rendered prompt, or the whole prompt if the message cannot be found in it.

    render: renders messages up to the answer, with the template of the prompt.
    """
    mark, answer = "user-message-mark", "assistant-message-mark"
    messages = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", answer), ("user", mark))]
    try:
        head, found, tail = render(messages[2:]).partition(mark)
        later_head = render(messages).partition(mark)[0]
    except ValueError:  # raised by the template
        return prompt
    common = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(head), reversed(later_head), strict=False))
    opening = "".join(char for char, _ in common)[::-1].lstrip()  # what precedes a user's message
    body, tail = prompt.rstrip(), tail.rstrip()
    if not (found and opening.strip() and opening in body and tail and body.endswith(tail)):
        return prompt
    return body.removesuffix(tail).rpartition(opening)[2].strip() or prompt
