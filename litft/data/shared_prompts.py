"""Completions of one prompt in one row: the prompt is computed once, and attention gives each
completion a copy of its keys and values.

A unit is a list of samples that follow each other and begin with the same tokens. The last token
of the prompt is repeated before each completion, so that every token has one target.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from litft.data.sample import Sample
from litft.model.packed_sequences import PackedSequences, SharedPrompts

# B rows, T tokens of a row, S tokens of a row in which each sample is whole


def prompt_units(samples: Sequence[Sample], limit: float) -> list[list[int]]:
    """Return the samples in units, by number; limit: the largest cost of a unit of several."""
    units: list[list[int]] = []
    for number, sample in enumerate(samples):
        if units:
            unit = [*(samples[other] for other in units[-1]), sample]
            if has_one_prompt(unit[0], sample) and unit_cost(unit) <= limit:
                units[-1].append(number)
                continue
        units.append([number])
    return units


def has_one_prompt(sample: Sample, other: Sample) -> bool:
    """Return whether two samples are completions of the same prompt."""
    count = sample.shared_tokens
    if not count or count != other.shared_tokens:
        return False
    return torch.equal(sample.tokens[:count], other.tokens[:count])


def unit_cost(samples: Sequence[Sample]) -> int:
    """Return the number of tokens of separate samples whose memory a unit does not exceed.

    A block keeps more for its other parts, which compute the shared tokens once, than for
    attention, which has them once for each sample: the mean of the two numbers is an upper limit.
    """
    whole = sum(sample.tokens.numel() for sample in samples)
    repeated = (len(samples) - 1) * samples[0].shared_tokens
    return whole - repeated // 2


class SharedRow:
    """A row under construction, and the same row with whole samples."""

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.length = 0
        # of each token of the whole samples: its place in the row
        self.expand: list[Tensor] = []
        # of each token of the row: its place in the whole samples
        self.collapse: list[Tensor] = []
        self.whole_length = 0
        # of each sample
        self.whole_lengths: list[int] = []

    def add(self, unit: Sequence[Sample]) -> None:
        """Add completions of one prompt, or one sample."""
        first, *others = unit
        prompt = torch.arange(self.length, self.length + first.shared_tokens)
        # the first sample brings the shared tokens
        self._add_part(first, start=0, before=prompt[:0])
        for sample in others:
            self._add_part(sample, start=first.shared_tokens, before=prompt)

    def _add_part(self, sample: Sample, start: int, before: Tensor) -> None:
        """Add the tokens of a sample from `start`; before: the places of those before them."""
        count = sample.tokens.numel()
        positions = torch.arange(start, count)
        end = self.length + count - start
        self.tokens.append(sample.tokens[start:])
        self.targets.append(sample.targets[start:])
        self.positions.append(positions)
        self.expand.append(torch.cat((before, torch.arange(self.length, end))))
        self.collapse.append(positions + self.whole_length)
        self.length = end
        self.whole_length += count
        self.whole_lengths.append(count)


def shared_documents(rows: Sequence[SharedRow], ids: Tensor) -> PackedSequences:
    """Return the documents of rows (B, T) whose samples share prompts; ids: (B, T), those of
    units."""
    whole_length = max(row.whole_length for row in rows)
    batch, length = ids.shape
    # padding is copied from the first token, and belongs to no document
    expand = torch.zeros(batch, whole_length, dtype=torch.int64)
    collapse = torch.zeros(batch, length, dtype=torch.int64)
    whole_ids = torch.full((batch, whole_length), -1)
    count = 0
    for number, row in enumerate(rows):
        expand[number, : row.whole_length] = torch.cat(row.expand)
        collapse[number, : row.length] = torch.cat(row.collapse)
        numbers = torch.arange(count, count + len(row.whole_lengths))
        lengths = torch.tensor(row.whole_lengths)
        whole_ids[number, : row.whole_length] = numbers.repeat_interleave(lengths)
        count += len(row.whole_lengths)
    starts = torch.arange(batch)[:, None]
    shared = SharedPrompts(
        documents=PackedSequences.of(whole_ids),
        expand=(expand + starts * length).flatten(),
        collapse=(collapse + starts * whole_length).flatten(),
    )
    return PackedSequences.of(ids)._replace(shared=shared)
