"""What memory decides: the strategy, what is recomputed in the backward pass, the rows of a
micro-batch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from litft.args import FinetuneArgs
from litft.distributed.devices import DTYPES, device_memory, num_shards
from litft.model.kv_cache import KVCache
from litft.training.intervals import num_measured
from litft.training.memory.plan import (
    USABLE_FRACTION,
    Fit,
    Plan,
    fastest,
    format_bytes,
    predict,
)
from litft.training.memory.teacher import teacher_bytes, teacher_pass_bytes
from litft.training.memory.trace import Shape
from litft.training.memory_saving.activation_checkpointing import RECOMPUTED
from litft.training.objectives import GRPO, Distill
from litft.training.objectives.distill import ROWS
from litft.training.run_setup import RunSetup
from litft.training.schedule import Schedule

# the logits of two steps, scores and probabilities in fp32, and their sums in fp64
BYTES_PER_LOGIT = 28


@dataclass(frozen=True)
class MemorySettings:
    """How a run uses the devices, and the memory that it needs of each."""

    device: torch.device
    strategy: str  # single, ddp, fsdp or hsdp
    reason: str  # for the strategy
    shards: int  # processes that share the weights
    precision: str
    recomputed: str
    plan: Plan
    # factor of a step's time, for what is recomputed or waits on the host
    slowdown: float
    device_bytes: int  # a device's memory


@dataclass(frozen=True)
class PlannedRun:
    """A run before its processes start: what it is, its steps, and how it uses the devices."""

    setup: RunSetup
    schedule: Schedule
    settings: MemorySettings


def planned_shape(schedule: Schedule, strategy: str) -> Shape:
    """The largest micro-batch as the plan counts it: DDP's buckets hold all gradients from the
    first step on."""
    shape = schedule.shape()
    return shape._replace(accumulated=shape.accumulated or strategy == "ddp")


def plan_run(setup: RunSetup, schedule: Schedule, device: torch.device) -> PlannedRun:
    """Choose what the flags leave open, by the device's memory: also the rows of a micro-batch, by
    which the run's schedule is laid out.

    Raises ValueError for flags that the chosen strategy cannot do.
    """
    args, reason, memory = (
        setup.args,
        "as asked for",
        device_memory(device, setup.args.devices),
    )

    @cache
    def with_rows(rows: int) -> Schedule:
        """Return the schedule with micro-batches of so many rows."""
        if rows == schedule.layout.rows:
            return schedule
        return schedule.laid_out(replace(schedule.layout, rows=rows))

    # the fastest strategy that fits, or the last one
    for strategy in _strategies(args, schedule.layout.ranks):
        shard_count = num_shards(args, strategy)
        precision = setup.precision(device, shard_count)
        fit, smallest = _fastest(
            setup,
            schedule,
            with_rows,
            device=device,
            strategy=strategy,
            precision=precision,
            shard_count=shard_count,
            budget=int(USABLE_FRACTION * memory),
        )
        # the reason for either: the weights do or do not fit as a whole
        if args.strategy == "auto" and strategy == "ddp":
            needed = smallest.plan.memory.peak
            # a teacher that does not fit needs more than the student, which then does
            if fit:
                needed = pass_bytes(setup, precision, shard_count)
            reason = (
                f"since each needs {format_bytes(needed)} with all of the weights, and has "
                f"{format_bytes(memory)}"
            )
        if fit and pass_bytes(setup, precision, shard_count) <= memory:
            break

    # where nothing fits, it is the plan with the smallest peak, which `check_memory` refuses if it
    # needs more than all of the memory
    chosen = fit or smallest
    chosen_schedule = with_rows(chosen.rows)
    _check(args, chosen_schedule, strategy, reason)
    problem = setup.fp16_problem(sharded=strategy in ("fsdp", "hsdp"))
    if precision == "fp16" and problem:
        raise ValueError(
            f"--precision fp16: {problem}; use --precision fp32, or bf16 on newer GPUs"
        )
    settings = MemorySettings(
        device=device,
        strategy=strategy,
        reason=reason,
        shards=shard_count,
        precision=precision,
        recomputed=chosen.recomputed,
        plan=chosen.plan,
        slowdown=chosen.slowdown,
        device_bytes=memory,
    )
    return PlannedRun(setup, chosen_schedule, settings)


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


def _check(args: FinetuneArgs, schedule: Schedule, strategy: str, reason: str) -> None:
    """Raise ValueError for flags that do not go with the strategy, or with several micro-batches
    per step."""
    clashes = args.clashes(strategy)
    if clashes:
        message = "\n".join(clashes)
        if args.strategy == "auto":
            message += f" ({strategy}: {reason})"
        raise ValueError(message)
    check_one_micro_batch(args, schedule)


def check_one_micro_batch(args: FinetuneArgs, schedule: Schedule) -> None:
    """Raise ValueError if the optimizer steps within the backward pass, but a step has several
    micro-batches per rank: each of them would be a step of its own."""
    if not args.train.optimizer_in_backward:
        return
    step = schedule.first_accumulating_step()
    if step is not None:
        reason = (
            f"the {args.train.global_batch_size} examples of step {step + 1} are several "
            "micro-batches"
        )
        remedy = "lower --train.global_batch_size, or raise --train.micro_batch_size"
        raise ValueError(
            f"--train.optimizer_in_backward: {reason}, and each would be a step; {remedy}"
        )


def _strategies(args: FinetuneArgs, ranks: int) -> list[str]:
    """The strategies to choose from, the fastest first."""
    if args.strategy != "auto":
        return [args.strategy]
    if ranks == 1:
        return ["single"]
    if args.train.cpu_offload == "parameters":
        return ["fsdp"]
    return ["ddp", "fsdp"]


def _fastest(
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
