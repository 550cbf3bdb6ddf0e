"""Refuse a run that needs more memory than there is, with the flags that reduce it."""

import copy
from collections.abc import Iterator
from typing import Any

from litft.args import LoRAFinetuneArgs
from litft.methods import Method, method_of
from litft.training.memory.choose import pass_bytes, planned_shape
from litft.training.memory.plan import format_bytes, predict
from litft.training.memory_saving.activation_checkpointing import OF_BLOCKS
from litft.training.planned_run import PlannedRun
from litft.training.run_setup import RunSetup

# of the run's peak memory; flags that save less are not suggested
MIN_SAVING = 0.05
MAX_FLAGS = 4


def remedies(run: PlannedRun) -> list[str]:
    """Return flags that reduce the run's memory, each with what it saves, the largest saving
    first."""
    try:
        peak = _peak(run)
        saved = {}
        for flag, changed in _options(run):
            saved[flag] = peak - _peak(run, **changed)
    except (RuntimeError, MemoryError):  # too little memory is left to make plans
        return ["lower --data.max_seq_length", "lower --train.micro_batch_size"]
    helpful = [flag for flag in saved if saved[flag] > MIN_SAVING * peak]
    flags = sorted(helpful, key=lambda flag: -saved[flag])

    # more flags would hide those that help most
    lines = [
        f"{flag} saves about {format_bytes(saved[flag])}" for flag in flags[:MAX_FLAGS]
    ]
    train = run.setup.args.train
    if (
        run.settings.strategy == "single"
        and run.schedule.layout.rows > 1
        and not (train.oom_retry or train.optimizer_in_backward)
    ):
        lines.append("--train.oom_retry halves micro-batches automatically")
    return lines


def check_memory(run: PlannedRun) -> None:
    """Raise ValueError if the run needs more memory than there is: the system would end it without
    a word."""
    settings = run.settings
    memory = settings.plan.memory
    of_teacher = pass_bytes(run.setup, settings.precision, settings.shards)
    if of_teacher > settings.device_bytes and not run.setup.args.train.ignore_memory_plan:
        raise ValueError(
            f"--teacher {run.setup.args.teacher} needs {format_bytes(of_teacher)} to read the "
            f"examples, and there are {format_bytes(settings.device_bytes)}; name a smaller "
            "teacher, quantize it (--distill.quantize nf4), or shard it over several devices "
            "(--strategy fsdp)"
        )
    if memory.peak <= settings.device_bytes or run.setup.args.train.ignore_memory_plan:
        return
    needed = format_bytes(memory.peak)
    # names the part to save on first
    largest = max(memory.parts, key=lambda kind: memory.parts[kind])
    if settings.strategy != "single":
        where = "each device"
    else:
        where = "this machine"
    if settings.device.type == "cuda":
        where = "the GPU" if settings.strategy == "single" else "each GPU"
    reason = (
        f"the run needs {needed}, and {where} has {format_bytes(settings.device_bytes)}"
    )
    lines = [
        f"{reason}; most of it is for {largest} ({format_bytes(memory.parts[largest])})"
    ]
    lines += [f"  {remedy}" for remedy in remedies(run)]
    lines.append(
        "  a smaller model; litft plan --checkpoint_dir DIR --budget 24GB shows what fits"
    )
    lines.append("  --train.ignore_memory_plan true starts it nevertheless")
    raise ValueError("\n".join(lines))


def _peak(run: PlannedRun, **changed: Any) -> int:
    """Return the peak bytes of the run's plan with some arguments of `predict` changed."""
    setup = run.setup
    settings = run.settings
    train = setup.args.train
    current = {
        "method": setup.method,
        "precision": settings.precision,
        "quantize": setup.quantize,
        "shape": planned_shape(run.schedule, settings.strategy),
        "optimizer": train.optimizer,
        "recomputed": settings.recomputed,
        "device": settings.device.type,
        "in_backward": train.optimizer_in_backward,
        "cpu_offload": train.cpu_offload,
        "shards": settings.shards,
        "compiled": train.compile,
    }
    return predict(setup.source, **current | changed).memory.peak


def _options(run: PlannedRun) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield alternative settings, each as a flag or a script, and as changed arguments of
    `predict`."""
    setup = run.setup
    settings = run.settings
    shape = planned_shape(run.schedule, settings.strategy)
    args = setup.args
    is_full = setup.method.saves_full_model
    # excludes quantization
    offloads_frozen = (
        settings.strategy == "single" and args.train.cpu_offload == "parameters"
    )
    # two micro-batches would be two steps of an optimizer in the backward pass
    if shape.rows > 1 and not args.train.optimizer_in_backward:
        yield (
            f"--train.micro_batch_size {shape.rows // 2}",
            {"shape": shape._replace(rows=shape.rows // 2)},
        )
    if shape.tokens > 256:
        yield (
            f"--data.max_seq_length {shape.tokens // 2}",
            {"shape": shape._replace(tokens=shape.tokens // 2)},
        )
    kinds = list(OF_BLOCKS)
    # MLPs in pieces are refused beside these flags
    if args.train.compile or args.train.cpu_offload == "parameters":
        kinds.remove("tiled")
    for kind in kinds:
        if settings.recomputed not in (kind, "tiled"):
            yield f"--train.activation_checkpointing {kind}", {"recomputed": kind}
    # a resumed run must keep the settings below
    if args.resume:
        return
    # full fine-tuning changes every weight, so it cannot be quantized
    if not is_full and setup.quantize == "none" and not offloads_frozen:
        yield "--quantize nf4", {"quantize": "nf4"}
    # its blocks of 256 values cannot be sharded
    if args.train.optimizer == "adamw" and settings.shards == 1:
        yield "--train.optimizer adamw_8bit", {"optimizer": "adamw_8bit"}
    # schedule_free needs fp32 weights; muon, where they are sharded, whole matrices
    if (
        is_full
        and settings.precision != "bf16-true"
        and args.train.optimizer not in ("schedule_free", "muon")
    ):
        yield "--precision bf16-true", {"precision": "bf16-true"}
    if is_full:
        # LoRA's weights are frozen, so it has no bf16-true
        yield (
            "finetune/lora.py",
            {"method": _lora(setup), "precision": settings.precision.removesuffix("-true")},
        )
    if settings.strategy == "ddp" and not args.clashes("fsdp"):
        yield "--strategy fsdp", {"shards": run.schedule.layout.ranks}


def _lora(setup: RunSetup) -> Method:
    """Return LoRA with default settings for the same model."""
    method = copy.copy(method_of(LoRAFinetuneArgs()))
    method.select_targets(setup.source.outline, setup.source.adapter_rules)
    return method
