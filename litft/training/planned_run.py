"""A run before its processes start: what it is, its steps, and how it uses the devices.

Memory decides the settings that the flags leave open.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch

from litft.args import FinetuneArgs
from litft.distributed.devices import device_memory, num_shards
from litft.training.memory.choose import fastest_fit, pass_bytes
from litft.training.memory.plan import USABLE_FRACTION, Plan, format_bytes
from litft.training.run_setup import RunSetup
from litft.training.schedule import Schedule


@dataclass(frozen=True)
class DeviceSettings:
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
    # a run works on a copy: resuming moves it, and a retry after an out-of-memory error lays it out
    # again
    schedule: Schedule
    settings: DeviceSettings


def plan_run(setup: RunSetup, schedule: Schedule, device: torch.device) -> PlannedRun:
    """Choose what the flags leave open, by the device's memory: also the rows of a micro-batch, by
    which the run's schedule is laid out.

    Raises ValueError for flags that the chosen strategy cannot do.
    """
    args = setup.args
    reason = "as asked for"
    memory = device_memory(device, args.devices)

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
        fit, smallest = fastest_fit(
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
    settings = DeviceSettings(
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
