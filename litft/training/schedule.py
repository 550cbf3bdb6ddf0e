"""Which samples a step has, and how they are laid out: functions of the position in the data."""

import copy
import math
from dataclasses import replace

import numpy as np

from litft.args import FinetuneArgs, TrainArgs
from litft.data.dataset import DataSplits
from litft.data.packing import BatchLayout, num_slots
from litft.data.sampler import SampleOrder, largest_micro_batch
from litft.training.memory.activations import Shape
from litft.training.memory.flops import Flops
from litft.training.objectives import OBJECTIVES, Objective

LARGEST_STEP = 100  # times the training examples


class Schedule:
    """A run's steps. The position in the data is the number of samples seen.

    size: samples per step, --train.global_batch_size times the completions of a prompt.
    num_samples: how many the whole run sees.
    steps: how many it takes, from where it was resumed, see `resume_at`.
    layout: how a step's samples become micro-batches.
    largest: what that demands.

    It decides what the flags leave open: three epochs, and micro-batches of one packed row, or of
    four rows without packing, whose number `plan_run` may change.
    """

    def __init__(
        self,
        args: FinetuneArgs,
        data: DataSplits,
        ranks: int,
        group_size: int = 1,
        shares_prompts: bool = False,
    ) -> None:
        self.data = data
        self.needs_token_losses = OBJECTIVES[args.objective].needs_token_losses
        self.teacher_tokens = args.distill.top_k if args.objective == "distill" else 0
        # a student's own answer may be longer than that of the data
        self.own_tokens = args.distill.max_new_tokens if args.distill.on_policy else 0
        self.group_size = group_size
        self.size = args.train.global_batch_size * group_size
        self.val_fraction = args.data.val_fraction
        self.val_path = args.data.val_path
        self.answers_prompts = args.eval.max_new_tokens > 0
        self.max_steps = args.train.max_steps
        self.is_by_epochs = args.train.max_steps is None and args.train.max_time is None
        self.order = SampleOrder(data.train.sizes, args.seed, data.weights, group_size)
        if not self.is_by_epochs and self.size > LARGEST_STEP * self.order.size:
            raise ValueError(
                f"--train.global_batch_size {args.train.global_batch_size:,}: a step would have "
                f"each of the {self.order.epoch_size:,} training examples more than {LARGEST_STEP} "
                "times; lower it, or leave out --train.max_steps and --train.max_time"
            )
        self.num_samples = planned_samples(args.train, self.order.epoch_size) * group_size
        self.layout = replace(
            initial_layout(args, data, ranks), shares_prompts=shares_prompts
        )
        self.resume_at(0, 0)

    @property
    def epochs(self) -> float:
        """How often the run sees each example, on average."""
        return self.num_samples / self.order.size

    def resume_at(self, step: int, samples: int) -> None:
        """Start after `step` steps that have seen `samples` samples.

        If a finished run is extended, its last step may have had fewer samples: so the position is
        counted from `samples`, and not from `step`, and the run may have one step more than one
        from the beginning.
        """
        self.origin = step, samples
        num_left = math.ceil(max(0, self.num_samples - samples) / self.size)
        if self.max_steps is not None:
            num_left = max(0, min(num_left, self.max_steps - step))
        self.steps = step + num_left
        # a finished run has no step to lay out
        if num_left:
            self.set_layout(self.layout)

    def laid_out(self, layout: BatchLayout) -> "Schedule":
        """Return the schedule with its steps laid out as `layout` says."""
        other = copy.copy(self)
        other.set_layout(layout)
        return other

    def set_layout(self, layout: BatchLayout) -> None:
        """Lay the steps out as `layout` says, and find the largest micro-batch."""
        self.layout = layout
        position = self.origin[1]
        self.largest = largest_micro_batch(
            self.data.train, self.order, layout, self.num_samples, self.size, position
        )

    def shape(self) -> Shape:
        """The shape of the largest micro-batch, and whether gradients are accumulated over several
        in its step."""
        rows = self.largest.rows
        target_count = self.largest.max_targets
        tokens = num_slots(self.data.train.lengths, rows) // len(rows)
        # where completions share a prompt, there are more targets among as many tokens
        if self.layout.shares_prompts:
            target_count = None
        if self.own_tokens:
            tokens = max(tokens, min(self.data.limit, tokens + self.own_tokens))
            target_count = None
        return Shape(
            len(rows),
            tokens,
            accumulated=self.largest.accumulates,
            max_targets=target_count,
            max_documents=self.largest.max_documents,
            per_token=self.needs_token_losses,
            teacher_tokens=self.teacher_tokens,
        )

    def accumulates(self, step: int) -> bool:
        """Whether a step has several micro-batches per rank."""
        # ranks take micro-batches in turn, so more micro-batches than ranks are several for a rank
        return len(self.layout.plan(self.lengths(step).tolist())) > self.layout.ranks

    def first_accumulating_step(self) -> int | None:
        """The first step of the run that has several micro-batches per rank; None if no step
        has."""
        return next(filter(self.accumulates, range(self.origin[0], self.steps)), None)

    def longest(self) -> tuple[int, int]:
        """The number and the token count of the longest example in the largest micro-batch."""
        lengths = self.data.train.lengths
        numbers = []
        for row in self.largest.rows:
            numbers.extend(row)
        number = max(numbers, key=lambda number: lengths[number])
        return number, int(lengths[number])

    def step_indices(self, step: int) -> list[int]:
        """The numbers of a step's examples."""
        return self.order.indices(self.seen(step), self.seen(step + 1))

    def distinct_indices(self) -> list[int]:
        """The numbers of all examples that the run sees, each once, in ascending order."""
        return np.unique(self.order.indices(0, self.num_samples)).tolist()

    def seen(self, steps: int) -> int:
        """How many samples the first `steps` steps see: the position in the data after them."""
        start_step, samples = self.origin
        # steps before this process's first one had the full size, but for the last of a shorter run
        if steps < start_step:
            return min(steps * self.size, samples)
        return min(samples + (steps - start_step) * self.size, self.num_samples)

    def lengths(self, step: int) -> np.ndarray:
        """The number of tokens of each of a step's samples."""
        return self.data.train.lengths[self.step_indices(step)]

    def flops(self, flops: Flops, objective: Objective) -> float:
        """FLOPs of the whole run, from its first 200,000 samples, with the forward passes that its
        objective needs."""
        train = self.data.train
        numbers = self.order.indices(0, min(self.num_samples, 200_000))
        counts = train.document_lengths(numbers), train.supervised[numbers]
        # the reference model reads each distinct example once
        if objective.needs_reference:
            passes = len(set(numbers)) / len(numbers)
        else:
            passes = 0.0
        # each mismatch, in the reference and in its step
        if objective.needs_mismatches:
            passes += 2.0
        passes += objective.extra_forward_passes
        forward = flops.forward(*counts)
        flops_of_numbers = objective.updates * flops.for_lengths(*counts) + passes * forward
        return flops_of_numbers * self.num_samples / len(numbers)


def initial_layout(args: FinetuneArgs, data: DataSplits, ranks: int) -> BatchLayout:
    """The layout that the flags ask for; without packing where no two samples fit into a row."""
    rows = args.train.micro_batch_size
    two_shortest = np.sort(data.train.lengths)[:2]
    packs = args.data.packing and (
        len(two_shortest) < 2 or two_shortest.sum() <= data.limit
    )
    if rows in (None, "auto"):
        if args.data.packing:
            rows = 1
        else:
            rows = 4
    if packs:
        return BatchLayout(rows, data.limit, ranks)
    return BatchLayout(rows, None, ranks)


def planned_samples(train: TrainArgs, size: int) -> int:
    """How many samples the run will see, with `size` samples per epoch: the position in the data at
    which it ends."""
    limits = []
    if train.max_steps:
        limits.append(train.max_steps * train.global_batch_size)
    epochs = train.epochs
    # without any limit on steps, a run has three epochs
    if not epochs and not limits:
        epochs = 3.0
    if epochs:
        limits.append(max(1, round(epochs * size)))
    return min(limits)
