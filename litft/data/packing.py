"""How the samples of a step become micro-batches: rows of packed or padded samples, assigned to the
ranks in turn."""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from litft.data.sample import Sample
from litft.data.shared_prompts import (
    SharedRow,
    prompt_units,
    shared_documents,
    unit_cost,
)
from litft.model.distillation import TeacherTargets
from litft.model.loss import IGNORED, target_indices_of
from litft.model.packed_sequences import PackedSequences


class Sequences(NamedTuple):
    """The sequences whose log-probabilities an objective compares: the documents of pairs, or
    answers with labels."""

    # (B, T) int64: the number of each token's sequence
    # in the micro-batch; pairs are 2 n and 2 n + 1
    numbers: Tensor
    # (D,) fp64: log-probabilities in the reference model, 0 without one
    references: Tensor
    desirable: Tensor  # (D,) bool: the labels; True without any


class Completions(NamedTuple):
    """What the loss needs of D completions, which have N targets together."""

    # (N,) int64: the number of each target's completion in the micro-batch
    numbers: Tensor
    advantages: Tensor  # (D,) fp32
    # (N,) fp32: log-probabilities that the decoder saw, before the step's updates, and in the
    # reference model; None: not needed
    decoded: Tensor | None
    old: Tensor | None
    reference: Tensor | None


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one or more samples, padded on the right.

    Causal attention never attends to the padding, and padded targets are IGNORED.
    """

    tokens: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64
    # (N,) int64 into the flattened rows; computed here to avoid a GPU sync
    target_indices: Tensor
    # (B, T) int64 within each document; 0 for padding
    positions: Tensor | None = None
    # a number for each token's document; -1: padding
    documents: PackedSequences | None = None
    sequences: Sequences | None = None
    completions: Completions | None = None
    teacher: TeacherTargets | None = None

    def to(self, device: torch.device) -> "MicroBatch":
        """Return a copy on another device."""
        # copies from pinned memory do not block the host
        is_cuda = device.type == "cuda"

        def move(value: Tensor) -> Tensor:
            if is_cuda:
                value = value.pin_memory()
            return value.to(device, non_blocking=True)

        moved = {}
        for item in fields(self):
            # `to` of the documents leaves a part of them on the CPU
            if item.name == "documents":
                moved["documents"] = self.documents and self.documents.to(move)
            else:
                moved[item.name] = tree_map_only(Tensor, move, getattr(self, item.name))
        return MicroBatch(**moved)

    def with_min_targets(self, count: int) -> "MicroBatch":
        """Return a copy with at least `count` targets, with arbitrary values: for measuring
        memory."""
        targets = self.targets.flatten()
        # the first positions without a target get one, token 0
        num_missing = max(0, count - len(target_indices_of(targets)))
        free = (targets == IGNORED).nonzero()[:num_missing, 0]
        targets = targets.index_fill(0, free, 0).view_as(self.targets)
        return replace(self, targets=targets, target_indices=target_indices_of(targets))

    def inputs(self) -> dict[str, Tensor | PackedSequences | None]:
        """Return the model's keyword arguments, which are all but the tokens: with the targets, the
        model returns the loss."""
        arguments = {}
        for item in fields(self):
            if item.name not in ("tokens", "sequences", "completions", "teacher"):
                arguments[item.name] = getattr(self, item.name)
        return arguments


@dataclass(frozen=True)
class BatchLayout:
    """How a set of samples becomes micro-batches."""

    rows: int  # the most rows of a micro-batch
    # tokens of a row of packed samples, or of one longer pair; None: a row is one sample
    row_tokens: int | None = None
    ranks: int = 1
    # completions of one prompt in a row share its computation
    shares_prompts: bool = False

    def plan(self, lengths: Sequence[int]) -> list[list[list[int]]]:
        """Return the micro-batches of samples with these lengths, assigned to rank 0, 1, ... in
        turn.

        Each micro-batch is a list of rows of sample indices. Rows of similar length go together, to
        reduce padding. All ranks get the same number of micro-batches.
        """
        # the longest samples first: a row is padded only to the longest one of its own micro-batch
        if self.row_tokens is None:
            rows = [[i] for i in sorted(range(len(lengths)), key=lambda i: -lengths[i])]
        else:
            rows = pack(lengths, self.row_tokens, self.ranks)
            rows.sort(key=lambda row: -sum(lengths[i] for i in row))

        # the fewest micro-batches that hold the rows, as a multiple of the ranks; their sizes
        # differ by at most one row
        count = self.ranks * -(-len(rows) // (self.rows * self.ranks))
        bounds = [len(rows) * i // count for i in range(count + 1)]
        return [rows[bounds[i] : bounds[i + 1]] for i in range(count)]

    def plan_samples(self, samples: Sequence[Sample]) -> list[list[list[int]]]:
        """Return the micro-batches of samples, as `plan` does; with `shares_prompts`, those of one
        prompt in one row, in as little memory."""
        plain = self.plan([sample.tokens.numel() for sample in samples])
        if not self.shares_prompts or self.row_tokens is None:
            return plain
        # no row is to need more memory than the largest one without sharing
        limit = 0
        for batch in plain:
            for row in batch:
                limit = max(limit, sum(samples[index].tokens.numel() for index in row))
        units = prompt_units(samples, limit)
        if len(units) < self.ranks:
            return plain
        costs = [unit_cost([samples[index] for index in unit]) for unit in units]
        planned = []
        for batch in replace(self, row_tokens=limit).plan(costs):
            rows = []
            for row in batch:
                rows.append([index for number in row for index in units[number]])
            planned.append(rows)
        return planned

    def halved(self, longest: int) -> "BatchLayout | None":
        """Return a layout with half the rows, or with half the tokens of a single row, but at least
        `longest`.

        Return None if neither is possible.
        """
        if self.rows > 1:
            return replace(self, rows=self.rows // 2)
        if self.row_tokens is None or self.row_tokens <= longest:
            return None
        return replace(self, row_tokens=max(longest, self.row_tokens // 2))

    def batches(self, samples: Sequence[Sample], rank: int = 0) -> list[MicroBatch]:
        """Return the micro-batches of a rank."""
        planned = self.plan_samples(samples)[rank :: self.ranks]
        batches = []
        for index_rows in planned:
            rows = []
            for indices in index_rows:
                rows.append([samples[index] for index in indices])
            batches.append(self.collate_rows(rows))
        return batches

    def collate_rows(self, rows: list[list[Sample]]) -> MicroBatch:
        """Collate rows the same way for all micro-batches of a run, so that torch.compile makes one
        graph."""
        packed = self.row_tokens is not None
        is_shared = any(sample.shared_tokens for row in rows for sample in row)
        if self.shares_prompts and packed and is_shared:
            return collate_shared(rows)
        return collate(rows, packed)

    def iter_batches(
        self, samples: Sequence[Sample], block_size: int, rank: int
    ) -> Iterator[MicroBatch]:
        """Yield a rank's micro-batches for validation; at most `block_size` samples are in memory
        at once."""
        for start in range(0, len(samples), block_size):
            stop = min(start + block_size, len(samples))
            block = [samples[index] for index in range(start, stop)]
            yield from self.batches(block, rank)


def num_slots(lengths: np.ndarray, rows: list[list[int]]) -> int:
    """Return the number of tokens of a micro-batch, padding included."""
    return len(rows) * max((int(lengths[row].sum()) for row in rows), default=0)


def pack(lengths: Sequence[int], row_tokens: int, ranks: int = 1) -> list[list[int]]:
    """Pack samples into few rows of at most `row_tokens` tokens, as even as possible, and return
    rows of sample indices.

    A longer sample, which only a pair can be, is a row of its own.

    Best fit decreasing finds the number of rows, which is within 11/9 of the minimum (Johnson,
    1973). The rows are then filled again, each sample into the emptiest row (Graham, 1969), if no
    row exceeds `row_tokens` that way: rows of equal length need no padding. The number of rows is a
    multiple of `ranks` if there are enough samples.
    """
    # the longest first, and those of one length in their order
    by_length = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    rows = _best_fit(lengths, by_length, row_tokens)

    # as many rows again, rounded up to a multiple of the ranks
    rows_per_rank = math.ceil(len(rows) / ranks)
    # a row needs at least one sample
    count = min(rows_per_rank * ranks, len(lengths))
    even_rows = _emptiest_first(lengths, by_length, count)

    # one pair may be longer than `row_tokens`; its length is then the limit
    limit = max(row_tokens, max(lengths, default=0))
    for row in even_rows:
        if sum(lengths[index] for index in row) > limit:
            return rows
    return even_rows


def _best_fit(
    lengths: Sequence[int], by_length: list[int], row_tokens: int
) -> list[list[int]]:
    """Return rows of at most `row_tokens` tokens, unless a sample is longer: each sample goes into
    the fullest row that still has room for it."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for index in by_length:
        length = lengths[index]
        # the first row with at least so many free tokens
        at = bisect_left(free, (length, -1))
        if at < len(free):
            left, row = free.pop(at)
        else:
            left = row_tokens
            row = len(rows)
            rows.append([])
        rows[row].append(index)
        insort(free, (left - length, row))
    return rows


def _emptiest_first(
    lengths: Sequence[int], by_length: list[int], count: int
) -> list[list[int]]:
    """Return `count` rows of any length: each sample goes into the emptiest row."""
    # a heap, with the emptiest row at its head
    filled = [(0, row) for row in range(count)]
    rows: list[list[int]] = [[] for _ in range(count)]
    for index in by_length:
        used, row = filled[0]
        heapq.heapreplace(filled, (used + lengths[index], row))
        rows[row].append(index)
    return rows


def collate(rows: list[list[Sample]], packed: bool = True) -> MicroBatch:
    """Concatenate the samples of each row. packed: whether a row may have several samples.

    Pairs are two documents of a row.

    Without rows, return one token without a target: a rank without data adds nothing to the loss,
    but joins the collectives.
    """
    # padding keeps token 0, no target, and document -1
    row_lengths = []
    for row_samples in rows:
        row_lengths.append(sum(sample.tokens.numel() for sample in row_samples))
    shape = (max(1, len(rows)), max(row_lengths, default=1))
    tokens = torch.zeros(shape, dtype=torch.int64)
    positions = torch.zeros(shape, dtype=torch.int64)
    targets = torch.full(shape, IGNORED)
    documents = torch.full(shape, -1)
    count = 0
    samples = []
    for row, row_samples in enumerate(rows):
        samples += row_samples
        start = 0
        for sample in row_samples:
            end = start + sample.tokens.numel()
            tokens[row, start:end] = sample.tokens
            targets[row, start:end] = sample.targets
            for length in sample.document_lengths:
                document = slice(start, start + length)
                positions[row, document] = torch.arange(length)
                documents[row, document] = count
                start = start + length
                count = count + 1
    target_indices = target_indices_of(targets)
    if any(sample.is_preference for sample in samples):
        # as indices: padding, which has no target, counts for the first document
        sequences = _sequences(documents.clamp(min=0), samples)
    else:
        sequences = None
    if samples and samples[0].advantage is not None:
        completions = _completions(samples)
    else:
        completions = None
    if samples and samples[0].teacher is not None:
        teacher = _teacher_targets(samples)
    else:
        teacher = None

    # rows of one document each need no mask of documents: causal attention never reaches the
    # padding on the right
    if not (packed or any(sample.documents for sample in samples)):
        packed_documents = None
    else:
        packed_documents = PackedSequences.of(documents)
    return MicroBatch(
        tokens,
        targets,
        target_indices,
        positions=positions,
        documents=packed_documents,
        sequences=sequences,
        completions=completions,
        teacher=teacher,
    )


def collate_shared(rows: list[list[Sample]]) -> MicroBatch:
    """Return the micro-batch of rows in which completions of one prompt that follow each other
    have it once."""
    made = []
    for row_samples in rows:
        row = SharedRow()
        # the row is planned: all neighbours with one prompt share it
        for unit in prompt_units(row_samples, limit=math.inf):
            row.add([row_samples[index] for index in unit])
        made.append(row)
    shape = (len(rows), max(row.length for row in made))
    tokens = torch.zeros(shape, dtype=torch.int64)
    positions = torch.zeros(shape, dtype=torch.int64)
    targets = torch.full(shape, IGNORED)
    ids = torch.full(shape, -1)
    for number, row in enumerate(made):
        tokens[number, : row.length] = torch.cat(row.tokens)
        positions[number, : row.length] = torch.cat(row.positions)
        targets[number, : row.length] = torch.cat(row.targets)
        # attention reads those of whole documents
        ids[number, : row.length] = 0
    samples = [sample for row_samples in rows for sample in row_samples]
    has_advantages = samples[0].advantage is not None
    return MicroBatch(
        tokens,
        targets,
        target_indices_of(targets),
        positions=positions,
        documents=shared_documents(made, ids),
        completions=_completions(samples) if has_advantages else None,
    )


def _completions(samples: list[Sample]) -> Completions:
    counts = torch.tensor([sample.supervised for sample in samples])
    return Completions(
        numbers=torch.arange(len(samples)).repeat_interleave(counts),
        advantages=torch.tensor([sample.advantage for sample in samples]),
        decoded=_joined([sample.decoded for sample in samples]),
        old=_joined([sample.old for sample in samples]),
        reference=_joined([sample.reference_tokens for sample in samples]),
    )


def _teacher_targets(samples: list[Sample]) -> TeacherTargets:
    ids = []
    log_probs = []
    is_label = []
    for sample in samples:
        assert sample.teacher is not None  # all samples of a step have one, or none has
        ids.append(sample.teacher.ids)
        log_probs.append(sample.teacher.log_probs)
        is_label.append(torch.full((sample.supervised,), not sample.is_own))
    return TeacherTargets(torch.cat(ids), torch.cat(log_probs), torch.cat(is_label))


def _joined(values: list[Tensor | None]) -> Tensor | None:
    """Return the values of all samples one after the other; None if they have none."""
    known = [value for value in values if value is not None]
    return torch.cat(known) if known else None


def _sequences(numbers: Tensor, samples: list[Sample]) -> Sequences:
    references: list[float] = []
    desirable: list[bool] = []
    for sample in samples:
        count = len(sample.document_lengths)
        # without a reference model, each document counts as 0
        references += sample.reference or (0.0,) * count
        desirable += [sample.desirable is not False] * count
    return Sequences(
        numbers, torch.tensor(references, dtype=torch.float64), torch.tensor(desirable)
    )
