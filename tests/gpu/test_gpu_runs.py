"""Whole runs on a GPU: the demo with every method, resuming to the bit, out of memory, and no wait
within a step."""

import csv
import json

import pytest
import torch

import litft
from gpu.comparisons import PRETENDED, script
from litft.args import (
    DataArgs,
    EvalArgs,
    FullFinetuneArgs,
    LoRAFinetuneArgs,
    SaveArgs,
    TrainArgs,
)
from litft.training.trainer import Trainer

FLAGS = (
    "--accelerator cuda --train.max_steps 4 --eval.interval 2 --save.interval 2 "
    "--eval.max_new_tokens 8".split()
)
WAYS = {
    "lora": "",
    "lora eager": "--train.compile false",
    "lora nf4": "--quantize nf4",
    "lora unpacked": "--data.packing false --train.micro_batch_size 4",
    "lora recomputed": "--train.activation_checkpointing full",
    "lora fp32": "--precision fp32",
    "lora activations on the host": "--train.cpu_offload activations",
    "lora parameters on the host": "--train.cpu_offload parameters",
    "adapter": "",
    "adapter_v2": "",
    "full": "",
    "full bf16-true": "--precision bf16-true",
    "full in backward": "--train.optimizer_in_backward true "
    "--train.max_grad_norm 0 --train.micro_batch_size 16",
    "full paged": "--train.optimizer paged_adamw_8bit",
}
QUICK = ("lora", "lora nf4", "full bf16-true")


def losses(run):
    """Return the losses in a run's metrics.csv."""
    with (run / "metrics.csv").open() as file:
        return [row["loss"] for row in csv.DictReader(file) if row["loss"]]


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[pytest.mark.quick] if way in QUICK else []) for way in WAYS],
)
def test_a_run_from_the_command_line(way, tmp_path):
    """Training, validation, sample answers, a checkpoint and the result; then its chat answers."""
    if PRETENDED and way == "full paged":
        pytest.skip(
            "the pretended driver has no cudaMallocManaged, which paged optimizer states need"
        )
    method = way.split()[0]
    script(
        f"finetune/{method}.py",
        *FLAGS,
        *WAYS[way].split(),
        "--out_dir",
        "run",
        cwd=tmp_path,
    )
    assert len(losses(tmp_path / "run")) >= 1 and (tmp_path / "run" / "final").is_dir()
    flags = [
        "--checkpoint_dir",
        "run",
        "--accelerator",
        "cuda",
        "--prompt",
        "Hello",
        "--max_new_tokens",
        "8",
    ]
    script("generate/base.py", *flags, cwd=tmp_path)


@pytest.mark.numbers
def test_an_interrupted_run_equals_an_uninterrupted_one_to_the_bit(tmp_path):
    flags = [*FLAGS, "--deterministic", "true", "--train.log_interval", "1"]
    script("finetune/lora.py", *flags, "--out_dir", "whole", cwd=tmp_path)
    script(
        "finetune/lora.py",
        *flags,
        "--out_dir",
        "parts",
        "--train.max_time",
        "1s",
        cwd=tmp_path,
    )
    script("finetune/lora.py", *flags, "--out_dir", "parts", "--resume", cwd=tmp_path)
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    whole, parts = (
        tmp_path / name / "final" / "adapter_model.safetensors"
        for name in ("whole", "parts")
    )
    assert whole.read_bytes() == parts.read_bytes()


@pytest.mark.numbers
def test_out_of_memory_halves_the_micro_batch(tmp_path):
    """With a small part of the GPU's memory, the probe runs out of memory for real, and the losses
    stay the same."""
    records = [
        {"instruction": "Say it", "input": "", "output": "once upon a time " * 40}
        for _ in range(64)
    ]
    (tmp_path / "data.json").write_text(json.dumps(records))
    results = []
    for fraction in (1.0, 0.004):
        torch.cuda.empty_cache()
        # the second run must not report the peak of the first
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(fraction)
        train = TrainArgs(
            max_steps=2,
            global_batch_size=64,
            micro_batch_size=64,
            oom_retry=True,
            compile=False,
        )
        data = DataArgs(path=[str(tmp_path / "data.json")], packing=False)
        out = str(tmp_path / f"run{fraction}")
        args = LoRAFinetuneArgs(
            accelerator="cuda",
            train=train,
            data=data,
            out_dir=out,
            eval=EvalArgs(max_new_tokens=0),
        )
        try:
            results.append(litft.finetune(args).metrics)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-3)
    assert results[1]["memory_gib"] < results[0]["memory_gib"]


@pytest.mark.quick
@pytest.mark.parametrize("args", [LoRAFinetuneArgs, FullFinetuneArgs])
@pytest.mark.parametrize("compiled", [False, True])
def test_no_step_waits_for_the_gpu(args, compiled, tmp_path, monkeypatch):
    """CUDA's own debug mode raises an error where the host would wait."""
    step, count = Trainer._train_step, 0

    def checked_step(self, *arguments):
        nonlocal count
        count += 1
        # the first step compiles
        torch.cuda.set_sync_debug_mode("error" if count > 1 else "default")
        try:
            step(self, *arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Trainer, "_train_step", checked_step)
    train = TrainArgs(max_steps=4, compile=compiled)
    saving = dict(save=SaveArgs(interval=0), eval=EvalArgs(interval=0, max_new_tokens=0))
    try:
        litft.finetune(
            args(accelerator="cuda", train=train, out_dir=str(tmp_path / "run"), **saving)
        )
    except ValueError as error:
        # numbers of the pretended GPU are those that the memory held
        if not PRETENDED or "NaN" not in str(error):
            raise
    assert count == 4
    assert PRETENDED or torch.cuda.max_memory_allocated() > 0
