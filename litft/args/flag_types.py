"""The types of a command's flags, by name."""

import dataclasses
from typing import Any, Literal, get_args, get_origin


def types_of_flags(cls: type, prefix: str = "") -> dict[str, Any]:
    """Return the type of every flag, by dotted name."""
    flag_types = {}
    for item in dataclasses.fields(cls):
        if dataclasses.is_dataclass(item.type):
            flag_types |= types_of_flags(item.type, f"{prefix}{item.name}.")
        else:
            flag_types[prefix + item.name] = item.type
    return flag_types


def is_finetuning(flag_types: dict[str, Any]) -> bool:
    """Return whether the flags are those of a fine-tuning command."""
    return "data.path" in flag_types and "train.epochs" in flag_types


def describe_type(flag_type: Any) -> str:
    """Return a readable description of a type, for messages."""
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
    }
    if flag_type in names:
        return names[flag_type]
    if get_origin(flag_type) is list:
        return "a list a,b,c"
    if get_origin(flag_type) is Literal:
        return " or ".join(get_args(flag_type))
    return " or ".join(names.get(part) or describe_type(part) for part in get_args(flag_type))
