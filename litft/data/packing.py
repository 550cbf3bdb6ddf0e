"""How the samples of a step become micro-batches: rows of packed or padded samples, in turn for each rank."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from litft.data.encoder import Sample
from litft.model.loss import IGNORED, target_indices_of
from litft.model.packed_sequences import PackedSequences


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one or more samples, padded on the right: causal attention never looks there, a padded target is IGNORED."""

    tokens: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64
    positions: Tensor | None = None  # (B, T) int64 within each sample; None: each row holds one
    documents: PackedSequences | None = None  # which sample of its row a token belongs to; -1: padding
    target_indices: Tensor | None = (
        None  # (N,) int64, where the targets are in the flattened rows: known before a GPU has them
    )

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on another device."""
        pinned = device.type == "cuda"  # from pinned memory a copy makes the host wait for nothing

        def moved(value: Tensor) -> Tensor:
            return (value.pin_memory() if pinned else value).to(device, non_blocking=True)

        return MicroBatch(*(tree_map_only(Tensor, moved, getattr(self, item.name)) for item in fields(self)))

    def learning(self, count: int) -> "MicroBatch":
        """The same with so many targets at least, whichever they are: to try what memory they take."""
        targets = self.targets.flatten()
        free = (targets == IGNORED).nonzero()[: max(0, count - len(target_indices_of(targets))), 0]
        targets = targets.index_fill(0, free, 0).view_as(self.targets)
        return replace(self, targets=targets, target_indices=target_indices_of(targets))

    def inputs(self) -> dict[str, Tensor | PackedSequences | None]:
        """What the model takes besides the tokens."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "tokens"}


@dataclass(frozen=True)
class Layout:
    """How a set of samples becomes micro-batches."""

    rows: int  # of a micro-batch, at most
    row_tokens: int | None = None  # tokens of a row, into which samples are packed; None: a row is one sample
    ranks: int = 1

    def plan(self, lengths: Sequence[int]) -> list[list[list[int]]]:
        """Every micro-batch of a set of samples as rows of sample numbers, those of rank 0, 1, ... in turn.

        Rows of like length go together, which leaves little padding; every rank gets the same number of micro-batches.
        """
        if self.row_tokens is None:
            rows = [[i] for i in sorted(range(len(lengths)), key=lambda i: -lengths[i])]
        else:
            rows = pack(lengths, self.row_tokens, self.ranks)
            rows.sort(key=lambda row: -sum(lengths[i] for i in row))
        count = self.ranks * -(-len(rows) // (self.rows * self.ranks))
        bounds = [len(rows) * i // count for i in range(count + 1)]
        return [rows[bounds[i] : bounds[i + 1]] for i in range(count)]

    def halved(self, longest: int) -> "Layout | None":
        """With half the rows, or one row of half the room, in which the longest sample fits; None: as small as it gets."""
        if self.rows > 1:
            return replace(self, rows=self.rows // 2)
        if self.row_tokens is None or self.row_tokens <= longest:
            return None
        return replace(self, row_tokens=max(longest, self.row_tokens // 2))

    def batches(self, samples: Sequence[Sample], rank: int = 0) -> list[MicroBatch]:
        """A rank's micro-batches."""
        planned = self.plan([sample.tokens.numel() for sample in samples])[rank :: self.ranks]
        return [self.collated([[samples[i] for i in row] for row in rows]) for rows in planned]

    def collated(self, rows: list[list[Sample]]) -> MicroBatch:
        """A micro-batch; all of a run are of one kind, or torch.compile would make a graph for each."""
        return collate(rows, packed=self.row_tokens is not None)

    def in_blocks(self, samples: Sequence[Sample], size: int, rank: int) -> Iterator[MicroBatch]:
        """A rank's micro-batches of many samples, for validation: `size` of them are held at once."""
        for start in range(0, len(samples), size):
            yield from self.batches([samples[i] for i in range(start, min(start + size, len(samples)))], rank)


def num_slots(lengths: np.ndarray, rows: list[list[int]]) -> int:
    """Tokens of a micro-batch, padding included."""
    return len(rows) * max((int(lengths[row].sum()) for row in rows), default=0)


def pack(lengths: Sequence[int], row_tokens: int, ranks: int = 1) -> list[list[int]]:
    """Sample numbers in as few rows of at most `room` tokens as best fit decreasing finds, and these as even as can be.

    Best fit is within 11/9 of the fewest rows (Johnson, 1973). Rows are then filled anew, each sample into the emptiest
    (Graham, 1969), where that too keeps within `room`: rows of one length need no padding. There are rows for every rank.
    """
    ordered = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # what is left of each row, sorted
    for i in ordered:
        at = bisect_left(free, (lengths[i], -1))
        left, row = free.pop(at) if at < len(free) else (row_tokens, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        insort(free, (left - lengths[i], row))
    count = min(-(-len(rows) // ranks) * ranks, len(lengths))
    filled = [(0, row) for row in range(count)]
    even: list[list[int]] = [[] for _ in range(count)]
    for i in ordered:
        used, row = filled[0]
        heapq.heapreplace(filled, (used + lengths[i], row))
        even[row].append(i)
    return even if max(filled, default=(0, 0))[0] <= max(row_tokens, max(lengths, default=0)) else rows


def collate(rows: list[list[Sample]], packed: bool = True) -> MicroBatch:
    """Samples one behind the other, row by row; packed: whether a row may hold several.

    No rows make one token without a target: a rank that is left over counts nothing, and keeps the collectives in step.
    """
    longest = max((sum(sample.tokens.numel() for sample in row) for row in rows), default=1)
    shape = (max(1, len(rows)), longest)
    tokens, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    targets, documents = torch.full(shape, IGNORED), torch.full(shape, -1)
    for row, samples in enumerate(rows):
        start = 0
        for number, sample in enumerate(samples):
            end = start + sample.tokens.numel()
            tokens[row, start:end], targets[row, start:end] = sample.tokens, sample.targets
            positions[row, start:end], documents[row, start:end] = torch.arange(end - start), number
            start = end
    target_indices = target_indices_of(targets)
    if not packed:
        return MicroBatch(tokens, targets, target_indices=target_indices)
    return MicroBatch(tokens, targets, positions, PackedSequences.of(documents), target_indices)
