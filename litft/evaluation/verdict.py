"""Whether one model is better than another on the same examples, in words: with an interval of the
difference by paired bootstrap (Efron and Tibshirani, 1993; SciPy's `bootstrap`)."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# fewer examples give intervals that are too narrow
FEWEST = 20
LEVEL = 0.95
RESAMPLES = 4999
# numbers that are drawn at once
DRAWN_AT_ONCE = 4_000_000
# what the name of a score begins with where lower is better
LOSS = "loss"
# and where a rise is forgetting: see `forgetting`
OF_FORGETTING = "loss on "
FORGETTING_WORDS = {"better": "not forgotten", "worse": "forgotten"}
SHARES = ("exact_match", "accuracy")

# what identifies an example, see `examples.Name`
Key = tuple[int, ...]


class Part(NamedTuple):
    """What one example adds to a score: the score is the sum of values over the sum of weights."""

    value: float
    weight: float = 1.0


# the parts of a model's scores: by score, by example
Parts = Mapping[str, Mapping[Key, Part]]
# the same as JSON: by score, [key, value, weight] of each example
StoredParts = dict[str, list[list[Any]]]


@dataclass(frozen=True)
class Verdict:
    """The difference between two models in one score."""

    score: str
    difference: float  # of the second model
    low: float  # bounds of the interval
    high: float
    examples: int

    @property
    def outcome(self) -> str:
        """`better`, `worse` or `not shown`, of the second model."""
        # of losses that are no number, neither bound is on a side
        is_known = not math.isnan(self.low + self.high)
        if self.examples < FEWEST or not is_known or self.low <= 0 <= self.high:
            return "not shown"
        is_higher = self.low > 0
        if self.score.startswith(LOSS):
            is_higher = not is_higher
        return "better" if is_higher else "worse"

    @property
    def examples_needed(self) -> int | None:
        """About how many examples would show a difference of this size: the width of an interval
        falls with the square root of their number. None for no difference, and of infinite
        losses."""
        if self.difference == 0 or not math.isfinite(self.high - self.low):
            return None
        half_width = (self.high - self.low) / 2
        needed = self.examples * (half_width / abs(self.difference)) ** 2
        # this many have not shown it
        return max(FEWEST, math.ceil(needed), self.examples + 1)

    def __str__(self) -> str:
        """Say it in one line."""
        if self.examples < FEWEST:
            examples = "1 example" if self.examples == 1 else f"{self.examples} examples"
            what = f"{self.score} {self._text(self.difference)} on {examples}"
            return f"not shown: {what}, and fewer than {FEWEST} say nothing"
        word = self.outcome
        if self.score.startswith(OF_FORGETTING):
            word = FORGETTING_WORDS.get(word, word)
        text = (
            f"{word}: {self.score} {self._text(self.difference)} (95 % interval "
            f"{self._number(self.low)} to {self._number(self.high)}, {self.examples:,} examples)"
        )
        needed = self.examples_needed
        if self.outcome == "not shown" and needed is not None:
            text += f"; about {_rounded(needed):,} examples would show a difference of this size"
        return text

    def interval_text(self) -> str:
        """Return the difference with its interval, or why there is none, in a few words."""
        if self.examples < FEWEST:
            return f"{self.difference:+.3g} over {self.examples} examples, too few to tell"
        return (
            f"{self.difference:+.3g} ({self.low:+.3g} to {self.high:+.3g} over "
            f"{self.examples:,} examples)"
        )

    def _text(self, value: float) -> str:
        """Return a difference with its unit."""
        unit = " points" if self.score in SHARES else ""
        return f"{self._number(value)}{unit}"

    def _number(self, value: float) -> str:
        """Return a difference with its sign: shares in percentage points, others as they are."""
        if self.score in SHARES:
            return f"{100 * value:+.1f}"
        return f"{value:+.3g}"


def mean_of(parts: Mapping[Key, Part]) -> float:
    """Return the score that its parts give."""
    total = sum(part.value for part in parts.values())
    return total / sum(part.weight for part in parts.values())


def add_part(parts: dict[Key, Part], name: Key, part: Part) -> None:
    """Add what a sample gives to a score. All samples of one record are one example: they are not
    independent, and an interval draws them together.

    name: of the sample, see `Samples.names`; texts have no record, and are examples of their own.
    """
    record = name[:1] if name[0] else name
    old = parts.get(record, Part(0.0, 0.0))
    parts[record] = Part(old.value + part.value, old.weight + part.weight)


def parts_of(names: Iterable[Key], parts: Iterable[Part]) -> dict[Key, Part]:
    """Return the parts of a score by record: the sum over all samples of a record.

    names: of the samples, see `add_part`.
    """
    together: dict[Key, Part] = {}
    for name, part in zip(names, parts, strict=True):
        add_part(together, name, part)
    return together


def verdicts(first: Parts, second: Parts) -> list[Verdict]:
    """Return how the second model differs from the first in each score, over the examples that both
    have."""
    found = []
    for score in second:
        of_first = first.get(score, {})
        of_second = second[score]
        shared = [key for key in of_second if key in of_first]
        if not shared or has_other_tokens(score, of_first, of_second):
            continue
        pairs = [(of_first[key], of_second[key]) for key in shared]
        found.append(_verdict(score, np.array(pairs, dtype=np.float64)))
    return found


def has_other_tokens(
    score: str, first: Mapping[Key, Part], second: Mapping[Key, Part]
) -> bool:
    """Return whether two losses are of other tokens of the same examples, as with another template
    or tokenizer: they are not comparable."""
    if not score.startswith(LOSS):
        return False
    return any(
        first[key].weight != part.weight for key, part in second.items() if key in first
    )


def _verdict(score: str, pairs: np.ndarray) -> Verdict:
    """Return the difference of a score. pairs: (N, 2, 2), of each example the parts of the first
    and of the second model, as value and weight."""
    count = len(pairs)
    columns = tuple(pairs.reshape(count, 4).T)
    difference = float(_difference(*columns))
    # of equal examples, every resample has the same difference
    are_equal = len(np.unique(pairs, axis=0)) == 1
    if count < FEWEST or are_equal:
        return Verdict(score, difference, low=difference, high=difference, examples=count)

    low, high = _interval(columns)
    if score in SHARES:
        # a share has steps of 1 / N: half a step more is the usual correction for continuity,
        # without which the interval covers the true difference in 93 % of cases
        low = max(-1.0, low - 0.5 / count)
        high = min(1.0, high + 0.5 / count)
    return Verdict(score, difference, low, high, count)


def _difference(
    first_value: np.ndarray,
    first_weight: np.ndarray,
    second_value: np.ndarray,
    second_weight: np.ndarray,
    axis: int = -1,
) -> np.ndarray:
    """Return the second model's score minus the first one's, over the last axis."""
    first = first_value.sum(axis) / first_weight.sum(axis)
    return second_value.sum(axis) / second_weight.sum(axis) - first


def _interval(columns: tuple[np.ndarray, ...]) -> tuple[float, float]:
    """Return the bounds of the interval: whole examples are drawn, with all that both models have
    of them."""
    # imported here because it takes half a second
    from scipy.stats import bootstrap

    result = bootstrap(
        columns,
        _difference,
        paired=True,
        vectorized=True,
        confidence_level=LEVEL,
        n_resamples=RESAMPLES,
        batch=max(1, DRAWN_AT_ONCE // len(columns[0])),
        method="percentile",
        rng=np.random.default_rng(0),
    )
    interval = result.confidence_interval
    return float(interval.low), float(interval.high)


def _rounded(number: int) -> int:
    """Return a number with two digits."""
    size = 10 ** max(0, len(str(number)) - 2)
    return math.ceil(number / size) * size


def stored_parts(parts: Parts) -> StoredParts:
    """Return the parts of the scores as JSON."""
    stored: StoredParts = {}
    for score, by_key in parts.items():
        rows = []
        for key, (value, weight) in by_key.items():
            rows.append([list(key), value, weight])
        stored[score] = rows
    return stored


def read_parts(stored: StoredParts) -> dict[str, Mapping[Key, Part]]:
    """Return the parts that `stored_parts` has written."""
    parts: dict[str, Mapping[Key, Part]] = {}
    for score, rows in stored.items():
        by_key = {}
        for key, value, weight in rows:
            by_key[tuple(key)] = Part(value, weight)
        parts[score] = by_key
    return parts


def parts_in(path: Path, when: str) -> dict[str, Mapping[Key, Part]]:
    """Return the parts in a run's verdict.json, `before` or `after` training; empty if the file is
    missing, damaged or of another version."""
    try:
        return read_parts(json.loads(path.read_text("utf-8"))[when])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
