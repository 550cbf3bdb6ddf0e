"""Verdicts: their intervals cover the true difference, and their words follow from them."""

import numpy as np
import pytest

from litft.evaluation import verdict
from litft.evaluation.verdict import FEWEST, Part, Verdict, add_part, verdicts


def parts(score, values, weights=None):
    """Return the parts of one model: of a score, an example a value."""
    weights = np.ones(len(values)) if weights is None else weights
    pairs = zip(values, weights, strict=True)
    return {score: {(number,): Part(*pair) for number, pair in enumerate(pairs, 1)}}


def test_intervals_cover_the_true_difference(monkeypatch):
    """In 93 to 97 % of 200 simulated comparisons, of token-weighted losses and of exact matches.

    In 1,000 of them, 94.6 and 93.9 %.
    """
    monkeypatch.setattr(verdict, "RESAMPLES", 999)
    covered = {"loss": 0, "exact_match": 0}
    for seed in range(1000, 1200):
        random = np.random.default_rng(seed)
        # longer answers have a lower loss per token, as real ones have; the tuned model is 0.05
        # better for each token
        lengths = random.integers(5, 60, size=200)
        difficulty = random.gamma(2.0, 0.5, size=200) + 10 / lengths
        base = lengths * difficulty
        tuned = lengths * (difficulty - 0.05 + random.normal(0, 0.2, size=200))
        (found,) = verdicts(parts("loss", base, lengths), parts("loss", tuned, lengths))
        covered["loss"] += found.low <= -0.05 <= found.high
        # 60 % of the answers of one model are right, 68 % of the other's
        skill = random.uniform(size=200)
        flipped = random.uniform(size=200) < 0.1
        exact = (skill < 0.6, (skill < 0.68) ^ flipped)
        (found,) = verdicts(*(parts("exact_match", values) for values in exact))
        # a tenth of the answers is exchanged: 0.9 x 0.68 + 0.1 x 0.32
        covered["exact_match"] += found.low <= 0.644 - 0.6 <= found.high
    for score, count in covered.items():
        assert 0.93 <= count / 200 <= 0.97, (score, count)


def test_the_interval_is_that_of_a_plain_bootstrap():
    random = np.random.default_rng(1)
    lengths = random.integers(1, 30, size=80)
    base, tuned = lengths * random.gamma(2, size=80), lengths * random.gamma(1.8, size=80)
    (found,) = verdicts(parts("loss", base, lengths), parts("loss", tuned, lengths))
    differences = []
    for _ in range(5000):
        drawn = random.integers(0, 80, size=80)
        count = lengths[drawn].sum()
        differences.append(tuned[drawn].sum() / count - base[drawn].sum() / count)
    low, high = np.quantile(differences, [0.025, 0.975])
    assert found.difference == pytest.approx((tuned.sum() - base.sum()) / lengths.sum())
    width = high - low
    assert abs(found.low - low) < 0.05 * width and abs(found.high - high) < 0.05 * width


def test_samples_of_one_record_are_one_example():
    added = {}
    add_part(added, (7, 0, 0), Part(3.0, 2.0))
    add_part(added, (7, 1, 0), Part(1.0, 1.0))
    add_part(added, (9, 0, 0), Part(5.0, 5.0))
    # texts have no record
    add_part(added, (0, 0, 0), Part(1.0, 1.0))
    add_part(added, (0, 0, 1), Part(2.0, 1.0))
    assert added == {
        (7,): Part(4.0, 3.0),
        (9,): Part(5.0, 5.0),
        (0, 0, 0): Part(1.0, 1.0),
        (0, 0, 1): Part(2.0, 1.0),
    }


def test_only_examples_of_both_models_count():
    first = {"loss": {(1,): Part(1.0), (2,): Part(2.0)}}
    second = {"loss": {(2,): Part(1.0), (3,): Part(9.0)}, "reward": {(1,): Part(1.0)}}
    (found,) = verdicts(first, second)
    assert found.examples == 1 and found.difference == -1.0


def test_losses_of_other_tokens_are_not_compared():
    """With another template or tokenizer, an example has another number of target tokens."""
    first = {
        "loss": {(1,): Part(4.0, 2.0), (2,): Part(2.0, 2.0)},
        "accuracy": {(1,): Part(1.0)},
    }
    second = {
        "loss": {(1,): Part(4.0, 2.0), (2,): Part(2.0, 3.0)},
        "accuracy": {(1,): Part(0.0)},
    }
    assert [found.score for found in verdicts(first, second)] == ["accuracy"]
    assert [found.score for found in verdicts(first, first)] == ["loss", "accuracy"]


@pytest.mark.parametrize(
    "found, words",
    [
        (
            Verdict("exact_match", 0.071, 0.03, 0.112, 200),
            "better: exact_match +7.1 points (95 % interval +3.0 to +11.2, 200 examples)",
        ),
        (
            Verdict("loss", 0.31, 0.2, 0.42, 1200),
            "worse: loss +0.31 (95 % interval +0.2 to +0.42, 1,200 examples)",
        ),
        (
            Verdict("loss", -0.31, -0.42, -0.2, 50),
            "better: loss -0.31 (95 % interval -0.42 to -0.2, 50 examples)",
        ),
        (
            Verdict("exact_match", 0.01, -0.02, 0.04, 200),
            "not shown: exact_match +1.0 points (95 % interval -2.0 to +4.0, 200 examples); about "
            "1,800 examples would show a difference of this size",
        ),
        (
            Verdict("exact_match", 0.0, -0.02, 0.02, 200),
            "not shown: exact_match +0.0 points (95 % interval -2.0 to +2.0, 200 examples)",
        ),
        (
            Verdict("reward", 0.5, 0.5, 0.5, 12),
            "not shown: reward +0.5 on 12 examples, and fewer than 20 say nothing",
        ),
    ],
    ids=str,
)
def test_what_a_verdict_says(found, words):
    assert str(found) == words


def test_few_and_equal_examples():
    few = verdicts(parts("loss", np.ones(FEWEST - 1)), parts("loss", np.zeros(FEWEST - 1)))
    assert few[0].outcome == "not shown"
    # all answers are better by the same: nothing varies
    (found,) = verdicts(parts("loss", np.ones(30)), parts("loss", np.zeros(30)))
    assert found.low == found.high == -1.0 and found.outcome == "better"
    (found,) = verdicts(
        parts("exact_match", np.ones(30)), parts("exact_match", np.ones(30))
    )
    assert found.outcome == "not shown" and found.examples_needed is None


@pytest.mark.parametrize("score", ["loss", "loss on neutral text", "exact_match"])
def test_what_is_no_number_is_not_shown(score):
    """A model that has diverged is not better."""
    nan = float("nan")
    found = Verdict(score, difference=nan, low=nan, high=nan, examples=100)
    assert found.outcome == "not shown"


def test_the_number_of_examples_that_would_show_it():
    """With so many examples, the interval just leaves 0 out."""
    random = np.random.default_rng(0)
    base = random.normal(0, 1, size=100)
    tuned = base + random.normal(0.1, 1, size=100)
    (found,) = verdicts(parts("reward", base), parts("reward", tuned))
    copies = found.examples_needed / 100
    repeated = round(copies * 1.2) + 1
    (more,) = verdicts(
        parts("reward", np.tile(base, repeated)), parts("reward", np.tile(tuned, repeated))
    )
    assert found.outcome == "not shown" and more.outcome != "not shown"
