"""Messages to text: the checkpoint's own jinja chat template in a sandbox, Alpaca style where there is none."""

import datetime
import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
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
    RecursionError,
)

# The wording of Stanford Alpaca (https://github.com/tatsu-lab/stanford_alpaca), turned into a chat template
ALPACA = """\
{% set preamble = "Below is an instruction that describes a task" %}
{% for message in messages %}
{% if message.role == "system" %}
{{ message.content + "\\n\\n" }}
{%- elif message.role == "user" %}
{% if loop.first %}
{% if "### Input:" in message.content %}
{{ preamble + ", paired with an input that provides further context. " }}
{%- else %}
{{ preamble + ". " }}
{%- endif %}
{{- "Write a response that appropriately completes the request.\\n\\n" }}
{%- endif %}
{{- "### Instruction:\\n" + message.content + "\\n\\n### Response:\\n" }}
{%- else %}
{{- message.content + eos_token }}
{%- if not loop.last %}{{ "\\n\\n" }}{% endif %}
{%- endif %}
{%- endfor %}
"""


@lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    """With transformers' settings, so that a template renders here as it does there."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **kwargs: Any) -> str:
    """Plain JSON: jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **kwargs)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def render(
    source: str, messages: list[Message], tools: list | None = None, add_generation_prompt: bool = False, **tokens: str
) -> str:
    """The template's text for `messages`, each {"role": ..., "content": ...}; `tokens` are bos_token and the like.

    Raises ValueError where the template is broken or refuses the messages (a system turn it has no place for, say).
    """
    try:
        return _compile(source).render(
            messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, documents=None, **tokens
        )
    except _TEMPLATE_ERRORS as error:
        raise ValueError(f"the chat template cannot render this conversation: {error}") from None


def assistant_spans(render: Render, messages: list[Message], tools: list | None = None) -> tuple[str, list[tuple[int, int]]]:
    """The conversation's text and, as character spans, what the model itself says in it, end token included.

    A turn's span is what rendering it adds to the generation prompt before it: just what is generated at inference.
    Whitespace behind the end token belongs to the template, not to the model.
    """
    text, spans = render(messages, tools=tools), []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:index], tools=tools, add_generation_prompt=True)
        after = render(messages[: index + 1], tools=tools)
        if not (after.startswith(before) and text.startswith(after.rstrip())):
            raise ValueError(
                "the chat template rewrites earlier turns, so no part of the text is what the model would have said; "
                "keep one assistant turn a conversation, or pass another --data.template"
            )
        if len(after.rstrip()) <= len(before) and message["content"].strip():
            raise ValueError("the chat template leaves the assistant's words out; pass another --data.template")
        spans.append((len(before), len(after.rstrip()) if after.rstrip() != after else len(after)))
    return text, spans


def user_content(instruction: str, context: str, source: str) -> str:
    """An Alpaca record's instruction and input as one user message, in the style the template was made for."""
    if not context:
        return instruction
    return f"{instruction}\n\n### Input:\n{context}" if "### Response:" in source else f"{instruction}\n\n{context}"
