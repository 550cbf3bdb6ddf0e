"""Messages to text, by the checkpoint's own jinja chat template (in a sandbox) or one of the styles in templates/."""

import datetime
import json
import re
from collections.abc import Callable
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

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
    context = {"documents": None, **variables}
    context |= dict(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)
    try:
        return _compile(source).render(strftime_now=today.strftime, **context)
    except _TEMPLATE_ERRORS as error:
        if tools is None and "tools" in source:  # some templates take len(tools) without checking for None
            return render(source, messages, [], add_generation_prompt, day, **variables)
        raise ValueError(f"the chat template cannot render this conversation: {error}") from None


def user_content(instruction: str, context: str, source: str) -> str:
    """Join an Alpaca record's instruction and input to one user message, in the style of the template `source`."""
    if not context:
        return instruction
    return f"{instruction}\n\n### Input:\n{context}" if "### Response:" in source else f"{instruction}\n\n{context}"


def mentions_variable(source: str, name: str) -> bool:
    """Return whether the source of a template mentions a variable anywhere, as a whole word."""
    return re.search(rf"\b{name}\b", source) is not None


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
