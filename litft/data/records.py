"""Files of examples: JSON and JSONL, with Alpaca fields or `messages`. An error names the file and the line or index."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from litft.prompts import Message, user_content

SUFFIXES = (".json", ".jsonl")
ROLES = ("system", "user", "assistant")


def read_records(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The records of a .json (an array) or .jsonl file, each with a label that says where it stands."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; name a .json or .jsonl file, or for training a folder with both splits")
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path}: cannot read {path.suffix or 'a file without suffix'}; use {' or '.join(SUFFIXES)}")
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is no UTF-8 text (at byte {error.start}); name a text file, or convert it with iconv"
        ) from None
    records = list(_lines(path, text) if path.suffix.lower() == ".jsonl" else _array(path, text))
    if not records:
        raise ValueError(f"{path} holds no examples; it needs at least one")
    for where, record in records:
        if not isinstance(record, dict):
            raise ValueError(f"{where}: an example must be an object with fields, found {kind(record)}")
    return records


def kind(value: Any) -> str:
    """What JSON calls a value."""
    names = {dict: "an object", list: "an array", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"{path}, line {number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: no valid JSON ({error}); each line is one object") from None


def _array(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        content = json.loads(text or "[]")
    except json.JSONDecodeError as error:
        hint = "one object a line is .jsonl: rename the file" if error.msg == "Extra data" else "mend it there"
        raise ValueError(f"{path}, line {error.lineno}: no valid JSON ({error.msg}, column {error.colno}); {hint}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no valid JSON ({error}); mend it there") from None
    if not isinstance(content, list):
        raise ValueError(f"{path}: expected an array of examples, found {kind(content)}; put [ and ] around it")
    for index, record in enumerate(content):
        yield f"{path}, record {index}", record


def to_messages(record: dict[str, Any], where: str, template: str) -> list[Message]:
    """A record as messages; ValueError naming the record where it lacks the fields of a known format."""
    if "messages" in record:
        return check_messages(record["messages"], where)
    if "instruction" in record and "output" in record:
        for name in ("instruction", "input", "output"):
            if not isinstance(record.get(name), str | None):
                raise ValueError(f"{where}: field {name!r} must be text, found {kind(record[name])}")
        content = user_content(record["instruction"] or "", record.get("input") or "", template)
        answer = {"role": "assistant", "content": record["output"] or ""}
        return [{"role": "user", "content": content}, answer]
    fields = ", ".join(map(repr, record))[:200] or "none"
    raise ValueError(f"{where}: needs 'instruction' and 'output', or 'messages'; found the fields {fields}")


def check_messages(messages: Any, where: str) -> list[Message]:
    """Messages with plain text content; content given as typed parts is joined. ValueError for anything else."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: 'messages' must be a list with at least one message")
    checked = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, dict) else message
            raise ValueError(f"{where}: message {number} has the role {role!r}; known: {', '.join(ROLES)}")
        content = message.get("content")
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            parts = [part.get("text", part.get("value")) for part in content]
            content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
        if not isinstance(content, str):
            raise ValueError(f"{where}: message {number} has no text as its 'content'")
        checked.append({"role": message["role"], "content": content})
    return checked
