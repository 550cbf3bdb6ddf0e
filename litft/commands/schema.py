"""The command `schema`: a command's flags as JSON Schema. Imports no torch.

The schema describes a file for --config: groups of flags are objects, as in a run's config.yaml.
"""

import dataclasses
import json
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from litft.args import ARGS, FINETUNE, SchemaArgs
from litft.args.build_parser import Flag, flags_of, title_of
from litft.args.flag_types import class_of_group
from litft.args.recipes import KEY as RECIPE_KEY

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SIMPLE_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    NoneType: "null",
}


def print_schema(args: SchemaArgs) -> None:
    """Print the schema of a command, or an object with those of all commands.

    Raise ValueError for a command that does not exist.
    """
    if args.command == "all":
        schemas = {name: command_schema(name) for name in ARGS}
        print(json.dumps(schemas, indent=2, ensure_ascii=False))
        return
    if args.command not in ARGS:
        names = ", ".join(["all", *ARGS])
        raise ValueError(f"--command {args.command}: no such command; there are {names}")
    print(json.dumps(command_schema(args.command), indent=2, ensure_ascii=False))


def command_schema(command: str) -> dict[str, Any]:
    """Return the JSON Schema of the flags of a command, a key of `ARGS`."""
    args_class = ARGS[command]
    flags = {flag.name: flag for flag in flags_of(args_class)}
    schema: dict[str, Any] = {
        "$schema": DIALECT,
        "title": f"litft {command}",
        "description": " ".join((args_class.__doc__ or "").split()),
    }
    schema |= _object_schema(args_class, flags, prefix="")
    if args_class in FINETUNE.values():
        note = {"type": "object", "description": "What a recipe is for."}
        schema["properties"][RECIPE_KEY] = note
    return schema


def _object_schema(args_class: Any, flags: dict[str, Flag], prefix: str) -> dict[str, Any]:
    """Return the schema of a class of arguments, whose flags begin with `prefix`."""
    properties = {}
    for item in dataclasses.fields(args_class):
        name = f"{prefix}{item.name}"
        group_class = class_of_group(item)
        if group_class is None:
            properties[item.name] = _flag_schema(flags[name])
        else:
            group = {"description": title_of(group_class, item.name)}
            properties[item.name] = group | _object_schema(group_class, flags, f"{name}.")
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _flag_schema(flag: Flag) -> dict[str, Any]:
    """Return the schema of one flag, with its default and help text."""
    schema = _type_schema(flag.type) | {"default": flag.default}
    if flag.help:
        schema["description"] = " ".join(flag.help.split())
    return schema


def _type_schema(flag_type: Any) -> dict[str, Any]:
    """Return the schema of the values of a type."""
    if flag_type in SIMPLE_TYPES:
        return {"type": SIMPLE_TYPES[flag_type]}
    if get_origin(flag_type) is Literal:
        return {"enum": list(get_args(flag_type))}
    if get_origin(flag_type) is list:
        (item_type,) = get_args(flag_type)
        items = _type_schema(item_type)
        # a path with settings of its own
        if item_type is str:
            items = {"type": ["string", "object"]}
        # a list may be written a,b,c
        return {
            "anyOf": [{"type": "array", "items": items}, {"type": ["string", "number"]}]
        }
    # a union, such as int | None
    return {"anyOf": [_type_schema(part) for part in get_args(flag_type)]}
