"""The data sets of axolotl's YAML files as items of `data.path`."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from litft.args.data_path import TYPES, Formats
from litft.args.hub import HUB_NAME

RENAMED = {"data_files": "path", "name": "subset", "train_on_split": "split"}
# the name of a turn's speaker -> litft's field of the turns
TURNS = {"from": "conversations", "human": "conversations"}
# the names of speakers that litft knows
USUAL_ROLES: dict[str, set[str]] = {
    "system": {"system"},
    "user": {"human", "user"},
    "assistant": {"gpt", "assistant"},
    "tool": {"tool"},
}
# settings of a data set -> the values that litft has anyway; and what it does instead of others
EQUIVALENT_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "ds_type": (
        ("json", "csv", "parquet", "text"),
        "the ending of the file's name says it",
    ),
    "roles_to_train": (
        (["assistant"], ["gpt"], ["assistant", "gpt"]),
        "only the assistant's turns are learned",
    ),
    "train_on_eos": (("turn",), "the end of each answer is learned"),
    "train_on_eot": (("turn",), "the end of each answer is learned"),
    "chat_template": (
        ("tokenizer_default",),
        "--data.template, or template of this item, is a name or a Jinja file",
    ),
}
# types of axolotl that say the fields alone, or are converted
KNOWN_TYPES = (*get_args(Formats), "alpaca", "completion", "input_output")
KNOWN_TYPES += ("chat_template", "chat_template.default", "sharegpt", "llama3", "chatml")
# a type of axolotl with a style of its prompt
STYLE = re.compile(r"\w+[:.](?!default$)(?P<name>[\w.-]+)")
COLUMN_FIELDS = ("instruction", "input", "output", "system", "prompt", "chosen", "rejected")
SPEAKERS = (
    {"role": "role", "content": "content"},
    {"role": "from", "content": "value"},
)


def data_paths(data_sets: Any, notes: list[str]) -> list[Any]:
    """Return the items of `data.path` for axolotl's data sets; add notes on what is lost."""
    paths = []
    if not isinstance(data_sets, list):
        data_sets = [data_sets]
    for data_set in data_sets:
        for path, lost in data_items(data_set):
            paths.append(path)
            notes.extend(lost)
    return paths


def data_items(data_set: Any) -> Iterator[tuple[Any, list[str]]]:
    """Yield the items of `data.path` for one of axolotl's data sets, each a path or a mapping, and
    notes on what is lost."""
    if not isinstance(data_set, Mapping):
        yield data_set, []
        return
    settings: dict[str, Any] = {}
    for name, value in data_set.items():
        name = RENAMED.get(name, name)
        if name in TYPES and value is not None:
            settings[name] = value
    # in axolotl, `type` says both the fields and the prompt that is made of them
    if data_set.get("type") in get_args(Formats):
        settings["format"] = data_set["type"]
    # "alpaca" is also the prompt that is made, which litft would leave to the model's template
    if data_set.get("type") == "alpaca":
        settings["template"] = "alpaca"
    # plain texts, even beside the fields of a conversation
    if data_set.get("type") == "completion":
        settings["format"] = "text"
    # TRL's `columns` lists the columns to keep; litft's maps names, see `_columns`
    settings.pop("columns", None)
    columns = _columns(data_set)
    if columns:
        settings["columns"] = columns
    if _is_part_of_repository(data_set):
        settings["path"] = data_set["path"]
    files = settings.get("path")
    if not isinstance(files, list):
        files = [files]
    for path in files:
        # only data sets on the hub have splits; a path with a suffix is a file, even if it is
        # missing on this machine
        is_file = Path(str(path)).suffix != "" or os.path.exists(str(path))
        kept = {}
        for n, v in (settings | {"path": path}).items():
            if not (is_file and n in ("split", "subset")):
                kept[n] = v
        yield (
            (path if kept.keys() == {"path"} else kept),
            [f"{path}: {note}" for note in _losses(data_set)],
        )


def _is_part_of_repository(data_set: Mapping[str, Any]) -> bool:
    """Return whether the data set is files of a repository on the hub."""
    path = str(data_set.get("path"))
    is_on_hub = HUB_NAME.fullmatch(path) is not None and not os.path.exists(path)
    return bool(data_set.get("data_files")) and is_on_hub


def _columns(data_set: Mapping[str, Any]) -> dict[str, Any]:
    """Return litft's names of fields that the data set names otherwise."""
    columns: dict[str, Any] = {}
    # the field of plain texts
    if "field" in data_set:
        columns["text"] = data_set["field"]
    turns = data_set.get("field_messages")
    if turns is not None:
        properties = data_set.get("message_property_mappings")
        speaker = data_set.get("message_field_role")
        if isinstance(properties, Mapping):
            speaker = properties.get("role", speaker)
        # the name of the field with the turns says which form they have
        usual = "conversations" if turns == "conversations" else "messages"
        columns[TURNS.get(str(speaker), usual)] = turns
    # a `type` may also be a mapping with the names of the fields
    for source in (data_set, data_set.get("type")):
        if isinstance(source, Mapping):
            columns |= {
                field: source[f"field_{field}"]
                for field in COLUMN_FIELDS
                if f"field_{field}" in source
            }
    return {ours: theirs for ours, theirs in columns.items() if ours != theirs}


def _losses(data_set: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note for each setting that litft does not have, with what it does instead."""
    # settings that are converted, or that need no note
    known = {
        *(f"field_{field}" for field in COLUMN_FIELDS),
        *TYPES,
        *RENAMED,
        *EQUIVALENT_VALUES,
        "type",
        "field",
        "field_messages",
        "message_property_mappings",
        "message_field_role",
        "message_field_content",
        "message_field_training",
        "roles",
    }
    for name, value in data_set.items():
        if name in EQUIVALENT_VALUES and value not in EQUIVALENT_VALUES[name][0]:
            yield f"{name} {value!r} has no counterpart: {EQUIVALENT_VALUES[name][1]}"
        elif name == "message_property_mappings" and value not in SPEAKERS:
            yield (
                f"{name} {value!r} has no counterpart: turns have role and content, or from and "
                "value; rename them"
            )
        elif name == "roles" and not _are_usual_roles(value):
            yield (
                f"roles {value!r} has no counterpart: rename the speakers in the file, to user and "
                "assistant"
            )
        elif name == "message_field_training" and value not in (
            "train",
            "weight",
            "loss_weight",
        ):
            yield (
                f"{name} {value!r} has no counterpart: rename the field that masks a turn to train"
            )
        elif name in ("message_field_role", "message_field_content") and value not in (
            "role",
            "from",
            "content",
            "value",
        ):
            yield (
                f"{name} {value!r} has no counterpart: turns have role and content, or from and "
                "value; rename them"
            )
        elif name not in known:
            yield f"{name} has no counterpart"
    if _is_part_of_repository(data_set):
        yield (
            f"data_files {data_set['data_files']!r} has no counterpart for a data set of the hub: "
            "all of it is read; to read some of its files, download them and name them"
        )
    # such as train[:1000]
    if (
        str(data_set.get("split", "train")) != "train"
        and Path(str(data_set.get("path"))).suffix
    ):
        yield (
            f"split {data_set['split']!r} has no counterpart for a file: `limit` takes its first "
            "records"
        )
    yield from _lost_prompts(data_set)


def _are_usual_roles(roles: Any) -> bool:
    """Return whether litft knows all speakers by the names that axolotl's `roles` lists."""
    if roles is None:
        return True
    if not isinstance(roles, Mapping):
        return False
    for role, names in roles.items():
        if not isinstance(names, list) or not USUAL_ROLES.get(role, set()).issuperset(
            map(str, names)
        ):
            return False
    return True


def _lost_prompts(data_set: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note where the type of a data set says words of the prompt."""
    if (
        isinstance(prompt := data_set.get("type"), Mapping)
        and {"format", "no_input_format", "system_prompt"} & prompt.keys()
    ):
        yield (
            "the format of its type has no counterpart: the model's template is used; `template` "
            "names another"
        )
    # alpaca:mistral, chatml.intel: the part after the kind is a way to write the prompt
    style = STYLE.fullmatch(str(data_set.get("type")))
    if style:
        yield (
            f"type {data_set['type']}: {style['name']} has no counterpart: the model's template is "
            "used; `template` names another"
        )
    elif isinstance(data_set.get("type"), str) and data_set["type"] not in KNOWN_TYPES:
        yield (
            f"type {data_set['type']} has no counterpart: the fields of the records say their "
            "format, and the model's template writes the prompt; `template` names another"
        )
    if data_set.get("type") == "input_output":
        yield "type input_output (segments) is not supported: use records of input_ids and labels"
