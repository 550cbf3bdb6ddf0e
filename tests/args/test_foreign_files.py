"""YAML files of other programs: what the translation says does not depend on how a file is written."""

import dataclasses
import random
from typing import Any

import pytest
import yaml
from test_cli import AXOLOTL

from litft.args import parser
from litft.args.finetune_commands import LoRAFinetuneArgs

TERMS = "in litft's terms, without what has no counterpart:"
LLAMA_FACTORY = """
model_name_or_path: some/model
stage: dpo
pref_loss: sigmoid
pref_beta: 0.2
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: pairs.jsonl
template: llama3
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
warmup_ratio: 0.1
bf16: true
quantization_bit: 4
val_size: 0.1
"""
TRL = """
model_name_or_path: some/model
dataset_name: owner/name
use_peft: true
output_dir: out
"""
# settings that make it a file of one of TRL's trainers
TRAINERS = {
    "SFTConfig": {},
    "DPOConfig": {"loss_type": "sigmoid"},
    "KTOConfig": {"loss_type": "kto", "desirable_weight": 1.0},
    "GRPOConfig": {"num_generations": 8},
    "RLOOConfig": {"num_generations": 2, "normalize_advantages": False},
}
# The values of both programs are the same, or a note says how they differ; our defaults are chosen
# by the objective or the machine. `None`: any value.
CHOSEN_HERE: dict[str, Any] = {
    "train.eps": 1e-8,
    "train.betas": None,
    "train.micro_batch_size": None,
    "train.compile": None,
    "train.activation_checkpointing": None,
    "train.log_interval": None,
    "save.interval": None,
    "data.packing": None,
    "data.mask_prompt": None,
    "data.split": None,
    "precision": None,
    "preference.beta": 0.1,
    "train.optimizer": "adamw_torch_fused",
    "train.warmup_fraction": None,
    "train.warmup_steps": 0,
}


def translated(content: dict[str, Any], folder) -> tuple[dict[str, Any], list[str]]:
    """Return a file in litft's terms, by flag, and the other messages."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), "utf-8")
    with pytest.raises(ValueError, match="in litft's terms") as error:
        parser.parse(LoRAFinetuneArgs, ["--config", str(path)])
    messages, _, terms = str(error.value).partition(TERMS)
    return flat(yaml.safe_load(terms.partition("\n\n")[2].split("\n\n")[0])), sorted(
        messages.splitlines()
    )


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by their dotted names."""
    values = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[prefix + name] = value
    return values


@pytest.mark.parametrize(
    "text",
    [
        AXOLOTL,
        LLAMA_FACTORY,
        f"{TRL}loss_type: kto\nprecompute_ref_log_probs: true\nbeta: 0.3\nwarmup_ratio: 0.1",
        f"{TRL}desirable_weight: 1.3\nprecompute_ref_log_probs: true\nmax_length: 512",
        f"{TRL}num_generations: 4\nloss_type: dapo\nbeta: 0.1\nepsilon: 0.1\nmax_steps: 9",
        "model_name_or_path: m\nstage: kto\npref_loss: sigmoid\npref_beta: 0.2\nlora_rank: 4",
    ],
)
def test_the_order_of_settings_does_not_matter(text, tmp_path, cases):
    content = yaml.safe_load(text)
    expected = translated(content, tmp_path)
    for number in range(cases(5)):
        items = list(content.items())
        random.Random(number).shuffle(items)
        assert translated(dict(items), tmp_path) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dataset_text_field: text", {"data.path": "owner/name"}),
        ("dataset_text_field: body", {"data.columns": "text=body"}),
        ("loss_type: [ipo]\nbeta: 0.2", {"objective": "ipo", "preference.beta": 0.2}),
        ("loss_type: [sigmoid]", {"objective": "dpo", "train.learning_rate": 1e-6}),
        (
            "datasets: [{path: some/data, data_files: [a.jsonl]}]",
            {"data.path": ["some/data"]},
        ),
        (
            "datasets: [{path: json, data_files: [a.jsonl, b.jsonl]}]",
            {"data.path": ["a.jsonl", "b.jsonl"]},
        ),
    ],
)
def test_settings_of_trl_that_have_another_form_here(line, expected, tmp_path):
    terms, notes = translated(yaml.safe_load(TRL + line), tmp_path)
    assert {flag: terms[flag] for flag in expected} == expected
    assert ("data.columns" in terms) == ("data.columns" in expected)
    assert any("data_files" in note for note in notes) == ("some/data" in line)


def test_the_usual_roles_of_axolotl_are_known(tmp_path):
    usual = {"system": ["system"], "user": ["user"], "assistant": ["assistant"]}
    for roles, is_known in ((usual, True), ({"user": ["customer"]}, False)):
        data_set = {"path": "a.jsonl", "type": "chat_template", "roles": roles}
        _, notes = translated({"base_model": "m", "datasets": [data_set]}, tmp_path)
        assert any("rename the speakers" in note for note in notes) != is_known


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_defaults_of_trl_may_be_written_or_left_out(name, tmp_path):
    """A field with its default says what the file without it says."""
    import trl

    content = yaml.safe_load(TRL) | TRAINERS[name]
    short, _ = translated(content, tmp_path)
    ours = flat(dataclasses.asdict(LoRAFinetuneArgs()))
    configs = (getattr(trl, name), trl.ModelConfig, trl.ScriptArguments)
    for field in (field for config in configs for field in dataclasses.fields(config)):
        value = field.default
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        if field.name in content or not isinstance(value, bool | int | float | str | list):
            continue
        written, _ = translated({**content, field.name: value}, tmp_path)
        for flag in written.keys() | short.keys():
            before = short.get(flag, ours[flag])
            after = written.get(flag, ours[flag])
            is_known = flag in CHOSEN_HERE and CHOSEN_HERE[flag] in (None, after)
            assert before == after or is_known, (field.name, value, flag, before, after)
