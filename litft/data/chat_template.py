"""Messages to text, by the checkpoint's own jinja chat template (in a sandbox) or one of the styles
in templates/."""

import datetime
import json
import re
from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]
Render = Callable[..., str]

STYLES = {
    path.stem: path.read_text("utf-8")
    for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))
}
ALPACA = STYLES["alpaca"]  # for a checkpoint without a template


class _Generation(Extension):
    """transformers' {% generation %} tag, rendered as its content; `assistant_turns` does not need
    it to find the turns."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# of all loops of one rendering; a conversation of a thousand messages takes some thousands
MOST_STEPS = 2_000_000
# characters of a value that a template builds
LONGEST_TEXT = 50_000_000
# in the call of a method or a filter, as for jinja's own range
LARGEST_NUMBER = 100_000


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with bounds on time and memory: a template comes from a checkpoint, which may be
    anyone's.

    Raises SecurityError where jinja's own sandbox would loop, or fill the memory.
    """

    # not +, which templates use everywhere: what it makes is bounded where it is assigned
    intercepted_binops = frozenset(("*", "**", "%"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a template, count the steps of its loops, and bound the texts that it assigns."""
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = _filtered(loop.iter, "counted", loop.lineno)
        for assignment in template.find_all(nodes.Assign):
            assignment.node = _filtered(assignment.node, "bounded", assignment.lineno)
        for block in template.find_all(nodes.AssignBlock):
            block.filter = _filtered(block.filter, "bounded", block.lineno)
        return template

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute, unless the result would be huge."""
        if operator == "*":
            sizes = [
                len(value) if isinstance(value, str | list | tuple) else value
                for value in (left, right)
            ]
            is_sequence = sizes != [left, right]
            if is_sequence and all(isinstance(size, int) for size in sizes):
                _check_length(sizes[0] * sizes[1])
        elif operator == "**":
            # a power of large numbers has more digits than memory
            is_huge = isinstance(right, int) and abs(right) > 10_000
            _check_length(LONGEST_TEXT + 1 if is_huge else 0)
        elif (
            operator == "%"
            and isinstance(left, str)
            and re.search(r"%[^%]*?(\d{6}|\*)", left)
        ):
            raise SecurityError("the width of a number is too large")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or a method of a value, unless an argument is a huge number."""
        _check_numbers(args, kwargs)
        return super().call(context, function, *args, **kwargs)

    def limit_filters(self) -> None:
        """Refuse huge numbers as arguments of all filters."""
        for name, function in self.filters.items():
            self.filters[name] = _with_small_numbers(function)


def _filtered(node: nodes.Node | None, name: str, line: int) -> nodes.Filter:
    """Return a node of the syntax tree that applies a filter. node: None for the content of a
    block."""
    return nodes.Filter(node, name, [], [], None, None, lineno=line)


def _bounded(value: Any) -> Any:
    """Return a value that a template assigns; raise SecurityError if it is too long."""
    if isinstance(value, str | list):
        _check_length(len(value))
    return value


def _with_small_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # with jinja's marks of what to pass
    def limited(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(args[1:], kwargs)
        return function(*args, **kwargs)

    return limited


def _check_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if type(value) is int and abs(value) > LARGEST_NUMBER:
            raise SecurityError(f"{value:.3g} is too large a number")


def _check_length(length: int) -> None:
    if length > LONGEST_TEXT:
        raise SecurityError(
            f"a text or a list would have more than {LONGEST_TEXT:,} elements"
        )


@jinja2.pass_context
def _counted(context: Any, values: Any) -> Iterator[Any]:
    """Yield the values of a loop; raise SecurityError if all loops together take too many steps."""
    steps = context["litft_steps"]
    for value in values:
        steps[0] += 1
        if steps[0] > MOST_STEPS:
            raise SecurityError(f"its loops take more than {MOST_STEPS:,} steps")
        yield value


@lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    """Compile a template with transformers' settings, so that it renders the same text."""
    environment = _BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.limit_filters()
    # after it, since `_parse` inserts these two, and they take no numbers
    environment.filters["counted"] = _counted
    environment.filters["bounded"] = _bounded
    environment.globals["raise_exception"] = _raise
    return environment.from_string(source)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **kwargs: Any
) -> str:
    """Dump plain JSON: jinja's own filter escapes HTML, and models were trained without these
    escapes."""
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
    """Render `messages`, each {"role": ..., "content": ...}; `variables` are bos_token and other
    template variables.

    day: the date (ISO 8601) for templates that print today's date; None: today. Raise ValueError if
    the template is broken or rejects the messages, as some reject a system turn.
    """
    if day:
        today = datetime.date.fromisoformat(day)
    else:
        today = datetime.date.today()
    context = {"documents": None, **variables}
    # a list, in which all loops of one rendering count together
    context |= dict(
        messages=messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        litft_steps=[0],
    )
    try:
        return _compile(source).render(strftime_now=today.strftime, **context)
    except Exception as error:
        # a template can raise any, and each means that it is broken or rejects the messages
        # some templates take len(tools) without checking for None
        if tools is None and "tools" in source:
            return render(source, messages, [], add_generation_prompt, day, **variables)
        raise ValueError(
            f"the chat template cannot render this conversation: {error}"
        ) from None


def user_content(instruction: str, context: str, source: str) -> str:
    """Join an Alpaca record's instruction and input to one user message, in the style of the
    template `source`."""
    if not context:
        return instruction
    if not instruction:
        return context
    return (
        f"{instruction}\n\n### Input:\n{context}"
        if "### Response:" in source
        else f"{instruction}\n\n{context}"
    )


def mentions_variable(source: str, name: str) -> bool:
    """Return whether the source of a template mentions a variable anywhere, as a whole word."""
    return re.search(rf"\b{name}\b", source) is not None
