"""What memory decides of a strategy: what is recomputed in the backward pass, and the rows of a
micro-batch."""

from collections.abc import Callable
from dataclasses import replace

import torch

from litft.distributed.devices import DTYPES
from litft.model.kv_cache import KVCache
from litft.training.intervals import num_measured
from litft.training.memory.activations import Shape
from litft.training.memory.plan import (
    Fit,
    Plan,
    fastest,
    predict,
)
from litft.training.memory.teacher import teacher_bytes, teacher_pass_bytes
from litft.training.memory_saving.activation_checkpointing import RECOMPUTED
from litft.training.objectives import GRPO, Distill
from litft.training.objectives.distill import ROWS
from litft.training.run_setup import RunSetup
from litft.training.schedule import Schedule

# the logits of two steps, scores and probabilities in fp32, and their sums in fp64
BYTES_PER_LOGIT = 28


def planned_shape(schedule: Schedule, strategy: str) -> Shape:
    """The largest micro-batch as the plan counts it: DDP's buckets hold all gradients from the
    first step on."""
    shape = schedule.shape()
    return shape._replace(accumulated=shape.accumulated or strategy == "ddp")


def rollout_bytes(setup: RunSetup, schedule: Schedule, dtype: torch.dtype) -> int:
    """Return the bytes of a device's rollouts: the KV cache of the completions that it generates at
    once, and what their logits take to be drawn from; 0 for objectives without rollouts."""
    objective = setup.objective
    config = setup.source.config
    longest = int(schedule.data.train.lengths.max()) + 1
    validated = 0
    if isinstance(objective, GRPO):
        rows_at_once = objective.grpo.rollout_rows
        # validation answers its prompts at once, too
        if len(schedule.data.val):
            longest = max(longest, int(schedule.data.val.lengths.max()) + 1)
            validated = num_measured(setup.args, schedule.data)
    elif isinstance(objective, Distill) and objective.distill.on_policy:
        rows_at_once = ROWS
        longest = min(schedule.data.limit, longest + objective.distill.max_new_tokens)
    else:
        return 0
    # a group is not divided between devices
    most_prompts = max(setup.args.train.global_batch_size, validated)
    groups = -(-most_prompts // schedule.layout.ranks)
    rows = min(rows_at_once, groups * schedule.group_size)
    cache = longest * KVCache.token_bytes(config, dtype) + KVCache.state_bytes(config)
    return rows * (cache + config.vocab_size * BYTES_PER_LOGIT)


def pass_bytes(setup: RunSetup, precision: str, shards: int) -> int:
    """Return the bytes of a device that a teacher's pass over the data needs; 0 without one."""
    if setup.teacher is None:
        return 0
    quantize = setup.args.distill.quantize
    computed_in = precision.removesuffix("-true")
    return teacher_pass_bytes(setup.teacher, computed_in, quantize, shards)


def resident_teacher_bytes(setup: RunSetup, precision: str, shards: int) -> int:
    """Return the bytes of a teacher's weights that are beside the student's; 0 without one, or if
    it reads the examples before."""
    if setup.teacher is None or not setup.args.distill.on_policy:
        return 0
    return teacher_bytes(setup.teacher, precision, setup.args.distill.quantize, shards)


def _reference_bytes(setup: RunSetup, precision: str, trained: int) -> int:
    """Return the bytes of the reference of rewards, a copy of the trained parameters; 0 without
    one."""
    if setup.args.objective != "grpo" or not setup.args.grpo.beta:
        return 0
    if setup.method.saves_full_model:
        return trained * DTYPES[setup.method.storage(precision)].itemsize
    return 4 * trained


def _beside_the_step(
    setup: RunSetup, schedule: Schedule, precision: str, shards: int
) -> dict[str, int]:
    """Return the bytes of what a run has beside its steps: fields of `Memory`."""
    computed_in = precision.removesuffix("-true")
    return {
        "rollouts": rollout_bytes(setup, schedule, DTYPES[computed_in]),
        "teacher": resident_teacher_bytes(setup, computed_in, shards),
    }


def fastest_fit(
    setup: RunSetup,
    schedule: Schedule,
    with_rows: Callable[[int], Schedule],
    *,
    device: torch.device,
    strategy: str,
    precision: str,
    shard_count: int,
    budget: int,
) -> tuple[Fit | None, Fit]:
    """Of the settings that the flags leave open, the fastest that fit into `budget` bytes, and the
    smallest.

    with_rows: returns the schedule with micro-batches of so many rows.
    """
    train = setup.args.train
    first = schedule.layout
    rows = [first.rows]
    kinds = [train.activation_checkpointing]
    if train.micro_batch_size == "auto":
        max_rows = 0
        for step in range(min(schedule.steps, 16)):
            batches = first.plan(schedule.lengths(step).tolist())
            max_rows = max(max_rows, sum(map(len, batches)))
        # up to the first count that holds all rows of a step
        rows = [count for count in (1, 2, 4, 8, 16, 32, 64) if count < 2 * max_rows]
    if train.activation_checkpointing == "auto":
        kinds = list(RECOMPUTED)
        # both replace what autograd saves
        if train.cpu_offload == "activations":
            kinds.remove("elementwise")
        # blocks with MLPs in pieces are not compiled
        if train.compile:
            kinds.remove("tiled")

    # the same for all settings
    beside = _beside_the_step(setup, schedule, precision, shard_count)

    def planned(count: int, kind: str, quantize: str, offload: str) -> Plan:
        shape = planned_shape(with_rows(count), strategy)
        in_backward = train.optimizer_in_backward
        fixed = (
            train.optimizer,
            kind,
            device.type,
            in_backward,
            offload,
            shard_count,
            train.compile,
        )
        plan = predict(setup.source, setup.method, precision, quantize, shape, *fixed)
        copied = _reference_bytes(setup, precision, plan.trained) // shard_count
        return replace(plan, memory=replace(plan.memory, reference=copied, **beside))

    return fastest(planned, rows, kinds, [(setup.quantize, train.cpu_offload)], budget)
