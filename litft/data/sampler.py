"""What a step is, and how it is laid out.

A step is the next `global_batch_size` samples of a permutation of (seed, epoch): the position in the data is one integer,
samples seen. Rows, micro-batches and ranks only lay that set out, so losses and gradients depend on none of them.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from litft.data.packing import Layout
from litft.data.token_store import Samples

RANKED, LAID_OUT = 2_000_000, 200_000  # samples of a run that `heaviest` looks at, and that it lays out


class Sampler:
    """The endless stream of sample indices: every epoch a permutation of its own, from (seed, epoch).

    sizes: of the sets of samples, which are numbered through. weights: how often an epoch passes over each; of a set with a
    broken weight, every epoch draws the rest anew.
    """

    def __init__(self, sizes: Sequence[int], seed: int, weights: Sequence[float] | None = None) -> None:
        self.sizes, self.seed, self.weights = list(sizes), seed, list(weights or [1.0] * len(sizes))
        self.size = sum(round(n * weight) for n, weight in zip(self.sizes, self.weights, strict=True))
        self._permutation = lru_cache(maxsize=2)(self._permute)

    def _permute(self, epoch: int) -> list[int]:
        # one generator a pair: seeds that differ by one share no epoch
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        parts, start = [], 0
        for size, weight in zip(self.sizes, self.weights, strict=True):
            whole, rest = divmod(round(size * weight), size) if size else (0, 0)
            drawn = torch.randperm(size, generator=generator)[:rest] if rest else torch.zeros(0, dtype=torch.int64)
            parts += [torch.arange(size).repeat(whole) + start, drawn + start]
            start += size
        every = torch.cat(parts)
        return every[torch.randperm(len(every), generator=generator)].tolist()

    def indices(self, start: int, stop: int) -> list[int]:
        """The samples from position `start` to `stop` of the stream."""
        return [self._permutation(at // self.size)[at % self.size] for at in range(start, stop)]


class Largest(NamedTuple):
    """The most that a run asks of memory."""

    rows: list[list[int]]  # the micro-batch with the most tokens, padding included: rows of sample numbers
    learned: int  # the most tokens of a micro-batch that the loss counts
    several: bool  # whether a step has several micro-batches a rank


def largest_micro_batch(samples: Samples, order: Sampler, layout: Layout, count: int, size: int, first: int = 0) -> Largest:
    """Of a run over `count` samples in steps of `size`, which begins with the sample `first`.

    Of long runs, steps are ranked by what their sums and longest samples promise, and the first thousands laid out.
    """
    lengths, supervised = samples.lengths, samples.supervised
    numbers = np.array(order.indices(first, min(count, first + RANKED)))
    starts = np.arange(0, len(numbers), size)
    sums, longest = (ufunc.reduceat(lengths[numbers], starts) for ufunc in (np.add, np.maximum))
    counts = np.ceil(sums / layout.row_tokens) if layout.row_tokens else np.minimum(size, len(numbers) - starts)
    width = np.maximum(longest, sums / counts) if layout.row_tokens else longest
    promised = width * np.minimum(np.ceil(counts / layout.ranks), layout.rows)
    likely = np.argsort(-promised, kind="stable")[: max(16, LAID_OUT // size)]
    rows, most, learned, several = [], 0, 0, False
    for step in likely:
        chosen = numbers[starts[step] : starts[step] + size]
        long, targets = lengths[chosen].tolist(), supervised[chosen].tolist()
        batches = layout.plan(long)
        several |= len(batches) > layout.ranks
        for batch in batches:
            learned = max(learned, sum(targets[i] for row in batch for i in row))
            peft_targets = len(batch) * max((sum(long[i] for i in row) for row in batch), default=0)
            if peft_targets > most:
                most, rows = peft_targets, [chosen[row].tolist() for row in batch]
    return Largest(rows, learned, several)
