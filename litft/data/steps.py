"""What a step is, and how it is laid out.

A step is the next `global_batch_size` samples of a permutation of (seed, epoch): the position in the data is one integer,
samples seen. Micro-batches and ranks only lay that set out, so losses and gradients depend on neither.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from litft.data.samples import Sample
from litft.loss import IGNORED


@dataclass(frozen=True)
class MicroBatch:
    """Rows padded on the right: causal attention never looks there, and a padded target is IGNORED."""

    tokens: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on another device."""
        return MicroBatch(self.tokens.to(device, non_blocking=True), self.targets.to(device, non_blocking=True))


class Order:
    """The endless stream of sample indices: every epoch a permutation of its own, from (seed, epoch)."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self._permutation = lru_cache(maxsize=2)(self._permute)

    def _permute(self, epoch: int) -> list[int]:
        # one generator a pair: seeds that differ by one share no epoch
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.size, generator=generator).tolist()

    def indices(self, start: int, stop: int) -> list[int]:
        """The samples from position `start` to `stop` of the stream."""
        return [self._permutation(at // self.size)[at % self.size] for at in range(start, stop)]


def layout(samples: list[Sample], rows: int, ranks: int, rank: int) -> list[MicroBatch]:
    """This rank's micro-batches of at most `rows` samples; every rank gets the same number, as even as they can be.

    Samples of like length go together, which halves the padding.
    """
    ordered = sorted(samples, key=lambda sample: -sample.tokens.numel())
    count = ranks * -(-len(ordered) // (rows * ranks))
    bounds = [len(ordered) * i // count for i in range(count + 1)]
    return [collate(ordered[bounds[i] : bounds[i + 1]]) for i in range(rank, count, ranks)]


def collate(samples: list[Sample]) -> MicroBatch:
    """Samples as rows of one length.

    None of them make one token without a target: a rank that is left over counts nothing, and keeps the collectives in step.
    """
    if not samples:
        return MicroBatch(torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), IGNORED))
    longest = max(sample.tokens.numel() for sample in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.int64)
    targets = torch.full((len(samples), longest), IGNORED)
    for row, sample in enumerate(samples):
        tokens[row, : sample.tokens.numel()] = sample.tokens
        targets[row, : sample.targets.numel()] = sample.targets
    return MicroBatch(tokens, targets)


def in_order(samples: list[Sample], rows: int, ranks: int, rank: int) -> Iterator[MicroBatch]:
    """All samples once, for validation: like `layout`, without holding all batches at once."""
    block = rows * ranks
    for start in range(0, len(samples), block):
        yield from layout(samples[start : start + block], rows, ranks, rank)
