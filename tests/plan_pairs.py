"""How near the plan is to what steps take, over random pairs of flags and data: python tests/plan_pairs.py --count 200

Each pair is a model of shared/configs (its first layers) with its tokenizer, a file of shared/data and random flags. The
plan is what a run would say as it begins; the steps are counted by torch's MemTracker under fake tensors.
"""

import argparse
import gzip
import json
import random
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from shutil import copyfile

import torch
from tracked import tracked

from litft.args import (
    AdapterArgs,
    AdapterFinetuneArgs,
    AdapterV2Args,
    AdapterV2FinetuneArgs,
    DataArgs,
    FinetuneArgs,
    FullFinetuneArgs,
    LoRAArgs,
    LoRAFinetuneArgs,
    TrainArgs,
)
from litft.data.dataset import load_data
from litft.pretrained import resolve
from litft.training.schedule import Schedule
from litft.training.settings import choose
from litft.training.setup import Setup

SHARED = Path(__file__).parent.parent.parent / "shared"
MODELS = {  # of shared/configs, and a tokenizer that fits
    "gemma-2-2b": "gemma-2",
    "llama-3-8b": "llama-3.1",
    "llama-3.2-1b": "llama-3.1",
    "phi-2": "phi-2",
    "pythia-6.9b": "gpt-neox-20b",
    "qwen2-7b": "qwen2.5",
    "qwen3-0.6b": "qwen2.5",
    "qwen3-30b-a3b": "qwen2.5",
    "tinyllama-1.1b": "tinyllama-1.1b-chat",
}
FILES = [
    "alpaca_2k.json",
    "gsm8k_500.jsonl",
    "messages_500.jsonl",
    "samsum_1400.jsonl",
    "sharegpt_500.json",
    "wikitext2_valid.txt",
]
OPTIMIZERS = ["adamw", "adamw", "adamw", "sgd", "adafactor", "muon", "schedule_free"]


def drawn(draw: random.Random) -> tuple[str, int, str, FinetuneArgs]:
    """A model, how many of its layers, its tokenizer and the flags of a run."""
    model = draw.choice(sorted(MODELS))
    layers = draw.choice([1, 2, 3]) if model != "qwen3-30b-a3b" else 1
    kind = draw.choice([LoRAFinetuneArgs, LoRAFinetuneArgs, FullFinetuneArgs, AdapterFinetuneArgs, AdapterV2FinetuneArgs])
    size = draw.choice([1, 2, 4, 8, 16, 32])
    in_backward = kind is FullFinetuneArgs and draw.random() < 0.3
    train = TrainArgs(
        max_steps=draw.choice([1, 3, 10]),
        global_batch_size=size,
        micro_batch_size=size if in_backward else draw.choice([None, 1, 2, 4, 8]),
        activation_checkpointing=draw.choice(["none", "none", "selective", "full"]),
        optimizer=draw.choice(OPTIMIZERS),
        optimizer_in_backward=in_backward,
        max_grad_norm=0.0 if in_backward else 1.0,
        label_smoothing=draw.choice([0.0, 0.0, 0.1]),
        neftune_alpha=draw.choice([0.0, 0.0, 5.0]),
    )
    data = DataArgs(
        path=[str(SHARED / "data" / draw.choice(FILES))],
        max_seq_length=draw.choice([64, 128, 256, 512, 1024, 2048]),
        packing=draw.random() < 0.5,
        mask_prompt=draw.random() < 0.7,
    )
    args = dict(data=data, train=train, seed=draw.randrange(100), precision=draw.choice(["bf16", "fp32"]))
    if kind is FullFinetuneArgs:
        args["precision"] = draw.choice(["bf16", "fp32", "bf16-true"])
    if kind is LoRAFinetuneArgs:
        targets = draw.choice([["all-linear"], ["all-linear"], ["q_proj", "v_proj"], ["embed", "q_proj"], ["lm_head"]])
        args["lora"] = LoRAArgs(
            r=draw.choice([1, 8, 64, 256]),
            dropout=draw.choice([0.0, 0.0, 0.1]),
            targets=targets,
            dora=draw.random() < 0.3 and "embed" not in targets,
            modules_to_save=draw.choice([[], [], ["norm"]]),
        )
    if kind is AdapterV2FinetuneArgs:
        args["adapter"] = AdapterV2Args(prompt_length=draw.choice([0, 10]), start_layer=0)
    if kind is AdapterFinetuneArgs:
        args["adapter"] = AdapterArgs(prompt_length=draw.choice([1, 10, 100]), start_layer=0)
    return model, layers, MODELS[model], kind(**args)


def compared(model: str, layers: int, tokenizer: str, args: FinetuneArgs, work: Path) -> tuple[int, int, str]:
    """The plan's peak, that of the steps, and what they are steps of; ValueError where these flags cannot be."""
    folder = work / model
    folder.mkdir(exist_ok=True)
    config = json.loads((SHARED / "configs" / model / "config.json").read_text("utf-8"))
    config.pop("quantization_config", None)  # packed weights do not run on fake tensors
    (folder / "config.json").write_text(json.dumps(config))
    for path in (SHARED / "tokenizers" / tokenizer).iterdir():
        if path.suffix == ".gz":
            (folder / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
        elif "token" in path.name or path.name in ("vocab.json", "merges.txt"):
            copyfile(path, folder / path.name)
    args = replace(args, checkpoint_dir=str(folder), accelerator="cpu")
    source = resolve(folder)
    source = replace(source, config=replace(source.config, layers=source.config.layers[:layers]))
    job, cpu = Setup(args, source), torch.device("cpu")
    data = load_data(args.data, job.tokenizer, source.config.vocab_size, source.config.max_positions)
    schedule = Schedule(args, data, 1)
    settings = choose(job, schedule, cpu)
    shape = schedule.shape()
    learned = schedule.largest.max_targets
    expected = tracked(source, job.method, args.train, settings.precision, shape, settings.recomputed, supervised=learned)
    changes = getattr(args, job.method.name.split("_")[0], None) if not job.method.saves_full_model else None
    usual = vars(type(changes)()) if changes else {}
    details = {name: value for name, value in vars(changes or args.train).items() if usual.get(name, value) != value}
    what = [
        f"{model} {layers} layers",
        f"{job.method.title} {details}",
        settings.precision,
        f"{shape}{' accumulated' * shape.accumulated}",
    ]
    what += [f"{learned:,} learned", settings.recomputed, args.train.optimizer]
    return settings.plan.memory.peak, expected, ", ".join(what) + ", in the backward" * args.train.optimizer_in_backward


def main() -> int:
    """Print each pair that is off by more than is allowed, and how far they are off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first pair")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    off = []
    with tempfile.TemporaryDirectory() as work:
        for number in range(given.first, given.first + given.count):
            pair = drawn(random.Random(given.seed * 1_000_003 + number))
            try:
                planned, expected, what = compared(*pair, Path(work))
            except ValueError as error:
                print(f"{number}: not run: {str(error)[:200]}", flush=True)
                continue
            off.append(planned / expected - 1)
            mark = "" if -0.01 <= off[-1] <= 0.05 else "  <-- OFF"
            mib = 2**20
            print(f"{number}: {planned / mib:,.0f} of {expected / mib:,.0f} MiB, {off[-1]:+.2%}: {what}{mark}", flush=True)
    bad = sum(not -0.01 <= each <= 0.05 for each in off)
    extent = f"{min(off):+.2%} to {max(off):+.2%}"
    print(f"{len(off)} of {given.count} pairs ran; off by {extent}; {bad} outside -1 % to +5 %")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
