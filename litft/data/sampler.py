"""The order of the samples, and the largest micro-batch of a run.

A step is the next `global_batch_size` samples of a permutation of (seed, epoch). The position in
the data is one integer: the number of samples seen. Rows, micro-batches and ranks only lay the step
out, so losses and gradients depend on none of them.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from litft.data.packing import BatchLayout, num_slots
from litft.data.token_store import Samples

# samples of a run that `largest_micro_batch` ranks by an estimate, and that it lays out
MAX_RANKED = 2_000_000
MAX_LAID_OUT = 200_000


class SampleOrder:
    """The endless stream of sample indices: each epoch is a permutation of its own, from (seed,
    epoch).

    sizes: the number of samples of each data set; indices count through all sets. weights: how
    often an epoch passes over each set. For the fractional part of a weight, each epoch draws other
    samples. group_size: how often each sample comes in a row, for completions of one prompt.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        seed: int,
        weights: Sequence[float] | None = None,
        group_size: int = 1,
    ) -> None:
        self.sizes = list(sizes)
        self.seed = seed
        self.weights = list(weights or [1.0] * len(sizes))
        self.group_size = group_size
        self.epoch_size = 0  # samples of an epoch
        for count, weight in zip(self.sizes, self.weights, strict=True):
            self.epoch_size += round(count * weight)
        self.size = self.epoch_size * group_size  # positions of an epoch
        # two epochs: a step may reach from one into the next
        self._permutation = lru_cache(maxsize=2)(self._permute)

    def _permute(self, epoch: int) -> list[int]:
        # one generator per (seed, epoch): seeds that differ by one share no epoch
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        parts = []
        start = 0
        for size, weight in zip(self.sizes, self.weights, strict=True):
            # whole passes over the set, and a remainder that is drawn anew in each epoch
            repeats, remainder = divmod(round(size * weight), size) if size else (0, 0)
            if remainder:
                drawn = torch.randperm(size, generator=generator)[:remainder]
            else:
                drawn = torch.zeros(0, dtype=torch.int64)
            parts += [torch.arange(size).repeat(repeats) + start, drawn + start]
            start += size
        indices = torch.cat(parts)
        return indices[torch.randperm(len(indices), generator=generator)].tolist()

    def indices(self, start: int, stop: int) -> list[int]:
        """Return the samples from position `start` to `stop` of the stream."""
        indices = []
        for at in range(start, stop):
            epoch, place = divmod(at // self.group_size, self.epoch_size)
            indices.append(self._permutation(epoch)[place])
        return indices


class Largest(NamedTuple):
    """The largest memory demand of a run."""

    # the micro-batch with the most tokens, padding included: rows of sample indices
    rows: list[list[int]]
    max_targets: int  # the most target tokens in a micro-batch
    max_documents: int  # the most documents in a micro-batch
    # whether a step has several micro-batches per rank
    accumulates: bool


def largest_micro_batch(
    samples: Samples,
    order: SampleOrder,
    layout: BatchLayout,
    num_samples: int,
    batch_size: int,
    first: int = 0,
) -> Largest:
    """Return the largest micro-batch of a run over `num_samples` samples in steps of `batch_size`,
    from position `first`, and the most targets and documents of one, which may be another one.

    num_samples: the position at which the run ends, also if `first` is above 0. Steps are ranked by
    an estimate from their total and longest lengths; in long runs only the largest ones are laid
    out.
    """
    indices = np.array(order.indices(first, min(num_samples, first + MAX_RANKED)))
    starts = np.arange(0, len(indices), batch_size)
    estimates = _estimated_slots(samples.lengths[indices], starts, layout, batch_size)
    num_candidates = max(16, MAX_LAID_OUT // batch_size)
    candidates = np.argsort(-estimates, kind="stable")[:num_candidates]

    # exact values for the steps with the largest estimates; slots are tokens with padding
    rows = []
    max_slots = 0
    max_targets = 0
    max_documents = 0
    accumulates = False
    for step in candidates:
        step_indices = indices[starts[step] : starts[step] + batch_size]
        slots, of_step = _largest_of_step(samples, step_indices, layout)
        if slots > max_slots:
            max_slots = slots
            rows = of_step.rows
        max_targets = max(max_targets, of_step.max_targets)
        max_documents = max(max_documents, of_step.max_documents)
        accumulates |= of_step.accumulates
    return Largest(rows, max_targets, max_documents, accumulates)


def _largest_of_step(
    samples: Samples, indices: np.ndarray, layout: BatchLayout
) -> tuple[int, Largest]:
    """Return the largest micro-batch of a step of the samples `indices`, and its padded tokens."""
    lengths = samples.lengths[indices]
    supervised = samples.supervised[indices]
    batches = layout.plan(lengths.tolist())
    rows = []
    max_slots = 0
    max_targets = 0
    max_documents = 0
    for batch in batches:
        num_targets = sum(int(supervised[row].sum()) for row in batch)
        max_targets = max(max_targets, num_targets)
        of_batch = [indices[number] for row in batch for number in row]
        num_documents = len(samples.document_lengths(of_batch))
        # the padding of a row is another one
        max_documents = max(max_documents, num_documents + len(batch))
        slots = num_slots(lengths, batch)
        if slots > max_slots:
            max_slots = slots
            rows = [indices[row].tolist() for row in batch]
    accumulates = len(batches) > layout.ranks
    return max_slots, Largest(rows, max_targets, max_documents, accumulates)


def _estimated_slots(
    lengths: np.ndarray, starts: np.ndarray, layout: BatchLayout, batch_size: int
) -> np.ndarray:
    """Estimate the slots of the largest micro-batch of each step, from the sum and the maximum of
    its lengths; starts: of each step among the lengths."""
    sums = np.add.reduceat(lengths, starts)
    longest = np.maximum.reduceat(lengths, starts)
    # packing fills rows of about `row_tokens`; a row that has a longer sample is as wide as that
    if layout.row_tokens:
        num_rows = np.ceil(sums / layout.row_tokens)
        width = np.maximum(longest, sums / num_rows)
    else:
        num_rows = np.minimum(batch_size, len(lengths) - starts)
        width = longest
    # the largest micro-batch of a rank has at most `layout.rows` rows
    return width * np.minimum(np.ceil(num_rows / layout.ranks), layout.rows)
