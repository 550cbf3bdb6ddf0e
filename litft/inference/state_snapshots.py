"""Snapshots of the states of recurrent mixers: keys and values can be cut to any length, a state
only goes forward.

The decoder keeps two snapshots of each row: the end of its prompt, which the next turn of a chat
begins with, and the point before the last piece of several tokens, whose drafts may be rejected. A
shorter text starts from the latest snapshot that it contains, and the tokens after it go through
the model again.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from litft.model.kv_cache import KVCache

# V vocabulary


class Snapshot(NamedTuple):
    """The states after the first `length` tokens of a text."""

    length: int
    states: list[Tensor]
    # (V,), of the next token, if they were computed
    logits: Tensor | None


class RowStates:
    """How many tokens the states of a row contain, and its snapshots."""

    def __init__(self) -> None:
        # None: the text was cut, and the states contain tokens that it lacks
        self.length: int | None = 0
        self.prompt: Snapshot | None = None
        self.piece: Snapshot | None = None

    def truncate(self, length: int) -> None:
        """Forget what contains more than the first `length` tokens."""
        if self.length is not None and self.length > length:
            self.length = None
        if self.prompt and self.prompt.length > length:
            self.prompt = None
        if self.piece and self.piece.length > length:
            self.piece = None

    def latest(self, length: int) -> Snapshot | None:
        """Return the longest snapshot of at most `length` tokens."""
        snapshots = []
        for snapshot in (self.prompt, self.piece):
            if snapshot and snapshot.length <= length:
                snapshots.append(snapshot)
        return max(snapshots, key=lambda snapshot: snapshot.length, default=None)


def take_snapshot(cache: KVCache, length: int, logits: Tensor | None = None) -> Snapshot:
    """Copy the states (1, ...) of a cache with one row, and the logits (V,) of the next token, if
    any."""
    states = [state.clone() for state in cache.states()]
    if logits is not None:
        logits = logits.clone()
    return Snapshot(length, states, logits)


class Start(NamedTuple):
    """Where to continue a prompt: the row that has its first `length` tokens, and the snapshot to
    restore, if any."""

    row: int
    length: int
    snapshot: Snapshot | None


def best_start(
    rows: Sequence[RowStates], prefix_lengths: Sequence[int], prompt_length: int, row: int
) -> Start:
    """Return the longest part of a prompt whose states a row has.

    At least one token is left to compute, unless its logits are stored.

    prefix_lengths: tokens that the prompt has in common with the text of each row. row: preferred
    among equal ones.
    """
    starts = [Start(row, 0, None)]
    for index, (states, common) in enumerate(zip(rows, prefix_lengths, strict=True)):
        # the current states can only go forward, and one token must be left to compute
        if states.length is not None and states.length <= min(common, prompt_length - 1):
            starts.append(Start(index, states.length, None))
        # a snapshot with logits can be the whole prompt
        for snapshot in (states.prompt, states.piece):
            if snapshot and snapshot.logits is not None:
                limit = prompt_length
            else:
                limit = prompt_length - 1
            if snapshot and snapshot.length <= min(common, limit):
                starts.append(Start(index, snapshot.length, snapshot))
    return max(starts, key=lambda start: (start.length, start.row == row))
