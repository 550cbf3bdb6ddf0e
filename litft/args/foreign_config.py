"""A YAML file of axolotl, LLaMA-Factory or TRL in litft's terms.

It is printed after the error messages about the file's names, to replace the file.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml

from litft.args.aliases import translate_flag
from litft.args.data_path import TYPES, Formats
from litft.args.foreign_defaults import (
    AXOLOTL,
    LLAMA_FACTORY,
    TRL,
    ForeignProgram,
    defaults_of,
    program_of,
)
from litft.args.preference import DATA_KINDS

FLAG = re.compile(r"--([\w.]+)(?: (?!--)(.*?))?(?= --|$)")  # a name and its value in a translation
PLACEHOLDERS = ("N", "R", "RUN", "VALUE", "FILE.jinja", "NAMES")  # of values that do not carry over
# a new run does not need them: the strategy is chosen
OMITTED = ("resume", "strategy")
# the loss names the objective first
READ_LATER = ("stage",)
DATA = {"datasets": "data.path", "test_datasets": "data.val_path"}
RENAMED = {"data_files": "path", "name": "subset", "train_on_split": "split"}
# settings that only TRL's DPO has
SETTINGS_OF_DPO = {"rpo_alpha", "precompute_ref_log_probs", "ref_model_init_kwargs"}
# the name of a turn's speaker -> litft's field of the turns
TURNS = {"from": "conversations", "human": "conversations"}
# settings of a data set -> the values that litft has anyway; and what it does instead of others
EQUIVALENT_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
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
# a type of axolotl with a style of its prompt
STYLE = re.compile(r"\w+[:.](?!default$)(?P<name>[\w.-]+)")
COLUMN_FIELDS = ("instruction", "input", "output", "system", "prompt", "chosen", "rejected")
SPEAKERS = (
    {"role": "role", "content": "content"},
    {"role": "from", "content": "value"},
)


def translate_config(
    entries: Mapping[str, Any],
    texts: Mapping[str, str],
    flag_types: Mapping[str, Any],
    is_valid: Callable[[str, Any], bool],
) -> tuple[str, list[str]]:
    """Return the YAML with litft's names, and notes on what has no counterpart.

    entries: the values by dotted name; texts: the same in the form of the command line. is_valid:
    whether a flag accepts a value.
    """
    # the values by litft's flags
    given: dict[str, Any] = {}
    notes: list[str] = []
    # names of settings that this method does not have
    of_lora: list[str] = []
    for name, value in entries.items():
        if name in flag_types:
            if value is not None:
                given[name] = value
        elif name in DATA:
            given[DATA[name]] = _data_paths(value, notes)
        elif name in READ_LATER:
            continue
        elif name == "label_smoothing":  # the objective decides whose it is
            given["train.label_smoothing"] = value
        elif translation := translate_flag(name, texts[name], texts):
            # one setting may be several flags here
            for flag, setting in FLAG.findall(translation[0]):
                text = setting or "true"
                if flag in OMITTED or text in PLACEHOLDERS:
                    continue
                if flag not in flag_types:
                    of_lora.append(name)
                elif is_valid(flag, text):
                    given[flag] = _value(text)
                else:
                    notes.append(
                        f"{name}: {texts[name]} is no value of --{flag}; set that flag instead"
                    )
    if of_lora:
        notes.append(
            f"{', '.join(dict.fromkeys(of_lora))}: settings of finetune/lora.py, which this "
            "command does not have"
        )
    _set_objective(given, entries)
    program = program_of(entries)
    if program is not None:
        for flag, value in defaults_of(program, given, entries).items():
            if flag in flag_types:
                given[flag] = value
        _settle_differences(given, entries, program, notes)
    elif {"lr_scheduler", "lr_scheduler_type"} & entries.keys():
        # the schedules of other programs end at 0
        given.setdefault("train.min_lr_ratio", 0.0)
    _settle_lora(given, entries, flag_types, notes)

    converted: dict[str, Any] = {}
    for flag, value in given.items():
        _put(converted, flag, value)
    _share_template(converted.get("data", {}))
    text = yaml.safe_dump(converted, sort_keys=False, allow_unicode=True).strip()
    return text, list(dict.fromkeys(notes))


def _data_paths(data_sets: Any, notes: list[str]) -> list[Any]:
    """Return the items of `data.path` for axolotl's data sets; add notes on what is lost."""
    paths = []
    for data_set in data_sets if isinstance(data_sets, list) else [data_sets]:
        for path, lost in data_items(data_set):
            paths.append(path)
            notes.extend(lost)
    return paths


def _set_objective(given: dict[str, Any], entries: Mapping[str, Any]) -> None:
    """Set the objective, and give beta the name that it has with this objective."""
    if "objective" not in given:
        # LLaMA-Factory names the stage, and TRL's settings of DPO tell its files
        if entries.get("stage") in DATA_KINDS:
            given["objective"] = entries["stage"]
        elif not SETTINGS_OF_DPO.isdisjoint(entries):
            given["objective"] = "dpo"
    # one setting elsewhere: of the vocabulary's targets, or of the order of a pair
    if given.get("objective", "sft") != "sft" and "train.label_smoothing" in given:
        given["preference.label_smoothing"] = given.pop("train.label_smoothing")
    # the weight of the odds ratio is called beta elsewhere
    if given.get("objective") == "orpo" and "preference.beta" in given:
        given["preference.orpo_lambda"] = given.pop("preference.beta")


def _settle_differences(
    given: dict[str, Any], entries: Mapping[str, Any], program: ForeignProgram, notes: list[str]
) -> None:
    """Settle where the same settings mean something else in the other program."""
    if given.get("train.max_steps") and program.steps_replace_epochs:
        epochs = given.pop("train.epochs", None)
        if epochs is not None:
            notes.append(
                f"the number of epochs, {epochs}: max_steps takes its place there; here the run "
                "would end at whichever comes first"
            )
    if program is LLAMA_FACTORY:
        template = given.get("data.template")
        if template is not None and not str(template).endswith(".jinja"):
            del given["data.template"]
            notes.append(
                f"template: {template} is a name of LLaMA-Factory; the model's own template is used"
            )
    if program is TRL:
        is_sft = given.get("objective", "sft") == "sft"
        if is_sft and not {"assistant_only_loss", "completion_only_loss"} & entries.keys():
            notes.append(
                "assistant_only_loss: TRL learns all of a conversation by default, litft the "
                "answers; --data.mask_prompt false learns all"
            )
        if "lora.targets" not in given:
            notes.append(
                "lora_target_modules: left out, PEFT chooses by the type of the model, often "
                "q_proj,v_proj; litft adapts all Linears"
            )
    if given.get("objective") == "simpo" and program is AXOLOTL and "cpo_alpha" not in entries:
        notes.append(
            "cpo_alpha: axolotl adds the loss of the chosen answers with weight 1 by default; "
            "--preference.sft_weight 1 adds it here"
        )


def _settle_lora(
    given: dict[str, Any],
    entries: Mapping[str, Any],
    flag_types: Mapping[str, Any],
    notes: list[str],
) -> None:
    """Leave out settings of LoRA that an adapter keeps, or that have another meaning here."""
    # an adapter keeps its own ranks
    if entries.get("lora_model_dir") or entries.get("adapter_name_or_path"):
        for flag in list(given):
            if flag.startswith("lora.") and flag != "lora.dropout":
                del given[flag]
    # PEFT reads a text with special characters as a regular expression
    targets = str(entries.get("lora_target_modules", ""))
    if "lora.targets" in flag_types and re.search(r"[\\(|+]", targets):
        given.pop("lora.targets", None)
        if entries.get("lora_target_linear"):
            given["lora.targets"] = "all-linear"
        notes.append(
            "lora_target_modules: a regular expression has no counterpart; name modules, or "
            "patterns: *.q_proj"
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
    # plain texts, even beside the fields of a conversation
    if data_set.get("type") == "completion":
        settings["format"] = "text"
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
    # alpaca:mistral, chatml.intel: the part after the kind is a way to write the prompt
    style = STYLE.fullmatch(str(data_set.get("type")))
    if style:
        yield (
            f"type {data_set['type']}: {style['name']} has no counterpart: the model's template is "
            "used; `template` names another"
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
