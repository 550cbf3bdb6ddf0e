"""Messages to text: the checkpoint's own jinja chat template in a sandbox, or one of the styles in templates/."""

import datetime
import json
from collections.abc import Callable, Collection
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]
Render = Callable[..., str]

# whatever a template may raise by its own arithmetic, look-ups and recursion
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
ALPACA = STYLES["alpaca"]  # of a checkpoint that has no template


class _Generation(Extension):
    """transformers' tag around what the model says: rendered as what stands in it. Spans come from `assistant_turns`."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    """With transformers' settings, so that a template renders here as it does there."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    return environment.from_string(source)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **kwargs: Any) -> str:
    """Plain JSON: jinja's own filter escapes HTML, which no model was trained on."""
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
    """The template's text for `messages`, each {"role": ..., "content": ...}; `variables` are bos_token and the like.

    day: what a template gets that asks for today's date (ISO 8601), default today's. Raises ValueError where the template
    is broken or refuses the messages (a system turn it has no place for, say).
    """
    today = datetime.date.fromisoformat(day) if day else datetime.date.today()
    given = dict(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, documents=None, **variables)
    try:
        return _compile(source).render(strftime_now=today.strftime, **given)
    except _TEMPLATE_ERRORS as error:
        if tools is None and "tools" in source:  # some templates count the tools without asking whether there are any
            return render(source, messages, [], add_generation_prompt, day, **variables)
        raise ValueError(f"the chat template cannot render this conversation: {error}") from None


class Turn(NamedTuple):
    """What the model says in one turn, as generation would see it: text[start:end], its end token included."""

    message: int  # which of the conversation
    text: str
    start: int
    end: int


def assistant_turns(
    render: Render, messages: list[Message], tools: list | None = None, special: Collection[str] = ()
) -> list[tuple[str, list[Turn]]]:
    """The conversation as texts, each with the turns of the model that can be learned in it.

    A turn begins behind the generation prompt, and ends with the first of the `special` tokens behind its words (whitespace
    behind that belongs to the template). That is one text with every turn; but where the template shows a turn otherwise
    once others follow (it drops what was thought, or ends it with another token, or with none), each turn has a text of its
    own, as it is read when it is generated. ValueError where the template leaves out what the model says.
    """
    try:
        turns = _turns(render, messages, tools, special)
    except _LeftOut as left_out:  # some show a call only where there is no text beside it
        messages = [{**m, "content": None} if m.get("tool_calls") and not m["content"] else m for m in messages]
        try:
            turns = _turns(render, messages, tools, special)
        except ValueError:
            raise left_out from None
    whole = render(messages, tools=tools)
    ended = all(turn.text[: turn.end].endswith(tuple(special)) for turn in turns[:-1])
    if ended and all(whole.startswith(turn.text[: turn.end]) for turn in turns):
        return [(whole, turns)]
    return [(turn.text, [turn]) for turn in turns]


class _LeftOut(ValueError):
    """A template does not show a tool call."""


_MARK = "\ue000words\ue000"  # of a private use area: no template writes it


def _turns(render: Render, messages: list[Message], tools: list | None, special: Collection[str]) -> list[Turn]:
    said = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return [_turn(render, messages[: index + 1], tools, special) for index in said]


def _turn(render: Render, messages: list[Message], tools: list | None, special: Collection[str]) -> Turn:
    """The last of the messages."""
    *earlier, message = messages
    words, calls = message["content"] or "", message.get("tool_calls")
    # some prompts close the thought at once unless it is asked for
    thinking = {"enable_thinking": True} if "</think>" in words else {}
    before = render(earlier, tools=tools, add_generation_prompt=True, **thinking)
    text = render(messages, tools=tools)
    if calls and not (_shows(render, messages, tools, text, tool_calls=None) and _shows_all(render, messages, tools, text)):
        raise _LeftOut("the chat template leaves a tool call out; pass another --data.template")
    for thought in ("reasoning_content", "thinking"):
        if message.get(thought) and not _shows(render, messages, tools, text, **{thought: None}):
            raise ValueError(f"the chat template leaves the assistant's {thought} out; pass another --data.template")
    head, found, tail = render([*earlier, {**message, "content": _MARK}], tools=tools).partition(_MARK)
    if not text.startswith(before):
        # the prompt opens a thought that finished turns do not show, or has the system's words, which they have not
        if calls and text.startswith(head):
            text = before + text[len(head) :]
        elif found and not calls:
            text = before + words.removeprefix(before.removeprefix(head)) + tail
        else:
            raise ValueError("the chat template does not show a turn as it asks for it; pass another --data.template")
    if words.strip() and not found:
        raise ValueError("the chat template leaves the assistant's words out; pass another --data.template")
    return Turn(len(earlier), text, len(before), _end(text, tail if found and not calls else "", special))


def _shows(render: Render, messages: list[Message], tools: list | None, text: str, **others: Any) -> bool:
    """Whether `text` is another one where the last message has these values instead; None: without that field."""
    *earlier, message = messages
    changed = {name: value for name, value in {**message, **others}.items() if value is not None or name not in others}
    try:
        return text != render([*earlier, changed], tools=tools)
    except ValueError:
        return True


def _shows_all(render: Render, messages: list[Message], tools: list | None, text: str) -> bool:
    """Whether each of several calls is shown: some templates look at the first alone."""
    calls = messages[-1]["tool_calls"]
    return len(calls) == 1 or _shows(render, messages, tools, text, tool_calls=calls[:-1])


def _end(text: str, tail: str, special: Collection[str]) -> int:
    """Where a text's last turn ends, which is followed by `tail`."""
    ends = [tail.index(token) + len(token) for token in special if token in tail]
    if ends:
        return len(text) - len(tail) + min(ends)
    return len(text.rstrip()) or len(text)


def user_content(instruction: str, context: str, source: str) -> str:
    """An Alpaca record's instruction and input as one user message, in the style the template was made for."""
    if not context:
        return instruction
    return f"{instruction}\n\n### Input:\n{context}" if "### Response:" in source else f"{instruction}\n\n{context}"
