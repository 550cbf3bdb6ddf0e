"""What a run's teacher takes, as text."""

from collections.abc import Iterator

import numpy as np

from litft.training.memory.choose import PlannedRun
from litft.training.memory.flops import Flops
from litft.training.memory.plan import format_bytes
from litft.training.memory.teacher import teacher_pass_bytes

# of a target: for each token of the teacher an int32 and an fp16, and one fp16 for all others
BYTES_OF_TOKEN = 6


def pass_bytes(run: PlannedRun) -> int:
    """Return the bytes of a device that the teacher's pass over the data needs; 0 without one."""
    setup = run.setup
    if setup.teacher is None:
        return 0
    precision = run.settings.precision.removesuffix("-true")
    return teacher_pass_bytes(setup.teacher, precision, setup.args.distill.quantize)


def teacher_flops(run: PlannedRun) -> float:
    """Return the FLOPs of the teacher's pass over the training examples, once each."""
    setup = run.setup
    if setup.teacher is None:
        return 0.0
    schedule = run.schedule
    train = schedule.data.train
    numbers = np.unique(schedule.order.indices(0, schedule.samples)).tolist()
    flops = Flops(setup.teacher.meta_model())
    return flops.forward(train.document_lengths(numbers), train.supervised[numbers])


def teacher_lines(run: PlannedRun) -> Iterator[str]:
    """Yield what the teacher is, and what its pass over the data takes."""
    setup = run.setup
    if setup.teacher is None:
        return
    schedule = run.schedule
    numbers = np.unique(schedule.order.indices(0, schedule.samples)).tolist()
    targets = int(schedule.data.train.supervised[numbers].sum())
    size = targets * setup.args.distill.top_k * BYTES_OF_TOKEN
    parameters = sum(parameter.numel() for parameter in setup.teacher.outline.parameters())
    if setup.args.distill.on_policy:
        when = "it stays in memory beside the student"
    else:
        when = "it is not in memory while the student learns"
    yield (
        f"teacher: {setup.teacher.folder}, {parameters:,} parameters; it reads {len(numbers):,} "
        f"training examples first, with {format_bytes(pass_bytes(run))} of memory and "
        f"{format_bytes(size)} on disk ({setup.args.distill.top_k} tokens for each of {targets:,} "
        f"targets); {when}"
    )
