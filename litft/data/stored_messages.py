"""Lists of messages that a file stores as text: the cells of a table have no other type."""

import ast
import json
import re
from typing import Any

# fields that are never a plain text
LISTS = ("messages", "conversations")
# fields that are texts, or lists of messages; in one record all of them are the same
TEXTS_OR_LISTS = ("prompt", "completion", "chosen", "rejected")
# of a list of objects, as JSON or as Python writes it
BEGINNING = re.compile(r"\s*\[\s*\{\s*[\"']")


def read_stored_messages(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with lists in place of texts that stand for lists of messages: JSON, or
    what Python prints.

    A prompt and an answer are only read so if both have this form: a text that is to be learned may
    look like a list of messages.
    """
    found = {}
    for name in LISTS:
        messages = _messages(record.get(name))
        if messages is not None:
            found[name] = messages
    of_turns = {}
    for name in TEXTS_OR_LISTS:
        if record.get(name) is not None:
            of_turns[name] = _messages(record[name])
    if len(of_turns) > 1 and None not in of_turns.values():
        found |= of_turns
    if not found:
        return record
    return {**record, **found}


def _messages(value: Any) -> list[dict[str, Any]] | None:
    """Return the list of messages that a text stands for; None if it is something else."""
    if not isinstance(value, str) or not BEGINNING.match(value):
        return None
    try:
        content = json.loads(value)
    except (ValueError, RecursionError):
        try:
            # literals alone, no calls or names
            content = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            return None
    if not isinstance(content, list):
        return None
    for item in content:
        if not isinstance(item, dict) or not item.keys() & {"role", "from"}:
            return None
    return content
