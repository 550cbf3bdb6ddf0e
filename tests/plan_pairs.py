"""Compare memory plans with training steps for random flags and data: python tests/plan_pairs.py
--count 200

Each pair is the first layers of a model of shared/configs with its tokenizer, a file of shared/data
and random flags. `--networks` takes networks of other kinds instead, with the sizes of small
published models. The plan is the one a run prints at its start; the steps are measured by torch's
MemTracker on fake tensors.
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
import transformers
from tracked_memory import tracked_peak

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
from litft.pretrained.folder import resolve
from litft.training.planned_run import plan_run
from litft.training.run_setup import resolve_setup
from litft.training.schedule import Schedule

SHARED = Path(__file__).parent.parent.parent / "shared"
MODELS = {  # a model of shared/configs: its tokenizer
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
# networks of other kinds: transformers' class, the sizes, and how many layers have all kinds
QWEN = dict(
    vocab_size=151936,
    hidden_size=1024,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=128,
)
NETWORKS = {
    "latent attention": (
        "DeepseekV3Config",
        dict(QWEN, moe_intermediate_size=512, n_routed_experts=16, n_group=4),
        4,
    ),
    "gated delta net": (
        "Qwen3_5TextConfig",
        dict(QWEN, intermediate_size=3584, num_hidden_layers=8),
        4,
    ),
    "kimi delta attention": (
        "KimiLinearConfig",
        dict(
            QWEN,
            moe_intermediate_size=512,
            num_experts=16,
            kv_lora_rank=256,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
        ),
        4,
    ),
    "mamba-2": (
        "FalconH1Config",
        dict(
            QWEN,
            intermediate_size=2048,
            mamba_d_ssm=1536,
            mamba_n_heads=24,
            mamba_d_head=64,
            mamba_d_state=128,
        ),
        2,
    ),
    "short convolution": ("Lfm2Config", dict(QWEN, intermediate_size=4608), 4),
    "streams": (
        "Gemma3nTextConfig",
        dict(QWEN, intermediate_size=4096, num_hidden_layers=6, num_kv_shared_layers=1),
        6,
    ),
    "chunks, weighted inputs": (
        "Llama4TextConfig",
        dict(
            QWEN,
            intermediate_size=1024,
            intermediate_size_mlp=2048,
            num_local_experts=8,
            attention_chunk_size=256,
        ),
        4,
    ),
    "per-layer embeddings": ("Gemma4TextConfig", dict(QWEN, intermediate_size=4096), 6),
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


def random_pair(
    rng: random.Random, networks: bool = False
) -> tuple[str, int, str, FinetuneArgs]:
    """Return a model, its number of layers, its tokenizer and the flags of a run."""
    model = rng.choice(sorted(NETWORKS if networks else MODELS))
    layers = rng.choice([1, 2, 3]) if model != "qwen3-30b-a3b" else 1
    layers = NETWORKS[model][2] if networks else layers
    kind = rng.choice(
        [
            LoRAFinetuneArgs,
            LoRAFinetuneArgs,
            FullFinetuneArgs,
            AdapterFinetuneArgs,
            AdapterV2FinetuneArgs,
        ]
    )
    size = rng.choice([1, 2, 4, 8, 16, 32])
    in_backward = kind is FullFinetuneArgs and rng.random() < 0.3
    train = TrainArgs(
        max_steps=rng.choice([1, 3, 10]),
        global_batch_size=size,
        micro_batch_size=size if in_backward else rng.choice([None, 1, 2, 4, 8]),
        activation_checkpointing=rng.choice(["none", "none", "selective", "full"]),
        optimizer=rng.choice(OPTIMIZERS),
        optimizer_in_backward=in_backward,
        max_grad_norm=0.0 if in_backward else 1.0,
        label_smoothing=rng.choice([0.0, 0.0, 0.1]),
        neftune_alpha=rng.choice([0.0, 0.0, 5.0]),
    )
    data = DataArgs(
        path=[str(SHARED / "data" / rng.choice(FILES))],
        max_seq_length=rng.choice([64, 128, 256, 512, 1024, 2048]),
        packing=rng.random() < 0.5,
        mask_prompt=rng.random() < 0.7,
    )
    args = dict(
        data=data,
        train=train,
        seed=rng.randrange(100),
        precision=rng.choice(["bf16", "fp32"]),
    )
    if kind is FullFinetuneArgs:
        args["precision"] = rng.choice(["bf16", "fp32", "bf16-true"])
    if kind is LoRAFinetuneArgs:
        targets = rng.choice(
            [
                ["all-linear"],
                ["all-linear"],
                ["q_proj", "v_proj"],
                ["embed", "q_proj"],
                ["lm_head"],
            ]
        )
        args["lora"] = LoRAArgs(
            r=rng.choice([1, 8, 64, 256]),
            dropout=rng.choice([0.0, 0.0, 0.1]),
            targets=targets,
            dora=rng.random() < 0.3 and "embed" not in targets,
            modules_to_save=rng.choice([[], [], ["norm"]]),
        )
    if kind is AdapterV2FinetuneArgs:
        args["adapter"] = AdapterV2Args(prompt_length=rng.choice([0, 10]), start_layer=0)
    if kind is AdapterFinetuneArgs:
        args["adapter"] = AdapterArgs(prompt_length=rng.choice([1, 10, 100]), start_layer=0)
    return model, layers, MODELS.get(model, "qwen2.5"), kind(**args)


def compare(
    model: str, layers: int, tokenizer: str, args: FinetuneArgs, work: Path
) -> tuple[int, int, str]:
    """Return the planned peak, the measured peak and a description; raise ValueError if the flags
    are invalid."""
    folder = work / model
    folder.mkdir(exist_ok=True)
    if model in NETWORKS:
        config_class, sizes, _ = NETWORKS[model]
        getattr(transformers, config_class)(**sizes).save_pretrained(folder)
    else:
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
    source = replace(
        source, config=replace(source.config, layers=source.config.layers[:layers])
    )
    setup = resolve_setup(args, source)
    data = load_data(
        args.data, setup.tokenizer, source.config.vocab_size, source.config.max_positions
    )
    run = plan_run(setup, Schedule(args, data, 1), torch.device("cpu"))
    schedule = run.schedule
    settings = run.settings
    shape = schedule.shape()
    supervised = schedule.largest.max_targets
    expected = tracked_peak(
        source,
        setup.method,
        args.train,
        settings.precision,
        shape,
        settings.recomputed,
        supervised=supervised,
    )
    method_args = (
        getattr(args, setup.method.name.split("_")[0], None)
        if not setup.method.saves_full_model
        else None
    )
    defaults = vars(type(method_args)()) if method_args else {}
    changed = {
        name: value
        for name, value in vars(method_args or args.train).items()
        if defaults.get(name, value) != value
    }
    description = [
        f"{model} {layers} layers",
        f"{setup.method.title} {changed}",
        settings.precision,
        f"{shape}{' accumulated' * shape.accumulated}",
    ]
    description += [f"{supervised:,} learned", settings.recomputed, args.train.optimizer]
    return (
        settings.plan.memory.peak,
        expected,
        ", ".join(description) + ", in the backward" * args.train.optimizer_in_backward,
    )


def main() -> int:
    """Print each pair and its deviation; return whether any is outside the bounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first pair")
    parser.add_argument(
        "--networks",
        action="store_true",
        help="networks of other kinds than those of shared/configs",
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    deviations = []
    with tempfile.TemporaryDirectory() as work:
        for number in range(args.first, args.first + args.count):
            pair = random_pair(random.Random(args.seed * 1_000_003 + number), args.networks)
            try:
                planned, expected, description = compare(*pair, Path(work))
            except ValueError as error:
                print(f"{number}: not run: {str(error)[:200]}", flush=True)
                continue
            deviations.append(planned / expected - 1)
            mark = "" if -0.01 <= deviations[-1] <= 0.05 else "  <-- OFF"
            mib = 2**20
            print(
                f"{number}: {planned / mib:,.0f} of {expected / mib:,.0f} MiB, "
                f"{deviations[-1]:+.2%}: {description}{mark}",
                flush=True,
            )
    bad = sum(not -0.01 <= deviation <= 0.05 for deviation in deviations)
    extent = f"{min(deviations):+.2%} to {max(deviations):+.2%}"
    print(
        f"{len(deviations)} of {args.count} pairs ran; off by {extent}; {bad} outside -1 % to +5 %"
    )
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
