"""What would take memory off a run that does not fit, by its plan."""

import copy
from collections.abc import Iterator
from typing import Any

from litft.args import LoRAFinetuneArgs
from litft.methods import Method, method_of
from litft.training.memory_plan import in_words, predict
from litft.training.schedule import Schedule
from litft.training.settings import Settings, planned_shape
from litft.training.setup import Setup

WORTH = 0.05  # of the memory that the run needs: what saves less is not named
NAMED = 4


def remedies(setup: Setup, schedule: Schedule, settings: Settings) -> list[str]:
    """Flags that make the run smaller, those that save the most first, each with what it saves."""
    try:
        now = _peak(setup, schedule, settings)
        saved = {
            flag: now - _peak(setup, schedule, settings, **changed) for flag, changed in _options(setup, schedule, settings)
        }
    except (RuntimeError, MemoryError):  # there may be no room left to look for them
        return ["lower --data.max_seq_length", "lower --train.micro_batch_size"]
    worth = sorted((flag for flag in saved if saved[flag] > WORTH * now), key=lambda flag: -saved[flag])
    found = [f"{flag} saves about {in_words(saved[flag])}" for flag in worth[:NAMED]]
    train = setup.args.train
    retry = (
        settings.strategy == "single" and schedule.layout.rows > 1 and not (train.oom_retry or train.optimizer_in_backward)
    )
    return found + (["--train.oom_retry halves micro-batches by itself"] if retry else [])


def _peak(setup: Setup, schedule: Schedule, settings: Settings, **changed: Any) -> int:
    """Bytes that the plan needs, with some of its values changed."""
    train = setup.args.train
    usual = {
        "method": setup.method,
        "precision": settings.precision,
        "quantize": setup.quantize,
        "shape": planned_shape(schedule, settings.strategy),
        "optimizer": train.optimizer,
        "recomputed": settings.recomputed,
        "device": settings.device.type,
        "in_backward": train.optimizer_in_backward,
        "cpu_offload": train.cpu_offload,
        "shards": settings.width,
    }
    return predict(setup.source, **usual | changed).memory.peak


def _options(setup: Setup, schedule: Schedule, settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    """What could be another way, as a flag and as the plan's values."""
    shape, args, whole = planned_shape(schedule, settings.strategy), setup.args, setup.method.saves_full_model
    alone = settings.strategy == "single" and args.train.cpu_offload == "parameters"  # whose weights may not be packed
    if shape.rows > 1 and not args.train.optimizer_in_backward:
        yield f"--train.micro_batch_size {shape.rows // 2}", {"shape": shape._replace(rows=shape.rows // 2)}
    if shape.tokens > 256:
        yield f"--data.max_seq_length {shape.tokens // 2}", {"shape": shape._replace(tokens=shape.tokens // 2)}
    if settings.recomputed != "full":
        yield "--train.activation_checkpointing full", {"recomputed": "full"}
    if args.resume:  # what follows would make it another run
        return
    if not whole and setup.quantize == "none" and not alone:
        yield "--quantize nf4", {"quantize": "nf4"}
    if args.train.optimizer == "adamw" and settings.width == 1:
        yield "--train.optimizer adamw_8bit", {"optimizer": "adamw_8bit"}
    if whole and settings.precision != "bf16-true" and args.train.optimizer not in ("schedule_free", "muon"):
        yield "--precision bf16-true", {"precision": "bf16-true"}
    if whole:
        yield "finetune/lora.py", {"method": _lora(setup), "precision": settings.precision.removesuffix("-true")}
    if settings.strategy == "ddp" and not args.clashes("fsdp"):
        yield "--strategy fsdp", {"shards": schedule.layout.ranks}


def _lora(setup: Setup) -> Method:
    """LoRA as its defaults have it, of the same model."""
    method = copy.copy(method_of(LoRAFinetuneArgs()))
    method.choose(setup.source.meta_model(), setup.source.adapter_rules)
    return method
