"""A YAML file of axolotl, LLaMA-Factory or TRL in litft's terms.

It is printed after the error messages about the file's names, to replace the file.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import yaml

from litft.args.aliases import MICRO_NAMES, translate_flag, translate_optimizer
from litft.args.finetune import WITHOUT_BETAS
from litft.args.foreign_data import data_paths
from litft.args.foreign_defaults import (
    AXOLOTL,
    HELD_OUT,
    LLAMA_FACTORY,
    TRL,
    ForeignProgram,
    defaults_of,
    program_of,
)
from litft.args.foreign_objectives import set_objective
from litft.args.preference import DATA_KINDS, USED_BY

# a name and its value in a translation
FLAG = re.compile(r"--([\w.]+)(?: (?!--)(.*?))?(?= --|$)")
# of values that do not carry over
PLACEHOLDERS = (
    "N",
    "R",
    "RUN",
    "VALUE",
    "FILE.jinja",
    "NAMES",
)
# a new run does not need them: the strategy is chosen
OMITTED = ("resume", "strategy")
LOSS_MASKS_OF_TRL = ("completion_only_loss", "assistant_only_loss")
# settings whose meaning depends on others
READ_TOGETHER = (
    "run_name",
    "stage",
    "label_smoothing",
    "lr_scheduler_kwargs.min_lr",
    *LOSS_MASKS_OF_TRL,
)
DATA = {"datasets": "data.path", "test_datasets": "data.val_path"}
# whether the scales of quantized weights are quantized, too
NESTED_QUANTIZATION = (
    "double_quantization",
    "use_bnb_nested_quant",
    "bnb_4bit_use_double_quant",
)
TYPES_OF_4_BIT = ("bnb_4bit_quant_type", "quantization_type")
# settings of programs, litgpt among them, whose rates end at 0
ENDS_AT_0 = (
    "lr_scheduler",
    "lr_warmup_steps",
    "train.lr_warmup_steps",
    "optimizer.init_args",
)
# flags that several settings say together
OF_SEVERAL_SETTINGS = ("quantize",)
SWITCHES_OF_4_BIT = ("load_in_4bit", "quantization_bit", "use_qlora")
# flags that apply to supervised data alone
SUPERVISED_ONLY = ("data.mask_prompt", "data.format")
# litgpt's switches of the modules that LoRA adapts, with its defaults, and their names here
LITGPT_TARGETS: dict[str, tuple[bool, str]] = {
    "lora_query": (True, "q_proj"),
    "lora_key": (False, "k_proj"),
    "lora_value": (True, "v_proj"),
    "lora_projection": (False, "o_proj"),
    "lora_mlp": (False, "*.mlp.*"),
    "lora_head": (False, "lm_head"),
}


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
    notes: list[str] = []
    given = _values(_settings(entries, texts, flag_types, is_valid, notes), notes)
    program = program_of(entries)
    set_objective(given, entries, program in (TRL, AXOLOTL), notes)
    _read_together(given, entries, notes)
    if program is not None:
        for flag, value in defaults_of(program, given, entries).items():
            if flag in flag_types:
                given[flag] = value
        _settle_differences(given, entries, program, notes)
        _note_packing(entries, notes)
        _note_command(entries, program, notes, adapts="lora.r" in flag_types)
    elif any(name.startswith(ENDS_AT_0) for name in entries):
        # the schedules of other programs end at 0
        given.setdefault("train.min_lr_ratio", 0.0)
    # the lowest rate, as a fraction of the highest, which may be the program's default
    lowest = entries.get("lr_scheduler_kwargs.min_lr")
    highest = given.get("train.learning_rate")
    if lowest is not None and highest:
        given["train.min_lr_ratio"] = float(lowest) / float(highest)
    if program is not None or "optim" in entries:
        _settle_optimizer(given, notes)
    _settle_lora(given, entries, flag_types, notes)
    # a constant rate has no end to go to
    if given.get("train.lr_schedule") == "constant":
        given.pop("train.min_lr_ratio", None)
        # nor a beginning, in transformers, unless its name says so, or the optimizer has one
        names = (entries.get("lr_scheduler"), entries.get("lr_scheduler_type"))
        optimizer = translate_optimizer(str(given.get("train.optimizer", "adamw")))
        if "constant" in names and optimizer != "schedule_free":
            given.pop("train.warmup_steps", None)
            given["train.warmup_fraction"] = 0.0

    converted: dict[str, Any] = {}
    for flag, value in given.items():
        _put(converted, flag, value)
    _share_template(converted.get("data", {}))
    text = yaml.safe_dump(converted, sort_keys=False, allow_unicode=True).strip()
    return text, list(dict.fromkeys(notes))


class Setting(NamedTuple):
    """A value of litft's flag, and the name that a file of another program has for it."""

    flag: str
    value: Any
    name: str


def _settings(
    entries: Mapping[str, Any],
    texts: Mapping[str, str],
    flag_types: Mapping[str, Any],
    is_valid: Callable[[str, Any], bool],
    notes: list[str],
) -> list[Setting]:
    """Return the settings of a file, each read for itself."""
    settings = []
    # those that this method does not have
    of_lora: list[str] = []
    # LLaMA-Factory reads the loss in one stage
    reads_pref_loss = entries.get("stage", "dpo") == "dpo"
    for name, value in entries.items():
        if name in flag_types:
            if value is not None:
                settings.append(Setting(name, value, name))
        elif name in DATA:
            settings.append(Setting(DATA[name], data_paths(value, notes), name))
        elif name in READ_TOGETHER or (name == "pref_loss" and not reads_pref_loss):
            continue
        elif translation := translate_flag(name, texts[name], texts):
            # one setting may be several flags here
            for flag, setting in FLAG.findall(translation[0]):
                text = setting or "true"
                if flag in OMITTED or text in PLACEHOLDERS:
                    continue
                if flag not in flag_types:
                    of_lora.append(name)
                elif is_valid(flag, text):
                    settings.append(Setting(flag, _value(text), name))
                else:
                    notes.append(
                        f"{name}: {texts[name]} is no value of --{flag}; set that flag instead"
                    )
    if of_lora:
        notes.append(
            f"{', '.join(dict.fromkeys(of_lora))}: settings of finetune/lora.py, which this "
            "command does not have"
        )
    return settings


def _values(settings: list[Setting], notes: list[str]) -> dict[str, Any]:
    """Return the values by flag: the last one, if several settings say one flag."""
    last: dict[str, Setting] = {}
    for setting in settings:
        earlier = last.get(setting.flag, setting)
        is_other = earlier.value != setting.value
        if is_other and setting.flag not in OF_SEVERAL_SETTINGS:
            notes.append(
                f"{earlier.name}, {setting.name}: both are --{setting.flag} here, with different "
                f"values; {setting.name}, the later one, is used"
            )
        last[setting.flag] = setting
    return {flag: setting.value for flag, setting in last.items()}


def _read_together(
    given: dict[str, Any], entries: Mapping[str, Any], notes: list[str]
) -> None:
    """Read the settings whose meaning depends on others."""
    objective = given.get("objective", "sft")
    # an adapter knows its base
    for name in ("adapter_name_or_path", "lora_model_dir"):
        if entries.get(name):
            given["checkpoint_dir"] = entries[name]
    # a folder that the file names has the last word
    if entries.get("run_name"):
        given.setdefault("out_dir", f"out/{entries['run_name']}")
    # both masks apply: what is left is learned
    masks = [entries[name] for name in LOSS_MASKS_OF_TRL if entries.get(name) is not None]
    if masks:
        given["data.mask_prompt"] = any(masks)
    # of the vocabulary's targets, or of the order of a pair
    smoothing = entries.get("label_smoothing")
    if smoothing is not None and DATA_KINDS.get(objective) == "supervised":
        given["train.label_smoothing"] = smoothing
    elif smoothing is not None:
        given["preference.label_smoothing"] = smoothing

    _read_batch(given, entries, notes)
    _read_quantization(given, entries)
    # other programs ignore the rates of moments that the optimizer does not have
    optimizer = translate_optimizer(str(given.get("train.optimizer", "adamw")))
    if "train.betas" in given and optimizer in WITHOUT_BETAS:
        del given["train.betas"]
        notes.append(
            f"adam_beta1, adam_beta2: --train.optimizer {optimizer} has no such setting"
        )

    # other programs ignore what an objective does not use, and litft refuses it
    if objective not in ("sft", "dft"):
        given.pop("train.label_smoothing", None)
    if DATA_KINDS.get(objective, "supervised") != "supervised":
        for flag in SUPERVISED_ONLY:
            given.pop(flag, None)
    for flag in list(given):
        group, _, name = flag.rpartition(".")
        is_unused = group in ("grpo", "distill") and group != objective
        if group == "preference":
            is_unused = objective not in USED_BY[name]
        if is_unused:
            notes.append(f"--{flag} {given.pop(flag)} is of no use with {objective}")

    # a number below 1 is how transformers says: no limit
    max_steps = given.get("train.max_steps")
    if isinstance(max_steps, int) and max_steps < 1:
        del given["train.max_steps"]
    # no limit
    if "train.max_grad_norm" in entries and entries["train.max_grad_norm"] is None:
        given["train.max_grad_norm"] = 0.0
    # a switch that is off says nothing beside one that is on
    if entries.get("fp16") is True and entries.get("bf16") is False:
        given["precision"] = "fp16"
    warmup = given.get("train.warmup_steps")
    # no steps: transformers reads the share
    if warmup == 0 and given.get("train.warmup_fraction"):
        del given["train.warmup_steps"]
    # transformers 5 takes a number below 1 for a share of the run
    if isinstance(warmup, float) and 0 < warmup < 1:
        given["train.warmup_fraction"] = given.pop("train.warmup_steps")
    for name in HELD_OUT:
        if entries.get(name) and "data.val_fraction" not in given:
            notes.append(
                f"{name}: {entries[name]} is a number of examples; --data.val_fraction is a share "
                "of them"
            )


def _read_batch(
    given: dict[str, Any], entries: Mapping[str, Any], notes: list[str]
) -> None:
    """Count the examples of a step where the file has those of a device."""
    # the examples on a device, but for axolotl
    accumulated = entries.get("gradient_accumulation_steps")
    is_per_device = program_of(entries) is not AXOLOTL
    if is_per_device and accumulated and not any(name in entries for name in MICRO_NAMES):
        size = given.get("train.global_batch_size")
        if isinstance(size, int) and isinstance(accumulated, int):
            given["train.global_batch_size"] = size * accumulated
            notes.append(
                f"batch_size: {size} examples on each device there, and {accumulated} times as "
                "many in a step; on several devices, multiply --train.global_batch_size by their "
                "number"
            )


def _read_quantization(given: dict[str, Any], entries: Mapping[str, Any]) -> None:
    """Set the kind of 4-bit quantization, of which other programs have a setting for each part."""
    kind = str(given.get("quantize", "none"))
    # litgpt's names
    if kind.startswith("bnb."):
        given["quantize"] = kind.removeprefix("bnb.")
    # a file may also have our flag
    if "quantize" in entries or not kind.startswith(("nf4", "fp4")):
        return
    # the type alone quantizes nothing there
    if not any(entries.get(name) for name in SWITCHES_OF_4_BIT):
        del given["quantize"]
        return
    # axolotl has no switch for it, and LLaMA-Factory's is on
    is_nested = kind.endswith("-dq") or program_of(entries) in (AXOLOTL, LLAMA_FACTORY)
    base = kind.removesuffix("-dq")
    for entry, value in entries.items():
        # axolotl has them in a group, bnb_config_kwargs
        name = entry.rpartition(".")[2]
        if name in NESTED_QUANTIZATION and value is not None:
            is_nested = bool(value)
        if name in TYPES_OF_4_BIT and value:
            base = str(value)
    given["quantize"] = f"{base}-dq" if is_nested else base


def _note_packing(entries: Mapping[str, Any], notes: list[str]) -> None:
    """Note that a step has packed rows there, and examples here."""
    if any(
        entries.get(name) is True for name in ("sample_packing", "packing", "data.packing")
    ):
        notes.append(
            "packing: a step has packed rows there, of several examples each, and "
            "--train.global_batch_size counts examples; raise it, or the step count is larger here"
        )


def _note_command(
    entries: Mapping[str, Any], program: ForeignProgram, notes: list[str], adapts: bool
) -> None:
    """Note that the other program would train all weights with this file, and not an adapter, or
    the reverse. adapts: whether the command is finetune/lora.py."""
    switch = program.adapter_switch
    if program is LLAMA_FACTORY:
        is_adapter = entries.get(switch, "lora") == "lora"
    else:
        is_adapter = bool(entries.get(switch))
    if adapts == is_adapter:
        return
    if adapts and program is LLAMA_FACTORY:
        notes.append(
            f"{switch}: {entries[switch]} is another command here, finetune/full.py"
        )
    elif adapts:
        notes.append(
            f"{switch}: without it, all weights are trained there; here that is another command, "
            "finetune/full.py"
        )
    else:
        notes.append(
            f"{switch}: an adapter is trained there, at a rate that suits one; here that is "
            "another command, finetune/lora.py"
        )


def _settle_differences(
    given: dict[str, Any],
    entries: Mapping[str, Any],
    program: ForeignProgram,
    notes: list[str],
) -> None:
    """Settle where the same settings mean something else in the other program."""
    if given.get("train.max_steps") and program.steps_replace_epochs:
        epochs = given.pop("train.epochs", None)
        if epochs is not None:
            notes.append(
                f"the number of epochs, {epochs}: max_steps takes its place there; here the run "
                "would end at whichever comes first"
            )
    is_grpo = given.get("objective") == "grpo"
    if program is AXOLOTL and is_grpo and given.pop("data.max_seq_length", None):
        notes.append("sequence_len: axolotl's GRPO does not read it")
    elif program is AXOLOTL and "excess_length_strategy" not in entries and not is_grpo:
        notes.append(
            "sequence_len: axolotl leaves longer examples out; here they are cut, and the report "
            "says how many"
        )
    if program is LLAMA_FACTORY:
        template = given.get("data.template")
        if template is not None and not str(template).endswith(".jinja"):
            del given["data.template"]
            notes.append(
                f"template: {template} is a name of LLaMA-Factory; the model's own template is used"
            )
        if entries.get("stage") not in ("sft", None, *DATA_KINDS):
            notes.append(
                f"stage: {entries['stage']} has no counterpart; plain texts are learned with "
                "--data.format text"
            )
    if program is TRL:
        if "max_length" in entries and entries["max_length"] is None:
            given.pop("data.max_seq_length", None)
            notes.append(
                "max_length: null means no limit in TRL; here it is the model's context, at most "
                "2048, or --data.max_seq_length"
            )
        is_sft = given.get("objective", "sft") in ("sft", "dft")
        if is_sft and "data.mask_prompt" not in given:
            notes.append(
                "assistant_only_loss: TRL learns all of a conversation by default, litft the "
                "answers; --data.mask_prompt false learns all"
            )
        if entries.get("use_peft") and "lora.targets" not in given:
            notes.append(
                "lora_target_modules: left out, PEFT chooses by the type of the model, often "
                "q_proj,v_proj; litft adapts all Linears"
            )
    if given.get("objective") == "orpo" and program is not LLAMA_FACTORY:
        notes.append(
            "orpo: TRL's loss of the chosen answer includes the prompt; here it is the paper's, of "
            "the answer alone"
        )
    adds_sft_loss = program is not LLAMA_FACTORY and "cpo_alpha" not in entries
    if given.get("objective") == "simpo" and adds_sft_loss:
        notes.append(
            "cpo_alpha: TRL and axolotl add the loss of the chosen answers with weight 1 by "
            "default; --preference.sft_weight 1 adds it here"
        )


def _settle_optimizer(given: dict[str, Any], notes: list[str]) -> None:
    """Leave out the rate of optimizers that mean something else by it."""
    optimizer = translate_optimizer(str(given.get("train.optimizer", "adamw")))
    rate = given.get("train.learning_rate")
    if rate is None:
        return
    if optimizer == "adafactor":
        del given["train.learning_rate"]
        notes.append(
            f"adafactor: the rate {rate} is a length there, and a share of each weight here; the "
            "usual rate of the method is used"
        )
    if optimizer == "sgd":
        # YAML reads 1e-3, which has no point, as text
        given["train.learning_rate"] = float(rate) / 10
        notes.append(
            f"sgd: has a momentum of 0.9 here, and none there, so that a tenth of the rate {rate} "
            "moves weights as far"
        )


def _settle_lora(
    given: dict[str, Any],
    entries: Mapping[str, Any],
    flag_types: Mapping[str, Any],
    notes: list[str],
) -> None:
    """Leave out settings of LoRA that an adapter keeps, or that have another meaning here."""
    # PEFT reads a text with special characters as a regular expression
    targets = str(entries.get("lora_target_modules", ""))
    if "lora.targets" in flag_types and re.search(r"[\\(|+]", targets):
        given.pop("lora.targets", None)
        notes.append(
            "lora_target_modules: a regular expression has no counterpart; name modules, or "
            "patterns: *.q_proj"
        )
    # litgpt has a switch for each kind
    if "lora.targets" in flag_types and not LITGPT_TARGETS.keys().isdisjoint(entries):
        targets_of_litgpt = []
        for name, (default, target) in LITGPT_TARGETS.items():
            if entries.get(name, default):
                targets_of_litgpt.append(target)
        given["lora.targets"] = targets_of_litgpt
    # axolotl adapts all Linears beside the modules that are named
    if "lora.targets" in flag_types and entries.get("lora_target_linear") is True:
        given["lora.targets"] = "all-linear"
    # an adapter keeps its own ranks
    if entries.get("lora_model_dir") or entries.get("adapter_name_or_path"):
        for flag in list(given):
            if flag.startswith("lora.") and flag != "lora.dropout":
                del given[flag]


def _share_template(data: dict[str, Any]) -> None:
    """Move a template that all paths have to the data as a whole, so that chatting uses it, too."""
    items = data.get("path", [])
    if not isinstance(items, list):
        return
    if items and all(
        isinstance(item, dict) and item.get("template") == "alpaca" for item in items
    ):
        data["template"] = "alpaca"
        data["path"] = [
            {name: value for name, value in item.items() if name != "template"}
            for item in items
        ]


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
