"""Measure LoRA training on several devices with DDP or FSDP2, as a run of finetune/lora.py on
random weights.

    python scripts/scaling_step.py --model llama-3.1-8b --devices 8 --strategy fsdp --out
    scaling.json

Needs transformers, which writes the random model into a temporary folder.
"""

import csv
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from litft.args.parser import parse
from litft.cli import user_errors

ROOT = Path(__file__).resolve().parent.parent
STEPS = 8


@dataclass
class ScalingArgs:
    """Measure LoRA training on several devices."""

    model: str = "llama-3.1-8b"
    """A folder in scripts/configs."""
    devices: int = 2
    """Number of devices."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """How they share the work; of no meaning for one device."""
    tokens: int = 2048
    """Tokens of a row."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """The device type to run on. auto: cuda if available."""
    out: str | None = None
    """A JSON file to write the results to. Default: no file."""

    def problems(self) -> list[str]:
        """Return the problems of the flags."""
        if self.devices >= 1:
            return []
        return [f"--devices {self.devices}: must be at least 1"]


def write_model(args: ScalingArgs, folder: Path) -> None:
    """Write a model with random weights, and the demo's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from litft.distributed.devices import pick_accelerator
    from litft.pretrained.folder import DEMO

    config = AutoConfig.from_pretrained(ROOT / "scripts" / "configs" / args.model)
    with torch.device(pick_accelerator(args.accelerator)):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
            folder
        )
    for path in (DEMO / "base").glob("tokenizer*"):
        shutil.copyfile(path, folder / path.name)


def main(args: ScalingArgs) -> None:
    """Run the steps and print the median tokens per second of all devices."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "model"
        data = Path(work) / "data.jsonl"
        write_model(args, folder)
        rng = random.Random(0)
        words = "once upon a time there was a little girl who lived in a house".split()
        text = [
            " ".join(rng.choice(words) for _ in range(4 * args.tokens))
            for _ in range(4 * args.devices)
        ]
        data.write_text(
            "".join(json.dumps({"text": line}) + "\n" for line in text), "utf-8"
        )
        flags = (
            f"--checkpoint_dir {folder} --data.path {data} --data.max_seq_length {args.tokens} "
            f"--out_dir {work}/run "
        )
        flags += (
            f"--accelerator {args.accelerator} --devices {args.devices} "
            f"--strategy {args.strategy} "
        )
        flags += (
            f"--train.global_batch_size {2 * args.devices} --train.max_steps {STEPS} "
            "--train.log_interval 1 "
        )
        flags += (
            "--train.activation_checkpointing none --eval.max_new_tokens 0 --save.interval 0 "
            "--data.val_fraction 0"
        )
        subprocess.run(
            [sys.executable, ROOT / "finetune" / "lora.py", *flags.split()],
            check=True,
            stdout=sys.stderr,
        )
        with (Path(work) / "run" / "metrics.csv").open() as file:
            rows = []
            for row in csv.DictReader(file):
                if row["tokens_per_second"]:
                    rows.append(row)
    figures = {
        "tokens_per_second": statistics.median(
            float(row["tokens_per_second"]) for row in rows[STEPS // 2 :]
        ),
        "memory_gib": max(float(row["memory_gib"]) for row in rows),
    }
    print(
        f"{args.devices} x {args.strategy}: {figures['tokens_per_second']:,.0f} tokens/s, "
        f"{figures['memory_gib']:.2f} GiB"
    )
    if args.out:
        Path(args.out).write_text(json.dumps(figures), "utf-8")


if __name__ == "__main__":
    with user_errors():
        main(parse(ScalingArgs, sys.argv[1:]))
