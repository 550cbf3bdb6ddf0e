"""Tool calls in the text of an answer: the syntaxes that chat templates write, read into names and
arguments.

Each family of models writes calls in its own way. `read_calls` reads the text between a template's
marks in any of these syntaxes; which marks a template uses is found by `answer_format`.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from litft.data.messages import CALL_FIELDS


@dataclass(frozen=True)
class ToolCall:
    """A call of a function, with its arguments by name."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class CallMarks:
    """The texts around the calls of an answer."""

    # empty: calls are a whole answer that begins with {
    opening: str
    # empty: the calls extend to the end of the answer
    closing: str = ""


CALL_MARKS = (
    # Hermes, Qwen, GLM, Granite 4, Nemotron 3
    CallMarks("<tool_call>", "</tool_call>"),
    CallMarks("<tool_calls>", "</tool_calls>"),  # Jamba, MiniMax M1, Apriel
    CallMarks("<tool_calls:opensource>", "</tool_calls:opensource>"),  # Hunyuan 3
    CallMarks("[TOOL_CALLS]"),  # Mistral
    CallMarks("<|tool_call>", "<tool_call|>"),  # Gemma 4
    CallMarks("<|tool_call_start|>", "<|tool_call_end|>"),  # LFM2
    CallMarks("<|tool_call|>", "<|/tool_call|>"),  # Phi-4 mini
    CallMarks("<|tool_call|>"),  # Granite 3
    CallMarks("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),  # Kimi K2
    CallMarks("<|tool_calls|>"),  # Solar
    CallMarks("<|tools_prefix|>", "<|tools_suffix|>"),  # Apertus
    CallMarks("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),  # DeepSeek V3, R1
    CallMarks("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),  # DeepSeek V3.2
    CallMarks("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),  # DeepSeek V4
    CallMarks("<minimax:tool_call>", "</minimax:tool_call>"),
    CallMarks("<seed:tool_call>", "</seed:tool_call>"),
    CallMarks("<|START_ACTION|>", "<|END_ACTION|>"),  # Command R7B, Command A
    CallMarks("Action:\n```json", "```"),  # Command R+
    CallMarks("<TOOLCALL>", "</TOOLCALL>"),  # Nemotron Nano 2
    CallMarks("<function_calls>", "</function_calls>"),  # OLMo 3
    CallMarks("<|function_call|>"),  # GigaChat 3.1
    CallMarks("function call<|role_sep|>"),  # GigaChat 3
    CallMarks("<function=", "</function>"),  # Functionary 3.1
    CallMarks("<function name=", "</function>"),  # MiniCPM 5
    CallMarks(""),  # Llama 3 and 4
)
# Llama writes these before its calls
BARE_PREFIXES = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")

# special tokens between the marks
_INNER_MARKS = (
    "[ARGS]",
    "[CALL_ID]",
    '<|"|>',
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_call:begin|>",
    "<|tool_call:name|>",
    "<|tool_call:args|>",
    "<|tool_call:end|>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)


def call_texts() -> Iterator[str]:
    """Yield every text that marks a part of calls."""
    for marks in CALL_MARKS:
        yield from filter(None, (marks.opening, marks.closing))
    yield from BARE_PREFIXES
    yield from _INNER_MARKS


# more of them in one text are a model that repeats itself, and reading them would take long
MAX_TAGS = 256


def tool_names(tools: list[dict[str, Any]] | None) -> set[str]:
    """Return the names of the functions that a model may call."""
    names = set()
    for tool in tools or ():
        function = tool.get("function", tool)
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            names.add(function["name"])
    return names


def read_calls(
    text: str, tools: list[dict[str, Any]] | None = None, is_cut: bool = False
) -> list[ToolCall]:
    """Return the calls in the text between a template's marks.

    tools: the functions that the model could call. Their schemas tell text from numbers in syntaxes
    that do not quote text. is_cut: the answer ended within the marks, so that a call may lack
    arguments: it has to be closed. Raises ValueError if the text is in no known syntax.
    """
    is_short = all(
        text.count(tag) <= MAX_TAGS
        for tag in ("<function", "<invoke", "<param", "<arg_key", "[ARGS]")
    )
    if is_short:
        for reader in _READERS:
            if is_cut and not _is_closed(text, reader):
                continue
            calls = reader(text.strip(), _Schemas(tools))
            if calls and all(map(_is_json, calls)):
                return calls
    raise ValueError(f"not a tool call: {text[:80]!r}")


def _is_closed(text: str, reader: "_Reader") -> bool:
    """Return whether a syntax shows that the last call in a text has all of its arguments."""
    # only the mark after the call closes it
    if reader is _keyed_calls:
        return False
    if reader is _element_calls:
        return _CLOSED_ELEMENT.search(text) is not None
    # brackets do, which the reader requires
    return True


def _is_json(call: ToolCall) -> bool:
    """Return whether a call can be written as JSON in UTF-8."""
    try:
        json.dumps(
            [call.name, call.arguments], allow_nan=False, ensure_ascii=False
        ).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _no_constant(name: str) -> Any:
    """Refuse NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{name} is not JSON")


_JSON_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}


class _Schemas:
    """The declared types of the functions' arguments."""

    def __init__(self, tools: list[dict[str, Any]] | None) -> None:
        self.names = tool_names(tools)
        self.types: dict[tuple[str | None, str], set[str]] = {}
        for tool in tools or ():
            function = tool.get("function", tool)
            if not isinstance(function, dict):
                continue
            parameters = function.get("parameters")
            if isinstance(parameters, dict):
                properties = parameters.get("properties")
            else:
                properties = None
            if not isinstance(properties, dict):
                continue
            for argument, schema in properties.items():
                if isinstance(schema, dict):
                    self.types[function.get("name"), argument] = _types(schema)

    def value(self, function: str, argument: str, text: str) -> Any:
        """Return an argument that is written without quotes, by its declared type; text if it is
        not valid JSON."""
        declared = self.types.get((function, argument))
        # a text, unless the schema allows null, which many templates write as Python does
        if declared == {"string", "null"} and text in ("null", "None"):
            return None
        if declared in ({"string"}, {"string", "null"}):
            return text
        value = text.strip()
        if declared and "string" not in declared:
            # many templates write these values as Python does
            value = _JSON_OF_PYTHON.get(value, value)
        try:
            return json.loads(value, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return text


def _types(schema: dict[str, Any]) -> set[str]:
    """Return the JSON types that the schema of an argument allows; empty if it does not say."""
    declared = schema.get("type")
    if isinstance(declared, str):
        types = {declared}
    else:
        types = {name for name in declared or () if isinstance(name, str)}
    for name in ("anyOf", "oneOf"):
        for choice in schema.get(name) or ():
            if isinstance(choice, dict):
                types |= _types(choice)
    # a schema may list values without a type
    values = schema.get("enum") or ()
    if not types and values and all(isinstance(value, str) for value in values):
        types = {"string"}
    return types


def _json_values(text: str) -> list[Any] | None:
    """Return JSON values that are written one after the other; None if there is anything else."""
    # strict=False: models write line breaks within JSON's texts
    decoder = json.JSONDecoder(strict=False, parse_constant=_no_constant)
    values = []
    position = 0
    while position < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return None
        values.append(value)
        # some models separate calls by a semicolon or a comma
        position += len(text[position:]) - len(text[position:].lstrip(" \t\r\n;,"))
    return values


def _without_fence(text: str) -> str:
    """Return the text in a Markdown code block, or the text itself."""
    if not text.startswith("```"):
        return text
    return text.removeprefix("```").removeprefix("json").removesuffix("```").strip()


def _json_calls(text: str, schemas: _Schemas) -> list[ToolCall] | None:
    """Read objects with a name and arguments, one or several, also in a list."""
    values = _json_values(_without_fence(text))
    if not values:
        return None
    calls = []
    for value in values:
        entries = value if isinstance(value, list) else [value]
        for entry in entries:
            call = _call_of_object(entry)
            if call is None:
                return None
            calls.append(call)
    return calls


def _call_of_object(entry: Any) -> ToolCall | None:
    """Return the call that a JSON object describes."""
    if not isinstance(entry, dict):
        return None
    # OpenAI's form has the call one level deeper
    if isinstance(entry.get("function"), dict):
        entry = entry["function"]
    name = entry.get("name", entry.get("tool_name"))
    # a call without arguments may leave them out, but not have them under another name
    is_bare = entry.keys() <= CALL_FIELDS
    arguments = entry.get("arguments", entry.get("parameters", {} if is_bare else None))
    if name is None and len(entry) == 1:  # {"weather": {"town": "Oslo"}}
        (name, arguments), *_ = entry.items()
    # arguments that are JSON in a text
    if isinstance(arguments, str):
        values = _json_values(arguments)
        if values:
            arguments = values[0]
        elif not arguments.strip():
            arguments = {}
        else:
            arguments = None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(name, arguments)


_TAG = r"<(?:[\w｜]+[:｜])?"  # <invoke, <atem:invoke, <｜DSML｜invoke
_CLOSING_TAG = r"</(?:[\w｜]+[:｜])?"
_FUNCTION = re.compile(
    rf"""{_TAG}(?:function=|invoke\s+name=|function\s+name=)["']?(?P<name>[^"'>]+)["']?>"""
    rf"(?P<body>.*?)(?:{_CLOSING_TAG}(?:function|invoke)>|\Z)",
    re.DOTALL,
)
_CLOSED_ELEMENT = re.compile(rf"{_CLOSING_TAG}(?:function|invoke)>\s*\Z")
_PARAMETER = re.compile(
    rf"""{_TAG}param(?:eter)?(?P<form>=|\s+name=)["']?(?P<name>[^"'>]+?)["']?"""
    r"""(?:\s+string=["'](?P<is_text>true|false)["'])?\s*>(?P<value>.*?)"""
    rf"{_CLOSING_TAG}param(?:eter)?>",
    re.DOTALL,
)


def _element_calls(text: str, schemas: _Schemas) -> list[ToolCall] | None:
    """Read <function=NAME><parameter=KEY>VALUE</parameter></function>, and the same with `invoke
    name=`."""
    calls = []
    if _FUNCTION.sub("", text).strip():  # there is more than calls
        return None
    for element in _FUNCTION.finditer(text):
        name = element["name"].strip()
        body = element["body"].strip()
        if body.startswith("{"):  # Functionary: the arguments are JSON
            values = _json_values(body)
            if not values or not isinstance(values[0], dict):
                return None
            calls.append(ToolCall(name, values[0]))
            continue
        arguments = {}
        for parameter in _PARAMETER.finditer(body):
            key = parameter["name"].strip()
            value = parameter["value"]
            # Qwen's templates write a line break on each side, others none
            if (
                parameter["form"] == "="
                and len(value) > 1
                and value[0] == value[-1] == "\n"
            ):
                value = value[1:-1]
            is_text = parameter["is_text"] == "true"
            arguments[key] = value if is_text else schemas.value(name, key, value)
        if _PARAMETER.sub("", body).strip():  # an argument is incomplete
            return None
        calls.append(ToolCall(name, arguments))
    return calls


_KEYED_CALL = re.compile(
    r"(?:<tool_call(?::\w+)?>)?\s*(?P<name>[\w.\-]+)\s*(?P<body>.*)", re.DOTALL
)
_KEYED_ARGUMENT = re.compile(
    r"<arg_key(?::\w+)?>(?P<key>.*?)</arg_key(?::\w+)?>\s*<arg_value(?::\w+)?>(?P<value>.*?)</arg_value(?::\w+)?>",
    re.DOTALL,
)


def _keyed_calls(text: str, schemas: _Schemas) -> list[ToolCall] | None:
    """Read NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value> (GLM, Hunyuan)."""
    calls = []
    for part in re.split(r"</tool_call(?::\w+)?>", text):
        if not part.strip():
            continue
        match = _KEYED_CALL.fullmatch(part.strip())
        if match is None:
            return None
        # a name alone is a call without arguments
        is_call = any(mark in match["body"] for mark in ("<arg_key", "<tool_sep"))
        if not is_call and (match["body"] or match["name"] not in schemas.names):
            return None
        arguments = {}
        for argument in _KEYED_ARGUMENT.finditer(match["body"]):
            key = argument["key"].strip()
            arguments[key] = schemas.value(match["name"], key, argument["value"])
        rest = _KEYED_ARGUMENT.sub("", match["body"])
        if re.sub(r"<tool_sep(?::\w+)?>", "", rest).strip():  # an argument is incomplete
            return None
        calls.append(ToolCall(match["name"], arguments))
    return calls


# names begin where a word does, so that a long word
# is read once and not from each of its characters
_NAME_START = r"(?<![\w.\-])"
# the name of a function, what separates it from its arguments, and where these begin
_NAMED_FORMS = (
    # Mistral
    re.compile(_NAME_START + r"(?P<name>[\w.\-]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\]\s*(?=\{)"),
    # Kimi K2
    re.compile(
        _NAME_START
        + r"(?:functions\.)?(?P<name>[\w.\-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
    ),
    # Solar
    re.compile(r"<\|tool_call:name\|>(?P<name>[\w.\-]+)<\|tool_call:args\|>\s*(?=\{)"),
    # DeepSeek V3, R1
    re.compile(r"<｜tool▁sep｜>(?P<name>[\w.\-]+)\s*```(?:json)?\s*(?=\{)"),
    # DeepSeek V3.1
    re.compile(r"<｜tool▁call▁begin｜>(?P<name>[\w.\-]+)<｜tool▁sep｜>\s*(?=\{)"),
)


# the marks between these calls
_BESIDE_NAMES = re.compile(
    "|".join(map(re.escape, ("[TOOL_CALLS]", *_INNER_MARKS, "```")))
    + r"|(?<=<｜tool▁call▁begin｜>)function|^function$"
)


def _named_calls(text: str, schemas: _Schemas) -> list[ToolCall] | None:
    """Read names that are followed by the arguments as JSON."""
    decoder = json.JSONDecoder(strict=False, parse_constant=_no_constant)
    for form in _NAMED_FORMS:
        calls = []
        rest = ""  # the text outside the calls
        position = 0
        while (match := form.search(text, position)) is not None:
            rest += text[position : match.start()]
            try:
                arguments, position = decoder.raw_decode(text, match.end())
            except (ValueError, RecursionError):
                return None
            calls.append(ToolCall(match["name"], arguments))
        if calls:
            rest = _BESIDE_NAMES.sub("", rest + text[position:])
            if rest.strip():
                return None
            return calls
    return None


def _python_calls(text: str, schemas: _Schemas) -> list[ToolCall] | None:
    """Read calls in Python's syntax with constant arguments: [weather(town="Oslo"), clock()] (LFM2,
    OLMo 3)."""
    if text.startswith("["):
        lists = [text]
    else:
        # several calls may be on one line with commas, or each on a line of its own
        lists = [f"[{text}]", f"[{','.join(text.splitlines())}]"]
    for source in lists:
        try:
            tree = ast.parse(source, mode="eval").body
            if isinstance(tree, ast.List):
                return [_python_call(node) for node in tree.elts]
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            continue
    return None


def _python_call(node: ast.expr) -> ToolCall:
    """Return a call with constant arguments by name; raise ValueError for any other expression."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call by name")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:  # **arguments
            raise ValueError("arguments without names")
        arguments[keyword.arg] = _constant(keyword.value)
    return ToolCall(_dotted_name(node.func), arguments)


def _dotted_name(node: ast.expr) -> str:
    """Return the name of a function: weather or tools.weather."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted_name(node.value)}.{node.attr}"
    raise ValueError("not a name")


_PYTHON_NAMES = {"true": True, "false": False, "null": None}


def _constant(node: ast.expr) -> Any:
    """Return the value of an expression of JSON's types; raise ValueError for any other."""
    if isinstance(node, ast.Name) and node.id in _PYTHON_NAMES:
        return _PYTHON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_constant(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return _object(node)
    # constants, also negative numbers; bytes and sets are none of JSON
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | None):
        raise ValueError("not a value of JSON")
    return value


def _object(node: ast.Dict) -> dict[str, Any]:
    """Return the value of a dict whose keys are texts; raise ValueError for any other."""
    values = {}
    for key_node, value_node in zip(node.keys, node.values, strict=True):
        # in Python's syntax tree, the key of {**other} is None
        key = None if key_node is None else _constant(key_node)
        if not isinstance(key, str):
            raise ValueError("not an object of JSON")
        values[key] = _constant(value_node)
    return values


_QUOTE = '<|"|>'  # Gemma 4's quotation mark


class _GemmaReader:
    """Reads Gemma 4's calls: call:NAME{key:value,...} with texts between <|"|>."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def take(self, expected: str) -> bool:
        """Skip a text if it comes next, and the white space before it."""
        start = self.position
        while self.text[start : start + 1].isspace():
            start += 1
        found = self.text.startswith(expected, start)
        if found:
            self.position = start + len(expected)
        return found

    def up_to(self, pattern: str) -> str:
        """Return the text up to a match of the pattern, or raise ValueError."""
        match = re.compile(pattern).search(self.text, self.position)
        if match is None:
            raise ValueError("incomplete")
        found = self.text[self.position : match.start()]
        self.position = match.start()
        return found

    def value(self) -> Any:
        """Read one value."""
        if self.take(_QUOTE):
            text = self.up_to(re.escape(_QUOTE))
            self.take(_QUOTE)
            return text
        if self.take("{"):
            return self.entries()
        if self.take("["):
            values = []
            while not self.take("]"):
                values.append(self.value())
                self.take(",")
            return values
        word = self.up_to(r"[,}\]]")
        # the templates of its first versions write null as Python does
        return json.loads(_JSON_OF_PYTHON.get(word, word), parse_constant=_no_constant)

    def entries(self) -> dict[str, Any]:
        """Read the entries of an object whose brace is open."""
        found = {}
        while not self.take("}"):
            if self.take(_QUOTE):
                key = self.up_to(re.escape(_QUOTE))
                self.take(_QUOTE)
            else:
                key = self.up_to(":").strip()
            if not self.take(":"):
                raise ValueError("a key without a value")
            found[key] = self.value()
            self.take(",")
        return found


def _gemma_calls(text: str, schemas: _Schemas) -> list[ToolCall] | None:
    reader = _GemmaReader(text)
    calls = []
    try:
        while reader.take("call:"):
            name = reader.up_to(r"\{")
            reader.take("{")
            calls.append(ToolCall(name, reader.entries()))
    except (ValueError, RecursionError):
        return None
    if not text[reader.position :].strip():
        return calls
    return None


# the first syntax that takes the whole text is used; that
# of names alone comes last, since a word could be one
_Reader = Callable[[str, _Schemas], list[ToolCall] | None]
_READERS: tuple[_Reader, ...] = (
    _json_calls,
    _element_calls,
    _named_calls,
    _gemma_calls,
    _python_calls,
    _keyed_calls,
)
