"""Which samples a step has, and how they are laid out: pure functions of the position in the data."""

import numpy as np

from litft.args import FinetuneArgs, TrainArgs
from litft.data.dataset import DataSplits
from litft.data.packing import Layout, num_slots
from litft.data.sampler import Sampler, largest_micro_batch
from litft.training.flops import Flops
from litft.training.memory_trace import Shape


class Schedule:
    """A run's steps. Position in the data: samples seen."""

    def __init__(self, args: FinetuneArgs, data: DataSplits, ranks: int) -> None:
        self.data, self.size = data, args.train.global_batch_size
        self.order = Sampler(data.train.sizes, args.seed, data.weights)
        self.samples = planned_samples(args.train, self.order.size)
        self.layout = layout_of(args, data, ranks)
        self.go_on(0, 0)

    def go_on(self, step: int, samples: int) -> None:
        """Begin after so many steps: the last of a run that is made longer may have been a small one."""
        self.origin = step, samples  # a step, and the samples seen before it
        self.steps = step + max(0, -(-(self.samples - samples) // self.size))
        if samples < self.samples:
            self.lay_out(self.layout)

    def lay_out(self, layout: Layout) -> None:
        """Have the steps run as `layout` says."""
        self.layout = layout
        self.largest = largest_micro_batch(self.data.train, self.order, layout, self.samples, self.size, self.origin[1])

    def shape(self) -> Shape:
        """The largest micro-batch, and whether it is one of several of its step."""
        rows, learned, several = self.largest
        return Shape(len(rows), num_slots(self.data.train.lengths, rows) // len(rows), several, learned)

    def accumulates(self, step: int) -> bool:
        """Whether a step has several micro-batches a rank."""
        return len(self.layout.plan(self.lengths(step).tolist())) > self.layout.ranks

    def first_of_several(self) -> int | None:
        """The first step of the run that has several micro-batches a rank; None: there is none."""
        return next(filter(self.accumulates, range(self.origin[0], self.steps)), None)

    def longest(self) -> tuple[int, int]:
        """The longest example of the largest micro-batch, and its tokens."""
        number = max((number for row in self.largest.rows for number in row), key=lambda n: self.data.train.lengths[n])
        return number, int(self.data.train.lengths[number])

    def step_indices(self, step: int) -> list[int]:
        """The numbers of a step's examples."""
        return self.order.indices(self.seen(step), self.seen(step + 1))

    def seen(self, steps: int) -> int:
        """How many samples that many steps have seen, the position in the data."""
        begun, samples = self.origin
        if steps < begun:
            return min(steps * self.size, samples)
        return min(samples + (steps - begun) * self.size, self.samples)

    def lengths(self, step: int) -> np.ndarray:
        """Tokens of each of a step's samples."""
        return self.data.train.lengths[self.step_indices(step)]

    def flops(self, flops: Flops) -> float:
        """FLOPs of the whole run."""
        train = self.data.train
        numbers = self.order.indices(0, min(self.samples, 200_000))
        return flops.of(train.lengths[numbers], train.supervised[numbers]) * self.samples / len(numbers)


def layout_of(args: FinetuneArgs, data: DataSplits, ranks: int) -> Layout:
    """How the flags lay out the samples; where no two of them share a row, each row is one."""
    rows, shortest = args.train.micro_batch_size, np.sort(data.train.lengths)[:2]
    packs = args.data.packing and (len(shortest) < 2 or shortest.sum() <= data.limit)
    rows = (1 if args.data.packing else 4) if rows in (None, "auto") else rows
    return Layout(rows, data.limit if packs else None, ranks)


def planned_samples(train: TrainArgs, size: int) -> int:
    """How many samples the run will see, the position in the data at which it ends."""
    by_steps = train.max_steps * train.global_batch_size if train.max_steps else None
    epochs = train.epochs or (None if by_steps else 3.0)
    by_epochs = max(1, round(epochs * size)) if epochs else None
    return min(n for n in (by_steps, by_epochs) if n)
