"""The types and the values of a command's flags, by name."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# groups with names that other groups have, too, and that mean these without the group: beta
GROUPED_NAMES = ("grpo", "distill")


def class_of_group(item: dataclasses.Field) -> "type[DataclassInstance] | None":
    """Return the dataclass of a field that is a group of flags; None for the field of a flag."""
    if isinstance(item.type, type) and dataclasses.is_dataclass(item.type):
        return item.type
    return None


def types_of_flags(cls: "type[DataclassInstance]", prefix: str = "") -> dict[str, Any]:
    """Return the type of every flag, by dotted name."""
    flag_types = {}
    for item in dataclasses.fields(cls):
        group_class = class_of_group(item)
        if group_class is None:
            flag_types[prefix + item.name] = item.type
        else:
            flag_types |= types_of_flags(group_class, f"{prefix}{item.name}.")
    return flag_types


def values_of_flags(args: "DataclassInstance") -> dict[str, Any]:
    """Return the value of every flag, by dotted name."""
    values = {}
    for name, value in dataclasses.asdict(args).items():
        if isinstance(value, dict):
            for key, item in value.items():
                values[f"{name}.{key}"] = item
        else:
            values[name] = value
    return values


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
    return " or ".join(
        names.get(part) or describe_type(part) for part in get_args(flag_type)
    )


def short_name(flag: str) -> str:
    """Return the name that a flag may have without its group: the last one, or group_name in groups
    whose names are those of other groups, too."""
    group, _, leaf = flag.rpartition(".")
    if group in GROUPED_NAMES:
        return f"{group}_{leaf}"
    return leaf
