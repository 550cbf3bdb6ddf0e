"""Records to examples: each format is a row that says which fields it has and how they become a conversation or a text.

A format is recognised by its fields, `messages` before the rest, plain `text` last; `--data.format` names one. A
conversation is in OpenAI's form, which is also what chat templates read: roles, text, `tool_calls`.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from litft.data.chat_template import Message, user_content

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing", "model", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function_response", "ipython"), "tool"),
    "system": "system",
}
WEIGHTS = ("train", "loss_weight", "weight")  # a turn's fields that say whether the loss counts it
BOOK = 65_536  # characters of a record's text from which on it is divided
KEPT = ("name", "tool_call_id", "reasoning_content", "thinking")  # texts of a message that templates may show
# what some files put behind every answer: the chat template ends it with the model's own token
ENDS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "</s>")

Record = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """What is learned from: a conversation with the tools it may call, or, where `text` is not None, a text as it is.

    A message with `train` false is read and not learned from. A text may be a part of one: without its beginning, or end.
    One of a text file, or as long as a book, is divided between training and validation; other records are not.
    """

    messages: list[Message]
    tools: list | None = None
    text: str | None = None
    begins: bool = True
    ends: bool = True
    divided: bool = False


class Format(NamedTuple):
    """How records of some fields are read; `convert` takes record, label and chat template."""

    fields: tuple[str, ...]
    optional: tuple[str, ...]
    convert: Callable[[Record, str, str], Example]


def to_example(record: Record, where: str, template: str, form: str | None = None) -> Example:
    """A record as an example; ValueError naming the record where it has no known format's fields, or bad values in them.

    template: the jinja source, whose style decides how an instruction and its input become one message.
    """
    form = form or detect_format(record, where)
    if lacking := [name for name in FORMATS[form].fields if name not in record]:
        raise ValueError(f"{where}: --data.format {form} needs the fields {', '.join(lacking)}")
    return FORMATS[form].convert(record, where, template)


def detect_format(record: Record, where: str) -> str:
    """The name of a record's format; ValueError where none has its fields."""
    for filled in (True, False):  # a table has columns of other formats too, which are empty
        for name, form in FORMATS.items():
            if all(field in record and (record[field] not in (None, "") or not filled) for field in form.fields):
                return name
    known = "; ".join(f"{name}: {', '.join(form.fields)}" for name, form in FORMATS.items())
    found = ", ".join(map(repr, record))[:200] or "none"
    remedy = "--data.columns OURS=THEIRS,... says which field is which"
    raise ValueError(f"{where}: no known format has the fields {found} ({known}); {remedy}")


def rename_columns(record: Record, columns: dict[str, str]) -> Record:
    """A record whose fields are called as the formats call them; columns: our name to the file's."""
    taken = set(columns.values())
    others = {name: value for name, value in record.items() if name not in taken}
    return others | {ours: record[theirs] for ours, theirs in columns.items() if theirs in record}


def json_type(value: Any) -> str:
    """What JSON calls a value."""
    names = {dict: "an object", list: "an array", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def without_end(text: str) -> str:
    """An answer without the end token that a file has written behind it."""
    bare = text.rstrip()
    end = next((end for end in ENDS if bare.endswith(end)), None)
    if end == "</s>" and "<s>" in bare:  # HTML that strikes something out
        end = None
    return bare.removesuffix(end) if end else text


def text_of(record: Record, name: str, where: str) -> str:
    """A field that must be text; null is an empty one."""
    value = record.get(name)
    if not isinstance(value, str | None):
        raise ValueError(f"{where}: field {name!r} must be text, found {json_type(value)}")
    return value or ""


def _system(record: Record, where: str) -> list[Message]:
    """The record's own system prompt, where it has one."""
    text = text_of(record, "system", where)
    return [{"role": "system", "content": text}] if text.strip() else []


def _asked_and_answered(asked: str, answer: str, context: str | None = None, prefix: str = "") -> Callable:
    """Formats of one question and one answer, by their fields' names."""

    def convert(record: Record, where: str, template: str) -> Example:
        if isinstance(record.get(asked), list) and isinstance(record.get(answer), list):
            messages = check_messages(_system(record, where) + record[asked] + record[answer], where)
            return Example(messages, read_tools(record.get("tools"), where))
        question = prefix + text_of(record, asked, where)
        if context:
            question = user_content(question, text_of(record, context, where), template)
        said = {"role": "assistant", "content": text_of(record, answer, where)}
        return Example([*_system(record, where), {"role": "user", "content": question}, said])

    return convert


def _messages(record: Record, where: str, template: str) -> Example:
    return Example(check_messages(record["messages"], where), read_tools(record.get("tools"), where))


def check_messages(messages: Any, where: str) -> list[Message]:
    """Messages with plain text content; content given as typed parts is joined. ValueError for anything else."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: 'messages' must be a list with at least one message")
    return [_message(message, f"{where}: message {number}") for number, message in enumerate(messages)]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, dict) else message
        raise ValueError(f"{where} has the role {role!r}; known: {', '.join(ROLES)}")
    calls = _calls(message.get("tool_calls"), where)
    content = message.get("content")
    if content is None and calls:
        content = ""
    if isinstance(content, list):
        content = "".join(_part(part, where) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{where} has no text as its 'content'")
    checked = {"role": message["role"], "content": content}
    checked |= {name: message[name] for name in KEPT if isinstance(message.get(name), str)}
    if calls:
        checked["tool_calls"] = calls
    if not _counts(message, where):
        checked["train"] = False
    return checked


def _part(part: Any, where: str) -> str:
    """The text of one typed part."""
    if not isinstance(part, dict):
        raise ValueError(f"{where} has a part that is {json_type(part)}; expected an object with type and text")
    if part.get("type") != "text":
        raise ValueError(f"{where} holds a part of type {part.get('type')!r}, and litft reads text; leave it out")
    text = part.get("text", part.get("value"))
    if not isinstance(text, str):
        raise ValueError(f"{where} has a part without text")
    return text


def _counts(message: Message, where: str) -> bool:
    """Whether a turn is learned from, by any of the fields that say so."""
    for name in WEIGHTS:
        value = message.get(name)
        if value is not None and (not isinstance(value, (bool, int, float)) or value not in (0, 1)):
            raise ValueError(f"{where}: {name} is {value!r}, and litft counts a turn (1, true) or does not (0, false)")
    return all(message.get(name) in (None, 1) for name in WEIGHTS)


def _calls(calls: Any, where: str) -> list[dict]:
    """OpenAI's tool calls, their arguments as an object, which is what templates expect."""
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise ValueError(f"{where}: tool_calls must be a list, found {json_type(calls)}")
    return [_call(call, where) for call in calls]


def _call(call: Any, where: str) -> dict:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: a tool call needs a name and arguments, found {str(call)[:80]!r}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json(arguments, f"{where}: the arguments of {function['name']}")
    known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {"type": "function", **known, "function": {"name": function["name"], "arguments": arguments}}


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: no valid JSON ({error})") from None


def read_tools(tools: Any, where: str) -> list | None:
    """The tools of a conversation, each as {"type": "function", "function": {...}}; given as a list or as its JSON."""
    if isinstance(tools, str) and tools.strip():
        tools = _json(tools, f"{where}: tools")
    if not tools:
        return None
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"{where}: tools must be a list of objects, found {json_type(tools)}")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _conversations(record: Record, where: str, template: str) -> Example:
    """ShareGPT's turns with `from` and `value`, or LIMA's list of texts that take turns."""
    turns = record["conversations"]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where}: 'conversations' must be a list with at least one turn")
    system = _system(record, where)
    if all(isinstance(turn, str) for turn in turns):
        return Example([*system, *({"role": ("user", "assistant")[n % 2], "content": t} for n, t in enumerate(turns))])
    messages: list[Message] = system
    for number, turn in enumerate(turns):
        message = _shared_turn(turn, f"{where}: turn {number}")
        last = messages[-1] if messages else {}
        if message["role"] == last.get("role") == "assistant":  # what was said, and then called
            last["content"] = "\n\n".join(filter(None, (last["content"], message["content"])))
            if "train" in message:
                last["train"] = False
            if calls := last.get("tool_calls", []) + message.get("tool_calls", []):
                last["tool_calls"] = calls
        else:
            messages.append(message)
    return Example(messages, read_tools(record.get("tools"), where))


def _shared_turn(turn: Any, where: str) -> Message:
    """One of ShareGPT's turns."""
    if not isinstance(turn, dict):
        raise ValueError(f"{where} must be an object with 'from' and 'value', found {json_type(turn)}")
    speaker = turn.get("from", turn.get("role"))
    if not isinstance(speaker, str) or speaker not in SHAREGPT:
        raise ValueError(f"{where} is from {speaker!r}; known: {', '.join(SHAREGPT)}")
    value = turn.get("value", turn.get("content"))
    if speaker == "function_call":
        called = _json(value, where) if isinstance(value, str) else value
        calls = _calls(called if isinstance(called, list) else [called], where)
        message = {"role": "assistant", "content": "", "tool_calls": calls}
    elif isinstance(value, str):
        message = {"role": SHAREGPT[speaker], "content": value}
    else:
        raise ValueError(f"{where} must have text as its 'value', found {json_type(value)}")
    return message if _counts(turn, where) else message | {"train": False}


_GUANACO = re.compile(r"###\s*(Human|Assistant)\s*:")


def _text(record: Record, where: str, template: str) -> Example:
    """guanaco's `### Human: ... ### Assistant: ...`, else plain text."""
    text, begins, ends = text_of(record, "text", where), *(record.get(name) is not False for name in ("begins", "ends"))
    before, *found = _GUANACO.split(text)
    speakers, said = found[::2], found[1::2]
    if not (text.lstrip().startswith("###") and "Assistant" in speakers):
        return Example([], text=text, begins=begins, ends=ends, divided="begins" in record or len(text) > BOOK)
    roles = {"Human": "user", "Assistant": "assistant"}
    system = re.sub(r"^\s*#+\s*System\s*:", "", before).strip()
    messages = [{"role": "system", "content": system}] if system else []
    return Example(messages + [{"role": roles[w], "content": what.strip()} for w, what in zip(speakers, said, strict=True)])


FORMATS: dict[str, Format] = {
    "messages": Format(("messages",), ("tools",), _messages),
    "sharegpt": Format(("conversations",), ("system", "tools"), _conversations),
    "alpaca": Format(("instruction", "output"), ("input", "system"), _asked_and_answered("instruction", "output", "input")),
    "dolly": Format(("instruction", "response"), ("context",), _asked_and_answered("instruction", "response", "context")),
    "prompt": Format(("prompt", "completion"), ("system",), _asked_and_answered("prompt", "completion")),
    "question": Format(("question", "answer"), ("system",), _asked_and_answered("question", "answer")),
    "summary": Format(
        ("dialogue", "summary"), (), _asked_and_answered("dialogue", "summary", prefix="Summarize this dialogue:\n\n")
    ),
    "text": Format(("text",), ("begins", "ends"), _text),
}
