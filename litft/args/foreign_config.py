"""A YAML file of axolotl or LLaMA-Factory in litft's terms, to replace it after the error messages
about its names."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml

from litft.args.aliases import translate
from litft.args.data_path import TYPES, Formats

FLAG = re.compile(r"--([\w.]+)(?: (?!--)(.*?))?(?= --|$)")  # a name and its value in a translation
PLACEHOLDERS = ("N", "R", "RUN", "VALUE", "FILE.jinja", "NAMES")  # of values that do not carry over
# a new run does not need them: the strategy is chosen
OMITTED = ("resume", "strategy")
DATA = {"datasets": "data.path", "test_datasets": "data.val_path"}
RENAMED = {"data_files": "path", "name": "subset", "train_on_split": "split"}
# the name of a turn's speaker -> litft's field of the turns
TURNS = {"from": "conversations", "human": "conversations"}
# settings of a data set -> the values that litft has anyway; and what it does instead of others
USUAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "ds_type": (("json", "csv", "parquet", "text"), "the ending of the file's name says it"),
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
FIELDS = ("instruction", "input", "output", "system", "prompt", "chosen", "rejected")
SPEAKERS = (
    {"role": "role", "content": "content"},
    {"role": "from", "content": "value"},
)


def in_litfts_terms(
    entries: Mapping[str, Any],
    texts: Mapping[str, str],
    flag_types: Mapping[str, Any],
    is_valid: Callable[[str, Any], bool],
) -> tuple[str, list[str]]:
    """Return the YAML with litft's names, and notes on settings of data sets that have no
    counterpart.

    entries: the values by dotted name; texts: the same in the form of the command line. is_valid:
    whether a flag accepts a value.
    """
    # entries are litft's flags, axolotl's data sets, or other programs' flags
    converted: dict[str, Any] = {}
    notes: list[str] = []
    # names of settings that this method does not have
    of_lora: list[str] = []
    for name, value in entries.items():
        if name in flag_types:
            if value is not None:
                _put(converted, name, value)
        elif name in DATA:
            items = []
            for data_set in value if isinstance(value, list) else [value]:
                items.extend(data_items(data_set))
            _put(converted, DATA[name], [item for item, _ in items])
            notes += [note for _, lost in items for note in lost]
        elif translation := translate(name, texts[name], texts):
            # one setting may be several flags here
            for flag, setting in FLAG.findall(translation[0]):
                text = setting or "true"
                if flag in OMITTED or text in PLACEHOLDERS:
                    continue
                if flag not in flag_types:
                    of_lora.append(name)
                elif is_valid(flag, text):
                    _put(converted, flag, _value(text))
                else:
                    notes.append(
                        f"{name}: {texts[name]} is no value of --{flag}; set that flag instead"
                    )
    if of_lora:
        notes.append(
            f"{', '.join(dict.fromkeys(of_lora))}: settings of finetune/lora.py, which this "
            "command does not have"
        )
    # an adapter keeps its own ranks
    if entries.get("lora_model_dir") or entries.get("adapter_name_or_path"):
        converted["lora"] = {
            name: value for name, value in converted.get("lora", {}).items() if name == "dropout"
        }
    # PEFT reads a text with special characters as a regular expression
    if "lora.targets" in flag_types and re.search(
        r"[\\(|+]", str(entries.get("lora_target_modules", ""))
    ):
        converted["lora"] = {
            name: value for name, value in converted.get("lora", {}).items() if name != "targets"
        }
        if entries.get("lora_target_linear"):
            converted["lora"]["targets"] = "all-linear"
        notes.append(
            "lora_target_modules: a regular expression has no counterpart; name modules, or "
            "patterns: *.q_proj"
        )

    # what the other program would do without being told
    _put_their_defaults(converted, entries)
    if "finetuning_type" in entries:
        _put_llama_factorys_defaults(converted, entries, flag_types, notes)
    _share_template(converted.get("data", {}))
    # groups that have lost all of their settings
    converted = {name: value for name, value in converted.items() if value != {}}
    return yaml.safe_dump(converted, sort_keys=False, allow_unicode=True).strip(), list(
        dict.fromkeys(notes)
    )


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
    if data_set.get("type") == "alpaca":  # which is a prompt there, too
        settings["template"] = "alpaca"
    columns = _columns(data_set)
    if columns:
        settings["columns"] = columns
    files = settings.get("path")
    for path in files if isinstance(files, list) else [files]:
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


def _put_their_defaults(converted: dict[str, Any], entries: Mapping[str, Any]) -> None:
    """Set what other programs do by default and litft does not."""
    train = converted.setdefault("train", {})
    if {"lr_scheduler", "lr_scheduler_type", "base_model", "model_name_or_path"} & entries.keys():
        train.setdefault("min_lr_ratio", 0.0)  # their schedules end at 0
    if "micro_batch_size" in train:  # they accumulate over one micro-batch
        train.setdefault("global_batch_size", train["micro_batch_size"])
    if "base_model" in entries and not {"val_set_size", "test_datasets"} & entries.keys():
        # axolotl holds nothing out
        converted.setdefault("data", {}).setdefault("val_fraction", 0.0)


def _put_llama_factorys_defaults(
    converted: dict[str, Any],
    entries: Mapping[str, Any],
    flag_types: Mapping[str, Any],
    notes: list[str],
) -> None:
    """Set what LLaMA-Factory does by default and litft does not.

    Source: its FinetuningArguments, and transformers' TrainingArguments of version 4.
    """
    train = converted.setdefault("train", {})
    # transformers' defaults, which differ from litft's
    train.setdefault("learning_rate", 5e-5)
    train.setdefault("lr_schedule", "linear")
    # a number of steps ends a run by itself there
    if "max_steps" not in train:
        train.setdefault("epochs", 3)
    if "warmup_steps" not in train:
        train.setdefault("warmup_fraction", 0.0)
    if "lora.alpha" in flag_types:
        lora = converted.setdefault("lora", {})
        # its lora_alpha is twice its lora_rank by default
        rank = lora.setdefault("r", 8)
        lora.setdefault("alpha", 2 * rank)
    data = converted.get("data", {})
    if "template" in data and not str(data["template"]).endswith(".jinja"):
        notes.append(
            f"template: {data.pop('template')} is a name of LLaMA-Factory; the model's own "
            "template is used"
        )


def _share_template(data: dict[str, Any]) -> None:
    """Move a template that all paths have to the data as a whole, so that chatting uses it, too."""
    items = data.get("path", [])
    if not isinstance(items, list):
        return
    if items and all(isinstance(item, dict) and item.get("template") == "alpaca" for item in items):
        data["template"] = "alpaca"
        data["path"] = [
            {name: value for name, value in item.items() if name != "template"} for item in items
        ]


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
                field: source[f"field_{field}"] for field in FIELDS if f"field_{field}" in source
            }
    return {ours: theirs for ours, theirs in columns.items() if ours != theirs}


def _losses(data_set: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note for each setting that litft does not have, with what it does instead."""
    # settings that are converted, or that need no note
    known = {
        *(f"field_{field}" for field in FIELDS),
        *TYPES,
        *RENAMED,
        *USUAL,
        "type",
        "field",
        "field_messages",
        "message_property_mappings",
        "roles",
    }
    for name, value in data_set.items():
        if name in USUAL and value not in USUAL[name][0]:
            yield f"{name} {value!r} has no counterpart: {USUAL[name][1]}"
        elif name == "message_property_mappings" and value not in SPEAKERS:
            yield (
                f"{name} {value!r} has no counterpart: turns have role and content, or from and "
                "value; rename them"
            )
        # axolotl's usual roles are those that litft knows
        elif name == "roles" and value not in (
            None,
            {"user": ["human", "user"], "assistant": ["gpt", "assistant"]},
        ):
            yield (
                f"roles {value!r} has no counterpart: rename the speakers in the file, to user and "
                "assistant"
            )
        elif name not in known and not str(name).startswith("message_field"):
            yield f"{name} has no counterpart"
    if (
        isinstance(prompt := data_set.get("type"), Mapping)
        and {"format", "no_input_format", "system_prompt"} & prompt.keys()
    ):
        yield (
            "the format of its type has no counterpart: the model's template is used; `template` "
            "names another"
        )
    # such as train[:1000]
    if str(data_set.get("split", "train")) != "train" and Path(str(data_set.get("path"))).suffix:
        yield (
            f"split {data_set['split']!r} has no counterpart for a file: `limit` takes its first "
            "records"
        )
    if data_set.get("type") == "input_output":
        yield "type input_output (segments) is not supported: use records of input_ids and labels"


def _value(text: str) -> Any:
    """Return the value that a text stands for in YAML, or the text itself."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _put(tree: dict[str, Any], name: str, value: Any) -> None:
    """Set the value of a dotted name in nested mappings."""
    *groups, leaf = name.split(".")
    for group in groups:
        # a value where a group belongs, which has a message of its own
        if not isinstance(tree.get(group), dict):
            tree[group] = {}
        tree = tree[group]
    tree[leaf] = value
