"""One item of --data.path or --data.val_path: a path, or a JSON object of a path with settings of
its own."""

import json
import os
import re
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, get_args

Formats = Literal[
    "messages",
    "sharegpt",
    "alpaca",
    "dolly",
    "prompt",
    "question",
    "summary",
    "text",
    "tokens",
]
NAME = re.compile(r"[\w-]+")  # of a validation set


@dataclass(frozen=True)
class DataPath:
    """Examples and how they are read. None: as the flags of --data say."""

    path: str
    name: str = ""  # of a validation set
    format: Formats | None = None
    # litft's field name -> the name in the file
    columns: dict[str, str] = field(default_factory=dict)
    template: str | None = None
    weight: float | None = None
    subset: str | None = None
    split: str | None = None
    limit: int | None = None

    @classmethod
    def parse(cls, item: str) -> "DataPath":
        """Return the path of an item: PATH, NAME=PATH, or JSON such as {"path": "a.jsonl",
        "format": "alpaca"}.

        Raise ValueError for invalid JSON, and for settings that do not exist or have a wrong type.
        """
        # a file may be named like JSON, or contain =
        if os.path.exists(item):
            return cls(item)
        if not item.lstrip().startswith("{"):
            name, equals, path = item.partition("=")
            if equals and NAME.fullmatch(name):
                return cls(path, name)
            return cls(item)
        try:
            settings = json.loads(item)
        except ValueError as error:
            raise ValueError(f"{item[:80]}: invalid JSON ({error})") from None
        unknown = [name for name in settings if name not in TYPES]
        if unknown:
            # axolotl's settings have another name here, or are not needed
            here = [
                f"{name!r} is here {FOREIGN_SETTINGS[name]}"
                for name in unknown
                if name in FOREIGN_SETTINGS
            ]
            here = "; ".join(here) or f"use {', '.join(TYPES)}"
            raise ValueError(
                f"{item[:80]}: no setting {', '.join(map(repr, unknown))}; {here}"
            )
        if "path" not in settings:
            raise ValueError(f"{item[:80]}: the path is missing")
        for name, value in settings.items():
            if not _is_valid(name, value):
                raise ValueError(
                    f"{item[:80]}: {name} {value!r}: expected {TYPES[name][1]}"
                )
        return cls(**settings)

    def entry(self) -> str | dict[str, Any]:
        """Return the item as a person writes it in YAML: a text if it is only a path, with or
        without a name."""
        defaults = {}
        for item in fields(self):
            if item.default is MISSING:
                # `columns` has a factory instead of a default, which gives {}
                defaults[item.name] = {}
            else:
                defaults[item.name] = item.default
        settings = {}
        for name in TYPES:
            value = getattr(self, name)
            if value != defaults[name]:
                settings[name] = value
        # the short form, if `parse` reads the same item from it
        if self.name:
            short = f"{self.name}={self.path}"
        else:
            short = self.path
        is_short = settings.keys() <= {"path", "name"} and (
            os.path.exists(short) or not short.lstrip().startswith("{")
        )
        if is_short and self.parse(short) == self:
            return short
        return settings

    def text(self) -> str:
        """Return the item that `parse` reads."""
        entry = self.entry()
        if isinstance(entry, str):
            return entry
        return json.dumps(entry, ensure_ascii=False)


# of each setting: type, and what it is, for messages
TYPES: dict[str, tuple[Any, str]] = {
    "path": (str, "text"),
    "name": (str, "letters, digits, _ and -"),
    "format": (str, f"one of {', '.join(get_args(Formats))}; left out, it is detected"),
    "columns": (dict, "an object of litft's field names and those in the file"),
    "template": (str, "text"),
    "weight": ((int, float), "a number in [0, 1000]"),
    "subset": (str, "text"),
    "split": (str, "text"),
    "limit": (int, "a whole number of at least 1"),
}


# settings of axolotl's data sets, and what they are here
FOREIGN_SETTINGS = {
    "type": "format, and detected if it is left out",
    "ds_type": "the ending of the file's name",
    "chat_template": "template",
    "field_messages": "found by itself, or columns {messages: THEIRS}",
    "field": "columns {text: THEIRS}",
    "message_property_mappings": "found by itself: role and content, or from and value",
    "roles": "not needed",
    "roles_to_train": "not needed: the assistant's turns are learned",
    "train_on_eos": "not needed: the end of an answer is learned",
    "data_files": "path",
}


def _is_valid(name: str, value: Any) -> bool:
    # True would pass as a number
    if not isinstance(value, TYPES[name][0]) or isinstance(value, bool):
        return False
    if name == "columns":
        return all(isinstance(column, str) for column in value.values())
    if name == "name":
        return NAME.fullmatch(value) is not None
    if name == "format":
        return value in get_args(Formats)
    if name == "weight":
        return 0 <= value <= 1000
    return name != "limit" or value >= 1
