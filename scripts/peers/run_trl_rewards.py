"""The TRL contender of scripts/benchmark_rewards.py: steps of GRPOTrainer, without vLLM. Its
argument is the benchmark's setup, a JSON file; the last line it prints is the seconds of each
step."""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from litft.evaluation.rewards.builtin import number

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


class Clock(TrainerCallback):
    """Measures steps."""

    def __init__(self) -> None:
        self.seconds = []

    def on_step_begin(self, *_, **__):
        self.start = time.perf_counter()

    def on_step_end(self, *_, **__):
        self.seconds.append(time.perf_counter() - self.start)


def length(completions: list[list[dict]], **_: list) -> list[float]:
    """Return the number of characters of each completion."""
    return [float(len(completion[0]["content"])) for completion in completions]


def last_number(
    completions: list[list[dict]], answer: list[str], **_: list
) -> list[float | None]:
    """Return litft's reward `number` of each completion."""
    rewards = []
    for completion, text in zip(completions, answer, strict=True):
        rewards.append(number(completion[0]["content"], text))
    return rewards


def main() -> None:
    """Train, and print the seconds of each step."""
    setup = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(setup["threads"])
    lines = Path(setup["data"]["path"][0]).read_text().splitlines()
    records = []
    for line in lines:
        record = json.loads(line)
        question = record.get("prompt") or record["question"]
        prompt = [{"role": "user", "content": question}]
        records.append({"prompt": prompt, "answer": record.get("answer", "")})
    completions = setup["prompts"] * setup["group_size"]
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        # the generation of all prompts at once, and gradients of eight completions at a time
        per_device_train_batch_size=8,
        gradient_accumulation_steps=completions // 8,
        num_generations=setup["group_size"],
        max_completion_length=setup["max_new_tokens"],
        max_steps=setup["steps"],
        beta=0.0,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        use_cpu=True,
        bf16=setup["precision"] == "bf16",
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": DTYPES[setup["precision"]]},
    )
    clock = Clock()
    trainer = GRPOTrainer(
        model=setup["checkpoint_dir"],
        reward_funcs={"length": length, "number": last_number}[setup["reward"]],
        args=args,
        train_dataset=Dataset.from_list(records),
        peft_config=LoraConfig(r=16, target_modules=["q_proj", "v_proj"]),
        callbacks=[clock],
    )
    trainer.train()
    print(json.dumps(clock.seconds))


if __name__ == "__main__":
    main()
