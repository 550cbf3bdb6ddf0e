"""Settings of a sweep, each with several runs: which of them are really better."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import NamedTuple

from litft.evaluation.verdict import (
    LOSS,
    Key,
    Part,
    Parts,
    Verdict,
    has_other_tokens,
    verdicts,
)

LEVEL = 0.95


class RunScores(NamedTuple):
    """The scores of a finished run."""

    seed: int
    scores: Mapping[str, float]
    # what each example adds to them; without those that are not measured by example
    parts: Parts


@dataclass(frozen=True)
class RunsOfSetting:
    """The runs of one setting of a sweep."""

    name: str
    runs: Sequence[RunScores]

    def values(self, score: str) -> dict[int, float]:
        """Return a score of each run that has it, by seed."""
        return {run.seed: run.scores[score] for run in self.runs if score in run.scores}

    def mean(self, score: str) -> float:
        """Return the mean of a score over the runs; NaN if no run has it."""
        values = self.values(score)
        return fmean(values.values()) if values else math.nan

    def spread(self, score: str) -> float:
        """Return the standard deviation of a score over the runs; NaN of fewer than two."""
        values = self.values(score)
        return stdev(values.values()) if len(values) > 1 else math.nan

    def mean_parts(self, score: str) -> dict[Key, Part]:
        """Return what each example adds to a score, as the mean of the runs."""
        measured = [run.parts[score] for run in self.runs if score in run.parts]
        values: defaultdict[Key, float] = defaultdict(float)
        weights: defaultdict[Key, float] = defaultdict(float)
        for parts in measured:
            for key, part in parts.items():
                values[key] += part.value
                weights[key] += part.weight
        # divided once: the mean of equal weights is exactly this weight
        count = len(measured)
        means = {}
        for key, value in values.items():
            means[key] = Part(value / count, weights[key] / count)
        return means


@dataclass(frozen=True)
class Difference:
    """How one setting differs from another in a score."""

    over_examples: Verdict | None  # None: the score is not measured by example
    # the bounds of the 95 % interval of the mean difference over seeds; None: a single seed
    over_seeds: tuple[float, float] | None
    # whether both were measured on the same tokens of the same examples
    is_comparable: bool = True

    @property
    def is_real(self) -> bool:
        """Whether it would most likely be found again with other examples, and with other
        seeds."""
        signs = set()
        if self.over_examples is not None:
            if self.over_examples.outcome == "not shown":
                return False
            signs.add(self.over_examples.difference > 0)
        if self.over_seeds is not None:
            low, high = self.over_seeds
            if not (low > 0 or high < 0):
                return False
            signs.add(low > 0)
        # both intervals, where there are two, are on the same side
        return self.is_comparable and len(signs) == 1

    def __str__(self) -> str:
        """Say it in a few words."""
        if not self.is_comparable:
            return "not compared: other validation examples, or other tokens of them"
        parts = []
        if self.over_examples is not None:
            parts.append(self.over_examples.interval_text())
        if self.over_seeds is not None:
            low, high = self.over_seeds
            parts.append(f"{low:+.3g} to {high:+.3g} over seeds")
        word = "real" if self.is_real else "not shown"
        return f"{word}: {'; '.join(parts)}" if parts else word


def difference(first: RunsOfSetting, second: RunsOfSetting, score: str) -> Difference:
    """Return how the second setting differs from the first one.

    Over examples by paired bootstrap (see `verdict`), with the mean of the runs; over seeds by
    Student's t of the differences between runs of the same seed.
    """
    of_first = first.mean_parts(score)
    of_second = second.mean_parts(score)
    found = verdicts({score: of_first}, {score: of_second})
    return Difference(
        over_examples=found[0] if found else None,
        over_seeds=_interval_over_seeds(first, second, score),
        is_comparable=(
            of_first.keys() == of_second.keys()
            and not has_other_tokens(score, of_first, of_second)
        ),
    )


def _interval_over_seeds(
    first: RunsOfSetting, second: RunsOfSetting, score: str
) -> tuple[float, float] | None:
    before = first.values(score)
    after = second.values(score)
    seeds = sorted(before.keys() & after.keys())
    if len(seeds) < 2:
        return None
    # imported here because it takes half a second
    from scipy.stats import t

    differences = [after[seed] - before[seed] for seed in seeds]
    # a run that has diverged
    if not all(map(math.isfinite, differences)):
        return math.nan, math.nan
    # with few examples, differences of shares are often equal by chance
    deviation = max(stdev(differences), _rounding(first.runs[0], score))
    quantile = t.ppf((1 + LEVEL) / 2, len(seeds) - 1)
    half = float(quantile) * deviation / math.sqrt(len(seeds))
    mean = fmean(differences)
    return mean - half, mean + half


def _rounding(run: RunScores, score: str) -> float:
    """Return the standard deviation of numbers that are rounded to the steps of a score: a share of
    N examples has steps of 1 / N; 0 for other scores."""
    parts = run.parts.get(score, {})
    is_share = all(part.weight == 1 and part.value in (0, 1) for part in parts.values())
    if not parts or not is_share:
        return 0.0
    return 1 / (len(parts) * math.sqrt(12))


def ranked(settings: Sequence[RunsOfSetting], score: str) -> list[RunsOfSetting]:
    """Return the settings, the best first; those without the score last."""

    def place(setting: RunsOfSetting) -> float:
        mean = setting.mean(score)
        if math.isnan(mean):
            return math.inf
        return mean if score.startswith(LOSS) else -mean

    return sorted(settings, key=place)
