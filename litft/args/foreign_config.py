"""A YAML file of axolotl or LLaMA-Factory in litft's terms, to replace it after the error messages about its names."""

import re
from collections.abc import Mapping
from typing import Any, get_args

import yaml

from litft.args.aliases import translate
from litft.args.data_path import TYPES, Formats

FLAG = re.compile(r"--([\w.]+)(?: (.*?))?(?= --|$)")  # a name and its value in a translation
PLACEHOLDERS = ("N", "R", "RUN", "VALUE", "FILE.jinja", "NAMES")  # of values that do not carry over
# settings of axolotl's data sets that need no counterpart: litft finds the format and the turns by itself
DETECTED = ("type", "ds_type", "roles", "roles_to_train", "train_on_eos", "train_on_eot", "chat_template")
DETECTED += ("message_field_training", "message_field_training_detail", "message_property_mappings")
RENAMED = {"data_files": "path", "name": "subset", "train_on_split": "split"}
TURNS = {"from": "conversations", "human": "conversations"}  # the name of a turn's speaker -> litft's field of the turns


def in_litfts_terms(entries: Mapping[str, Any], texts: Mapping[str, str], flag_types: Mapping[str, Any]) -> str:
    """Return the YAML with litft's names, without what is not needed here or has no counterpart.

    entries: the values by dotted name; texts: the same in the form of the command line.
    """
    converted: dict[str, Any] = {}
    for name, value in entries.items():
        if name in flag_types:
            _put(converted, name, value)
        elif name in ("datasets", "test_datasets"):
            items = value if isinstance(value, list) else [value]
            _put(converted, "data.path" if name == "datasets" else "data.val_path", [data_item(item) for item in items])
        elif translation := translate(name, texts[name], texts):
            for flag, setting in FLAG.findall(translation[0]):
                if setting not in PLACEHOLDERS:
                    _put(converted, flag, yaml.safe_load(setting) if setting else True)
    return yaml.safe_dump(converted, sort_keys=False, allow_unicode=True).strip()


def data_item(item: Any) -> Any:
    """Return one of axolotl's data sets as an item of `data.path`: a path, or a mapping of the settings that remain."""
    if not isinstance(item, Mapping):
        return item
    settings, columns = {}, {}
    for name, value in item.items():
        if name == "field":
            columns["text"] = value
        elif name == "field_messages":
            speaker = (item.get("message_property_mappings") or {}).get("role", item.get("message_field_role"))
            columns[TURNS.get(speaker, "messages" if value != "conversations" else value)] = value
        elif name == "type" and isinstance(value, Mapping):
            fields = ("instruction", "input", "output", "system")
            columns |= {field: value[f"field_{field}"] for field in fields if f"field_{field}" in value}
        elif name not in DETECTED and value is not None:
            settings[RENAMED.get(name, name)] = value
    if item.get("type") in get_args(Formats):
        settings["format"] = item["type"]
    if columns := {ours: theirs for ours, theirs in columns.items() if ours != theirs}:
        settings["columns"] = columns
    settings = {name: value for name, value in settings.items() if name in TYPES}
    return settings["path"] if settings.keys() == {"path"} else settings


def _put(tree: dict[str, Any], name: str, value: Any) -> None:
    """Set the value of a dotted name in nested mappings."""
    *groups, leaf = name.split(".")
    for group in groups:
        tree = tree.setdefault(group, {})
    tree[leaf] = value
