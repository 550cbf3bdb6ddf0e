"""Records to examples: the table FORMATS lists the fields of each format and the function that converts its records.

The format of a record is detected from its fields, in the order of the table, unless `--data.format` names it.
Conversations have OpenAI's form, which chat templates also read: roles, text, `tool_calls`.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from litft.data.chat_template import Message, user_content

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing", "model", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function_response", "ipython"), "tool"),
    "system": "system",
}
LOSS_FIELDS = ("train", "loss_weight", "weight")  # fields of a turn that say whether the loss is computed on it
NO_TARGET = -100  # the label of a token that the loss ignores, in transformers
LONG_TEXT = 65_536  # characters of text above which a record is divided between training and validation
TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content", "thinking")  # of a message, which templates may show
# accepted labels of an answer, as text, and whether they mean that the answer is desirable
LABELS = {"true": True, "1": True, "desirable": True, "false": False, "0": False, "-1": False, "undesirable": False}
# written after every answer in some files, and removed: the chat template ends answers with the model's own token
END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "</s>")

Record = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """A conversation with the tools it may call, a plain text if `text` is not None, or `token_ids`.

    The loss is not computed on messages with `train` false. A text may be a part of a longer one: `begins` and `ends` say
    whether it has the beginning and the end. Text files and texts above LONG_TEXT are `divided` between training and
    validation; other records are not.
    """

    messages: list[Message]
    tools: list | None = None
    text: str | None = None
    begins: bool = True
    ends: bool = True
    divided: bool = False
    token_ids: list[int] | None = None
    supervised: list[bool] = field(default_factory=list)  # of each token id


class Format(NamedTuple):
    """The fields of a format, and a function that converts (record, label, chat template) to an example."""

    fields: tuple[str, ...]
    optional: tuple[str, ...]
    convert: Callable[[Record, str, str], Example]


def to_example(record: Record, where: str, template: str, form: str | None = None) -> Example:
    """Convert a record; raise ValueError naming the record if it has no supported format, or invalid values.

    template: the jinja source, whose style decides how an instruction and its input become one message.
    """
    form = form or detect_format(record, where)
    if missing := [name for name in FORMATS[form].fields if name not in record]:
        raise ValueError(f"{where}: --data.format {form} needs the fields {', '.join(missing)}")
    return FORMATS[form].convert(record, where, template)


def read_label(value: Any) -> bool | None:
    """Return whether a label means that an answer is desirable; None if it has another meaning."""
    return LABELS.get(str(value).lower().removesuffix(".0"))


def preference_kind(record: Record) -> str | None:
    """Return "pairs" for a record with a chosen and a rejected answer, "labels" for a labelled answer, otherwise None."""
    if record.get("chosen") is not None and record.get("rejected") is not None:
        return "pairs"
    has_answer = any(record.get(name) for name in ("completion", "messages", "conversations"))
    return "labels" if has_answer and read_label(record.get("label")) is not None else None


def detect_format(record: Record, where: str, missing: Sequence[str] = ()) -> str:
    """Return the name of a record's format; raise ValueError if no format matches its fields, or if it has a label.

    missing: names in --data.columns that the record does not have, for the message.
    """
    if preference_kind(record) == "labels":
        reason = "the field label says whether the answer is desirable, and --objective sft would learn both kinds"
        raise ValueError(f"{where}: {reason}; add --objective kto, or name the format with --data.format to ignore it")
    for filled in (True, False):  # prefer formats whose fields are not empty: a table may have columns of several formats
        for name, form in FORMATS.items():
            if all(field in record and (record[field] not in (None, "") or not filled) for field in form.fields):
                return name
    supported = "; ".join(f"{name}: {', '.join(form.fields)}" for name, form in FORMATS.items())
    field_names = ", ".join(map(repr, record))[:200] or "none"
    remedy = "map the fields with --data.columns OURS=THEIRS,..."
    texts = [name for name, value in record.items() if isinstance(value, str)]
    if len(texts) == 2:
        remedy = f"if they are question and answer: --data.columns 'prompt={texts[0]},completion={texts[1]}'"
    if re.search(r"\.[ct]sv\b", where):
        is_record = any(len(name) > 40 or name.rstrip().endswith(("?", ".")) for name in record)
        names = "the first line of a table must have the names of its fields"
        remedy = f"its first line seems to be a record; {names}: question,answer" if is_record else f"{remedy}; {names}"
    if missing:
        remedy = f"--data.columns OURS=THEIRS: it has no field {', '.join(map(repr, missing))}"
    if preference_kind(record) == "pairs":
        remedy = "these are preferences: add --objective dpo"
    raise ValueError(f"{where}: no known format has the fields {field_names}; {remedy} (formats: {supported})")


def rename_columns(record: Record, columns: dict[str, str]) -> Record:
    """Rename the fields of a record; columns: the format's field name -> the name in the file.

    A field that differs from a format's field only in capitals and spaces, such as "Question ", gets the format's name.
    """
    file_names = set(columns.values())
    others = {name: value for name, value in record.items() if name not in file_names}
    renamed = {name: record[file_name] for name, file_name in columns.items() if file_name in record}
    for name in [name for name in others if name not in KNOWN_FIELDS]:
        plain = name.strip().lower()
        if plain in KNOWN_FIELDS and plain not in others and plain not in renamed:
            renamed[plain] = others.pop(name)
    return others | renamed


def json_type(value: Any) -> str:
    """Return the name of a value's JSON type, for messages."""
    names = {dict: "an object", list: "an array", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def strip_end_token(text: str) -> str:
    """Remove an end token that the file has written after an answer."""
    stripped = text.rstrip()
    end = next((end for end in END_TOKENS if stripped.endswith(end)), None)
    if end == "</s>" and "<s>" in stripped:  # HTML's strikethrough
        end = None
    return stripped.removesuffix(end) if end else text


def text_field(record: Record, name: str, where: str) -> str:
    """Return a field that must be text; null and a missing field are empty."""
    value = record.get(name)
    if not isinstance(value, str | None):
        raise ValueError(f"{where}: field {name!r} must be text, found {json_type(value)}")
    return value or ""


def system_message(record: Record, where: str) -> list[Message]:
    """Return the record's system prompt as a list of one message, or an empty list."""
    text = text_field(record, "system", where)
    return [{"role": "system", "content": text}] if text.strip() else []


def with_system(messages: list[Message], record: Record, where: str) -> list[Message]:
    """Return messages with the record's system prompt in front, unless they begin with one of their own."""
    system = system_message(record, where)
    return messages if messages[0]["role"] in ("system", "developer") else system + messages


def _single_turn(question_field: str, answer_field: str, context_field: str | None = None, prefix: str = "") -> Callable:
    """Return the converter of a format with one question and one answer, given the names of its fields."""

    def convert(record: Record, where: str, template: str) -> Example:
        if isinstance(record.get(question_field), list) and isinstance(record.get(answer_field), list):
            messages = check_messages(record[question_field] + record[answer_field], where)
            messages = with_system(messages, record, where)
            return Example(messages, read_tools(record.get("tools"), where))
        question = prefix + text_field(record, question_field, where)
        if context_field:
            question = user_content(question, text_field(record, context_field, where), template)
        answer = {"role": "assistant", "content": text_field(record, answer_field, where)}
        messages = [*system_message(record, where), {"role": "user", "content": question}, answer]
        return Example(messages, read_tools(record.get("tools"), where))

    return convert


def _messages(record: Record, where: str, template: str) -> Example:
    messages = with_system(check_messages(record["messages"], where), record, where)
    return Example(messages, read_tools(record.get("tools"), where))


def check_messages(messages: Any, where: str) -> list[Message]:
    """Return the messages with plain text content; typed text parts are joined. Raise ValueError for anything else."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: 'messages' must be a list with at least one message")
    return [_message(message, f"{where}: message {number}") for number, message in enumerate(messages)]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        if isinstance(message, dict) and "role" not in message:
            given = ", ".join(map(repr, message)) or "none"
            raise ValueError(f"{where} has the fields {given}; litft needs role and content: rename them in the file")
        role = message.get("role") if isinstance(message, dict) else message
        raise ValueError(f"{where} has the role {role!r}; known: {', '.join(ROLES)}")
    calls = _calls(message.get("tool_calls"), where)
    content = message.get("content")
    if content is None and calls:
        content = ""
    if isinstance(content, list):
        content = "".join(_part(part, where) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{where} must have text as its 'content'")
    checked = {"role": message["role"], "content": content}
    checked |= {name: message[name] for name in TEXT_FIELDS if isinstance(message.get(name), str)}
    if calls:
        checked["tool_calls"] = calls
    if not _is_supervised(message, where):
        checked["train"] = False
    return checked


def _part(part: Any, where: str) -> str:
    """Return the text of one typed part."""
    if not isinstance(part, dict):
        raise ValueError(f"{where} has a part that is {json_type(part)}; expected an object with type and text")
    if part.get("type") != "text":
        raise ValueError(f"{where} has a part of type {part.get('type')!r}, but litft reads text only; remove it")
    text = part.get("text", part.get("value"))
    if not isinstance(text, str):
        raise ValueError(f"{where} has a part without text")
    return text


def _is_supervised(message: Message, where: str) -> bool:
    """Return whether the loss is computed on a turn, which any of LOSS_FIELDS may exclude."""
    for name in LOSS_FIELDS:
        value = message.get(name)
        if value is not None and (not isinstance(value, (bool, int, float)) or value not in (0, 1)):
            raise ValueError(f"{where}: {name} is {value!r}; use true (1) to compute the loss on the turn, or false (0)")
    return all(message.get(name) in (None, 1) for name in LOSS_FIELDS)


def _calls(calls: Any, where: str) -> list[dict]:
    """Return OpenAI's tool calls with their arguments as an object, as templates expect."""
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
    call_id = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {"type": "function", **call_id, "function": {"name": function["name"], "arguments": arguments}}


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: invalid JSON ({error})") from None


def read_tools(tools: Any, where: str) -> list | None:
    """Return the tools, given as a list or as its JSON, each as {"type": "function", "function": {...}}."""
    if isinstance(tools, str):
        tools = _json(tools, f"{where}: tools") if tools.strip() else None
    if not tools:
        return None
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"{where}: tools must be a list of objects, found {json_type(tools)}")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _conversations(record: Record, where: str, template: str) -> Example:
    """Convert ShareGPT's turns with `from` and `value`, or LIMA's list of alternating texts."""
    turns = record["conversations"]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where}: 'conversations' must be a list with at least one turn")
    if all(isinstance(turn, str) for turn in turns):
        texts = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]
        return Example(system_message(record, where) + texts, read_tools(record.get("tools"), where))
    messages: list[Message] = []
    for number, turn in enumerate(turns):
        message = sharegpt_turn(turn, f"{where}: turn {number}")
        last = messages[-1] if messages else {}
        if message["role"] == last.get("role") == "assistant":  # an answer and its tool call
            last["content"] = "\n\n".join(filter(None, (last["content"], message["content"])))
            if "train" in message:
                last["train"] = False
            if calls := last.get("tool_calls", []) + message.get("tool_calls", []):
                last["tool_calls"] = calls
        else:
            messages.append(message)
    return Example(with_system(messages, record, where), read_tools(record.get("tools"), where))


def sharegpt_turn(turn: Any, where: str) -> Message:
    """Convert one of ShareGPT's turns."""
    if not isinstance(turn, dict):
        raise ValueError(f"{where} must be an object with 'from' and 'value', found {json_type(turn)}")
    speaker = turn.get("from", turn.get("role"))
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise ValueError(f"{where} is from {speaker!r}; known: {', '.join(SHAREGPT_ROLES)}")
    value = turn.get("value", turn.get("content"))
    if speaker == "function_call":
        function_call = _json(value, where) if isinstance(value, str) else value
        calls = _calls(function_call if isinstance(function_call, list) else [function_call], where)
        message = {"role": "assistant", "content": "", "tool_calls": calls}
    elif isinstance(value, str):
        message = {"role": SHAREGPT_ROLES[speaker], "content": value}
    else:
        raise ValueError(f"{where} must have text as its 'value', found {json_type(value)}")
    return message if _is_supervised(turn, where) else message | {"train": False}


_GUANACO = re.compile(r"###\s*(Human|Assistant)\s*:")


def _text(record: Record, where: str, template: str) -> Example:
    """Convert guanaco's `### Human: ... ### Assistant: ...`, or plain text."""
    text, begins, ends = text_field(record, "text", where), *(record.get(name) is not False for name in ("begins", "ends"))
    before, *parts = _GUANACO.split(text)
    speakers, contents = parts[::2], parts[1::2]
    if not (text.lstrip().startswith("###") and "Assistant" in speakers):
        return Example([], text=text, begins=begins, ends=ends, divided="begins" in record or len(text) > LONG_TEXT)
    roles = {"Human": "user", "Assistant": "assistant"}
    system = re.sub(r"^\s*#+\s*System\s*:", "", before).strip()
    messages = [{"role": "system", "content": system}] if system else []
    return Example(messages + [{"role": roles[s], "content": c.strip()} for s, c in zip(speakers, contents, strict=True)])


def _token_ids(record: Record, where: str, template: str) -> Example:
    """Convert token ids and labels as the models of transformers take them: a label is its token's id, or -100."""
    ids, mask = _integers(record, "input_ids", where), record.get("attention_mask")
    labels = ids if record.get("labels") is None else _integers(record, "labels", where)
    mask = [1] * len(ids) if mask is None else _integers(record, "attention_mask", where)
    if not len(ids) == len(labels) == len(mask):
        raise ValueError(f"{where}: input_ids, labels and attention_mask must have the same length")
    kept = [(token, label) for token, label, attended in zip(ids, labels, mask, strict=True) if attended]  # no padding
    if wrong := [label for token, label in kept if label not in (NO_TARGET, token)]:
        raise ValueError(f"{where}: the label {wrong[0]} is neither -100 nor the token id at its place")
    if any(token < 0 for token, _ in kept):
        raise ValueError(f"{where}: input_ids has a negative token id")
    return Example([], token_ids=[token for token, _ in kept], supervised=[label != NO_TARGET for _, label in kept])


def _integers(record: Record, name: str, where: str) -> list[int]:
    values = record[name]
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError(f"{where}: field {name!r} must be a list of whole numbers")
    return values


FORMATS: dict[str, Format] = {
    "messages": Format(("messages",), ("tools",), _messages),
    "sharegpt": Format(("conversations",), ("system", "tools"), _conversations),
    "alpaca": Format(("instruction", "output"), ("input", "system"), _single_turn("instruction", "output", "input")),
    "dolly": Format(("instruction", "response"), ("context",), _single_turn("instruction", "response", "context")),
    "prompt": Format(("prompt", "completion"), ("system",), _single_turn("prompt", "completion")),
    "question": Format(("question", "answer"), ("system",), _single_turn("question", "answer")),
    "summary": Format(
        ("dialogue", "summary"), (), _single_turn("dialogue", "summary", prefix="Summarize this dialogue:\n\n")
    ),
    "text": Format(("text",), ("begins", "ends"), _text),
    # last: records of tokenized data sets may still have the text, and ids of another tokenizer
    "tokens": Format(("input_ids",), ("labels", "attention_mask"), _token_ids),
}
KNOWN_FIELDS = {"chosen", "rejected", "label"}.union(*(form.fields + form.optional for form in FORMATS.values()))
