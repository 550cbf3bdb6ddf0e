"""The learning rate of each step."""

import math

from litft.args import TrainArgs


def learning_rate(train: TrainArgs, step: int, steps: int) -> float:
    """The learning rate of step `step` (from 0) of `steps`: a linear warm-up, then the schedule's
    decay."""
    rate = train.learning_rate
    assert rate is not None  # a run's flags have the default of its objective
    if train.warmup_steps is None:
        warmup = round(train.warmup_fraction * steps)
    else:
        warmup = train.warmup_steps
    # the first step of a warm-up has a rate above 0
    if step < warmup:
        return rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    # the constant rate of wsd falls only in the last `tail` steps
    tail = round(train.decay_fraction * steps)
    decay = {
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "linear": 1 - progress,
        "constant": 1.0,
        "wsd": 1
        - math.sqrt(max(0, step - steps + tail) / max(1, tail)),  # arXiv 2405.18392
    }[train.lr_schedule]
    return rate * (train.min_lr_ratio + (1 - train.min_lr_ratio) * decay)
