"""Whose prompt is prefilled next, and how much of it, so that a long prompt does not keep others
waiting."""

import time
from collections.abc import Collection
from dataclasses import dataclass, field

from litft.inference.decoder import PREFILL_CHUNK
from litft.inference.generation import Batch

# of a slice for which another request waits
SLICE_SECONDS = 0.25
# in tokens; smaller ones take longer for each token
SMALLEST_SLICE = 128
# recurrent mixers compute so many tokens together
SLICE_MULTIPLE = 64


@dataclass
class PrefillTurns:
    """The prompts of one batch take turns, a slice each.

    New prompts and prompts that have had a slice alternate: a short one waits for one slice of a
    long one, and many short ones do not keep a long one waiting for ever. While an answer runs that
    has had less time than the next prompt, prefill and decoding have equal time.
    """

    # of the device, that each request has had, by its number
    seconds: dict[int, float] = field(default_factory=dict)
    # seconds of decoding before the next slice of a prompt that has had more time than an answer
    owed: float = 0.0
    tokens_per_second: float = 0.0  # of prefill; 0: not measured yet
    last_was_new: bool = False

    def slice_tokens(self, batch: Batch, row: int) -> int:
        """Return how many tokens of a prompt to compute at once: few if a request waits for them
        that has had less time."""
        is_alone = len(batch.prefilling) == 1 and not batch.running
        if not is_alone and not self._keeps_a_younger_answer(batch, row):
            return PREFILL_CHUNK
        tokens = (
            round(self.tokens_per_second * SLICE_SECONDS / SLICE_MULTIPLE) * SLICE_MULTIPLE
        )
        return min(max(tokens, SMALLEST_SLICE), PREFILL_CHUNK)

    def next_row(self, batch: Batch) -> int | None:
        """Return the row of the prompt that is prefilled next, None if the running answers come
        first."""
        begun = [row for row, prompt in batch.prefilling.items() if prompt.num_cached]
        # equal prompts wait for the first of them, whose cache they copy
        begun_ids = [batch.prefilling[row].request.ids for row in begun]
        new = [
            row
            for row, prompt in batch.prefilling.items()
            if not prompt.num_cached and prompt.request.ids not in begun_ids
        ]
        # new prompts alternate with those that have begun
        if new and (not begun or not self.last_was_new):
            self.last_was_new = True
            return new[0]
        self.last_was_new = False
        # of those that have begun, the one with the least time so far
        row = min(
            begun, key=lambda row: self.seconds.get(batch.prefilling[row].number, 0.0)
        )
        if self.owed > 0 and self._keeps_a_younger_answer(batch, row):
            return None
        return row

    def _keeps_a_younger_answer(self, batch: Batch, row: int) -> bool:
        """Return whether an answer runs that has had less time than the prompt of a row."""
        prompt_seconds = self.seconds.get(batch.prefilling[row].number, 0.0)
        return any(
            self.seconds.get(number, 0.0) < prompt_seconds
            for number, _ in batch.running.values()
        )

    def prefill(self, batch: Batch, row: int) -> int:
        """Compute a slice of a prompt; return its number of tokens.

        Raises the ValueError of `Batch.prefill`.
        """
        prompt = batch.prefilling[row]
        before = prompt.num_computed
        start = time.perf_counter()
        batch.prefill(self.slice_tokens(batch, row), row)
        seconds = time.perf_counter() - start
        self._charge(prompt.number, seconds)
        # never more than one slice, however many prompts there are
        self.owed = max(self.owed, seconds)
        tokens = prompt.num_computed - before
        if tokens >= SMALLEST_SLICE:
            self.tokens_per_second = tokens / seconds
        return tokens

    def decoded(self, numbers: list[int], seconds: float) -> None:
        """Record a decode step of these requests."""
        self.owed -= seconds
        for number in numbers:
            self._charge(number, seconds / len(numbers))

    def forget_all_but(self, numbers: Collection[int]) -> None:
        """Drop the times of requests that ended."""
        for number in [number for number in self.seconds if number not in numbers]:
            del self.seconds[number]

    def _charge(self, number: int, seconds: float) -> None:
        self.seconds[number] = self.seconds.get(number, 0.0) + seconds
