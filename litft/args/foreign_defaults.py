"""What axolotl, LLaMA-Factory and TRL do where their YAML file leaves a setting out.

Sources: axolotl's `AxolotlInputConfig` and its trainer builders; LLaMA-Factory's argument classes;
TRL's `SFTConfig`, `DPOConfig` and `ModelConfig`; transformers' `TrainingArguments`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from litft.args.aliases import BETAS, translate_optimizer
from litft.args.foreign_objectives import prompts_of


@dataclass(frozen=True, kw_only=True)
class ForeignProgram:
    """The defaults of a training program, by litft's flags."""

    # settings that only files of this program have
    marks: frozenset[str]
    # examples of a forward pass on one device
    rows: int
    defaults: Mapping[str, Any]
    # by objective; "" for every other one; empty: a file has to name its rate
    learning_rates: Mapping[str, float]
    # whether a number of steps takes the place of the epochs; otherwise the smaller one counts
    steps_replace_epochs: bool
    # the setting that says whether an adapter is trained, or all weights
    adapter_switch: str


# of every program that builds on transformers' Trainer
TRANSFORMERS: dict[str, Any] = {
    "train.epochs": 3,
    "train.lr_schedule": "linear",
    "train.warmup_fraction": 0.0,
    "train.min_lr_ratio": 0.0,
    "data.val_fraction": 0.0,
}
AXOLOTL = ForeignProgram(
    marks=frozenset({"base_model"}),
    rows=1,
    defaults={
        "train.epochs": 1,
        "train.warmup_fraction": 0.03,
        "train.min_lr_ratio": 0.0,
        "data.val_fraction": 0.0,
        "data.max_seq_length": 512,
    },
    learning_rates={},
    steps_replace_epochs=False,
    adapter_switch="adapter",
)
LLAMA_FACTORY = ForeignProgram(
    marks=frozenset({"finetuning_type", "stage"}),
    rows=8,
    defaults={**TRANSFORMERS, "data.max_seq_length": 2048, "lora.r": 8},
    learning_rates={"": 5e-5},
    steps_replace_epochs=True,
    adapter_switch="finetuning_type",
)
TRL = ForeignProgram(
    marks=frozenset({"model_name_or_path"}),
    rows=8,
    defaults={
        **TRANSFORMERS,
        "data.max_seq_length": 1024,
        "lora.r": 16,
        "lora.alpha": 32,
        "lora.dropout": 0.05,
    },
    # its GKD extends its SFT
    learning_rates={"sft": 2e-5, "dft": 2e-5, "distill": 2e-5, "": 1e-6},
    steps_replace_epochs=True,
    adapter_switch="use_peft",
)
# the first whose marks a file has: LLaMA-Factory's files have TRL's, too
PROGRAMS = (AXOLOTL, LLAMA_FACTORY, TRL)
# of SimPO in all of them
SIMPO = {"preference.beta": 0.1, "preference.gamma": 0.5}
# flags that take the place of a default
REPLACED_BY = {
    "train.warmup_fraction": "train.warmup_steps",
    "data.val_fraction": "data.val_path",
}
# settings with a share of the examples to hold out, or their number
HELD_OUT = ("val_set_size", "val_size", "test_split_size")
ADAPTIVE = (
    "adamw",
    "adamw_8bit",
    "paged_adamw",
    "paged_adamw_8bit",
    "lion",
    "schedule_free",
)


def program_of(entries: Mapping[str, Any]) -> ForeignProgram | None:
    """Return the program whose file has these settings; None if they do not say."""
    for program in PROGRAMS:
        if not program.marks.isdisjoint(entries):
            return program
    return None


def defaults_of(
    program: ForeignProgram, given: Mapping[str, Any], entries: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what the program does about the settings that a file leaves out, by litft's flags.

    given: litft's flags that the file sets. entries: the file's own settings.
    """
    missing: dict[str, Any] = {}
    for flag, value in program.defaults.items():
        if flag not in given and REPLACED_BY.get(flag) not in given:
            missing[flag] = value
    # a count of held-out examples has no counterpart, but some are held out
    if any(entries.get(name) for name in HELD_OUT):
        missing.pop("data.val_fraction", None)

    # the epochs do not apply where the number of steps ends the run
    if given.get("train.max_steps") and program.steps_replace_epochs:
        missing.pop("train.epochs", None)

    objective = given.get("objective", "sft")
    # the limit of TRL and axolotl is not of prompts with their completions
    if objective == "grpo":
        missing.pop("data.max_seq_length", None)
    rates = program.learning_rates
    rate = rates.get(objective, rates.get(""))
    if rate is not None and "train.learning_rate" not in given:
        missing["train.learning_rate"] = rate
    if objective == "simpo":
        for flag, value in SIMPO.items():
            if flag not in given:
                missing[flag] = value

    adaptive = translate_optimizer(given.get("train.optimizer", "adamw")) in ADAPTIVE
    if adaptive and "train.betas" not in given:
        missing["train.betas"] = [float(beta) for beta in BETAS.values()]

    # a step has the rows of one device times those that are accumulated
    if "train.global_batch_size" not in given:
        rows = given.get("train.micro_batch_size", program.rows)
        accumulated = entries.get("gradient_accumulation_steps") or 1
        if isinstance(rows, int) and isinstance(accumulated, int):
            size = rows * accumulated
            if objective == "grpo":
                size = prompts_of(size, given)
            missing["train.global_batch_size"] = max(1, size)

    # LLaMA-Factory's alpha is twice the rank
    if program is LLAMA_FACTORY and "lora.alpha" not in given:
        rank = given.get("lora.r", missing.get("lora.r"))
        if isinstance(rank, int):
            missing["lora.alpha"] = 2 * rank
    return missing
