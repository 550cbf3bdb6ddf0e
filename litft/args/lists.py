"""Flags with several values: a list is written `a,b`, as words up to the next flag, or as JSON."""

import json
import os
import re
from collections.abc import Sequence
from typing import Any

# flags with a list of texts, whose white space counts
TEXT_LISTS = ("stop",)
# flags whose items may be patterns with commas and white space
PATTERN_LISTS = ("reward",)
PATTERN = "regex:"  # before one


def next_value(words: list[str]) -> str | None:
    """Remove the value of a flag from the words after it, and return it; None if it is missing."""
    if words and not words[0].startswith("--") and words[0] != "-h":
        return words.pop(0)
    return None


def next_values(words: list[str], flag_type: Any, name: str) -> str | None:
    """Remove the words up to the next flag, and return them as one list; None if there are none.
    name: of the flag.

    A shell writes a pattern without quotes as several words.
    """
    values = []
    while (word := next_value(words)) is not None:
        values.append(word)
    if len(values) < 2:
        return values[0] if values else None
    if flag_type == list[float]:
        return ",".join(value.strip(",") for value in values)
    items = []
    for value in values:
        # with several words, a comma within one is a part of a text
        if name in TEXT_LISTS or ", " in value:
            items.append(value)
        else:
            items += json.loads(as_list(value, flag_type, name))
    return json.dumps(items, ensure_ascii=False)


def _items(value: str, name: str) -> list[str]:
    """Return the items of a list that commas divide.

    Of TEXT_LISTS a single item is taken as it is, and white space alone is an item, as in
    `--stop $'\\n'`.
    """
    keeps_spaces = name in TEXT_LISTS
    if keeps_spaces and "," not in value:
        return [value]
    if name in PATTERN_LISTS:
        # a comma at the end divides nothing, also where the pattern goes on in the next word
        return whole_patterns(value.rstrip().removesuffix(",").split(","))
    # the name of a run may have commas: lr=1e-4,r=8
    if os.path.exists(value):
        return [value]
    items = []
    for item in value.split(","):
        if item.strip():
            items.append(item.strip())
        elif item and keeps_spaces:
            items.append(item)
    return items


def whole_patterns(items: Sequence[str]) -> list[str]:
    """Return the items with the commas of patterns, such as regex:[0-9]{1,3}, at which a list is
    divided; blank items outside patterns are none."""
    whole: list[str] = []
    for item in items:
        if whole and whole[-1].startswith(PATTERN) and _is_open(whole[-1]):
            whole[-1] += f",{item}"
        elif item.strip():
            whole.append(item.lstrip())
    return [item.rstrip() for item in whole]


def _is_open(item: str) -> bool:
    """Return whether regex:PATTERN has a bracket that is not closed."""
    pattern = item.removeprefix(PATTERN)
    # python takes the beginning of {1,3} for plain text
    if re.search(r"(?<!\\)\{\d*$", pattern):
        return True
    try:
        re.compile(pattern)
    except re.error:
        return True
    return False


def as_list(value: str, flag_type: Any, name: str = "") -> str:
    """Return a list as JSON: a,b becomes ["a", "b"].

    JSON stays unchanged (for items with commas). name: of the flag, see `_items`.
    """
    if value == "null":
        return "[]"
    # numbers need no quotation marks, but may have brackets
    if flag_type == list[float]:
        return f"[{value.strip('[]')}]"
    try:
        items = json.loads(value)
    except ValueError:
        items = None
    if isinstance(items, dict):  # a path with settings
        items = [items]
    if isinstance(items, list) and all(isinstance(item, str | dict) for item in items):
        items = item_texts(items)
    else:
        items = _items(value, name)
    # read as YAML, which has no escapes for surrogate pairs
    return json.dumps(items, ensure_ascii=False)


def item_texts(items: list[Any]) -> list[Any]:
    """Return the items of a list with objects as JSON, and with dates and the like as text."""
    texts = []
    for item in items:
        if isinstance(item, dict):
            texts.append(json.dumps(item, ensure_ascii=False, default=str))
        elif isinstance(item, str | int | float | list | None):
            texts.append(item)
        else:
            texts.append(str(item))
    return texts
