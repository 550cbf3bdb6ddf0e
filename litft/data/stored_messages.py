"""Lists of messages that a file stores as text: the cells of a table have no other type."""

import ast
import io
import json
import re
import tokenize
from typing import Any

# fields that are never a plain text
LISTS = ("messages", "conversations", "tools")
# an answer and the other one, or the prompt: texts, or lists of messages, both alike
PAIRS = (("chosen", "rejected"), ("prompt", "completion"))
# fields that hold a text or messages
TEXTS = ("prompt", "completion", "chosen", "rejected")
# the beginning of a list of messages, as JSON or as Python writes it
BEGINNING = re.compile(r"\s*\[\s*\{\s*[\"'](role|from|content|value)[\"']")
# the end of a table's name in the place of a record: "data.csv.gz, line 2"
TABLE = re.compile(r"\.[ct]sv(\.(gz|zst))?, line \d")
# of any list of objects
OBJECTS = re.compile(r"\s*\[\s*\{")


def read_stored_messages(record: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the record with lists in place of texts that stand for lists of messages: JSON, or
    what Python or numpy prints.

    An answer is only read so in a table, and if its prompt or the other answer has this form, too:
    a text that is to be learned may look like a list of messages. where: the place of the record,
    which begins with the file's name.
    """
    found = {}
    for name in LISTS:
        objects = _objects(record.get(name))
        if objects is not None:
            found[name] = objects
    pairs = PAIRS if TABLE.search(where) else ()
    for first, second in pairs:
        both = {
            first: parse_messages(record.get(first)),
            second: parse_messages(record.get(second)),
        }
        if None not in both.values():
            found |= both
    # beside two answers that are lists
    if "chosen" in found:
        prompt = parse_messages(record.get("prompt"))
        if prompt is not None:
            found["prompt"] = prompt
    if not found:
        return record
    return {**record, **found}


def has_messages_as_text(record: dict[str, Any], where: str) -> bool:
    """Return whether a prompt or an answer in a table is a text that looks like a list of
    messages."""
    if not TABLE.search(where):
        return False
    return any(
        isinstance(record.get(name), str) and BEGINNING.match(record[name])
        for name in TEXTS
    )


def parse_messages(value: Any) -> list[dict[str, Any]] | None:
    """Return the list of messages that a text stands for; None if it is something else."""
    objects = _objects(value)
    if objects is None:
        return None
    for item in objects:
        is_message = "role" in item and ("content" in item or "tool_calls" in item)
        is_turn = "from" in item and "value" in item
        if not is_message and not is_turn:
            return None
    return objects


def _objects(value: Any) -> list[dict[str, Any]] | None:
    """Return the list of objects that a text stands for; None if it is something else."""
    if not isinstance(value, str) or not OBJECTS.match(value):
        return None
    for parse in (json.loads, ast.literal_eval, _literal_of_numpy):
        try:
            content = parse(value.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
        if isinstance(content, list) and all(isinstance(item, dict) for item in content):
            return content
        return None
    return None


def _literal_of_numpy(text: str) -> Any:
    """Return what an array of objects stands for, which numpy prints without commas between them.

    pandas and datasets write such arrays into tables. Raises ValueError or SyntaxError for anything
    that is no literal.
    """
    pieces = []
    last = ""
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (
                tokenize.NEWLINE,
                tokenize.NL,
                tokenize.INDENT,
                tokenize.DEDENT,
            ):
                continue
            if last == "}" and token.string == "{":
                pieces.append(",")
            pieces.append(token.string)
            last = token.string
    except tokenize.TokenError as error:
        raise ValueError(f"no literal: {error}") from None
    return ast.literal_eval(" ".join(pieces))
