"""YAML files of other programs and of litft with random mistakes: one message and exit code 2,
never a traceback."""

import random
import time
from functools import partial

import pytest
import yaml
from mistakes import failure

from litft.args.finetune_commands import FINETUNE
from litft.args.parser import parse

AXOLOTL = """
base_model: NousResearch/Meta-Llama-3-8B
adapter: lora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_target_modules: [q_proj, v_proj]
lora_model_dir:
load_in_4bit: true
datasets:
  - path: mhenrichsen/alpaca_2k_test
    type: alpaca
    split: train
  - path: data.jsonl
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
    roles: {assistant: [gpt, model]}
    roles_to_train: [assistant]
val_set_size: 0.05
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
gradient_checkpointing: true
deepspeed: zero2.json
output_dir: ./out
"""
LLAMA_FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
max_samples: 1000
output_dir: saves/llama3-8b/lora/sft
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
quantization_bit: 4
"""
LITFT = """
checkpoint_dir: model
data: {path: [data.json], val_fraction: 0.1, max_seq_length: 512, template: chatml}
train: {max_steps: 10, learning_rate: 0.0002, global_batch_size: 8}
lora: {r: 8, alpha: 16.0, targets: [q_proj, v_proj]}
eval: {interval: 5, prompts: [Hello]}
save: {best: true}
objective: dpo
preference: {beta: 0.2}
"""
DATE = yaml.safe_load("2026-11-26")
VALUES = [
    None,
    0,
    5,
    -1.5,
    10**30,
    True,
    "",
    "x",
    "(",
    "a,b",
    "2" * 3000,
    [],
    {},
    [1],
    [None],
    [[[]]],
    {"a": 1},
]
VALUES += [
    {1: 2},
    {"r": {"r": 8}},
    [{"path": 5}],
    [{"path": ["a"]}],
    DATE,
    b"\x00\xff",
    float("nan"),
    float("inf"),
]


def mutated(content, generator):
    """Return a YAML object with one to three mistakes in it, at any depth."""
    content = yaml.safe_load(yaml.safe_dump(content))
    for _ in range(generator.randint(1, 3)):
        place = content
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = generator.choice(keys)
            if (
                isinstance(place[key], dict | list)
                and place[key]
                and generator.random() < 0.7
            ):
                place = place[key]
                continue
            kind = generator.choice(("value", "value", "value", "delete", "nest", "rename"))
            if kind == "delete":
                del place[key]
            elif kind == "nest":
                place[key] = {str(key): place[key]}
            elif kind == "rename" and isinstance(place, dict):
                place[generator.choice((5, None, True, "", f"{key}s", DATE))] = place.pop(
                    key
                )
            else:
                place[key] = generator.choice(VALUES)
            break
    return content


def test_mistakes_in_yaml_files(tmp_path, cases):
    path = tmp_path / "config.yaml"
    failures = []
    for number in range(cases(20)):
        generator = random.Random(number)
        text = generator.choice((AXOLOTL, LLAMA_FACTORY, LITFT))
        content = mutated(yaml.safe_load(text), generator)
        path.write_text(yaml.dump(content, sort_keys=False), "utf-8")
        method = generator.choice(sorted(FINETUNE))
        attempt = partial(parse, FINETUNE[method], ["--config", str(path)])
        problem = failure(attempt)
        if problem:
            failures.append(f"{number}, finetune/{method}.py: {problem}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("text", [AXOLOTL, LLAMA_FACTORY], ids=["axolotl", "LLaMA-Factory"])
@pytest.mark.parametrize("method", sorted(FINETUNE))
def test_files_of_other_programs_with_every_command(tmp_path, text, method):
    """Settings of LoRA have no counterpart in another method, which is said."""
    path = tmp_path / "config.yaml"
    path.write_text(text, "utf-8")
    with pytest.raises(ValueError, match="in litft's terms") as error:
        parse(FINETUNE[method], ["--config", str(path)])
    message = str(error.value)
    assert ("settings of finetune/lora.py" in message) == (method != "lora")


BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]\n" for n in range(1, 30)
)
HOSTILE = {
    "aliases": (BOMB, "more than 10,000 values"),
    "nested lists": (f"data: {'[' * 5000}{']' * 5000}", "no valid YAML"),
    "a number for a group": ("data: 5", "data"),
    "binary": (
        "data: {template: !!binary aGk=}\ntrain: {epochs: !!binary aGk=}",
        "train.epochs",
    ),
    "a list for the method of a recipe": (
        "recipe: {method: [lora]}",
        "method .'lora'. does not exist; use lora",
    ),
    "an object": (
        "data: !!python/object/apply:os.system [touch executed]",
        "no valid YAML",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_yaml_files(tmp_path, monkeypatch, name):
    text, words = HOSTILE[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(text, "utf-8")
    start = time.monotonic()
    with pytest.raises(ValueError, match=words):
        parse(FINETUNE["lora"], ["--config", "config.yaml"])
    assert time.monotonic() - start < 5 and not (tmp_path / "executed").exists()
