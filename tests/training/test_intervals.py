"""When a run validates and saves, if the flags do not say."""

from types import SimpleNamespace

import numpy as np
import pytest

from litft.args import EvalArgs, LoRAFinetuneArgs, SaveArgs, TrainArgs
from litft.training.intervals import checkpoint_is_due, validation_cost, validation_interval


def args(**train) -> LoRAFinetuneArgs:
    return LoRAFinetuneArgs(train=TrainArgs(global_batch_size=8, **train))


@pytest.mark.parametrize("steps", [10, 75, 300, 5000])
def test_a_run_has_about_ten_validations(steps):
    interval = validation_interval(args(), steps, cost=1 / 3, has_losses=True)
    assert 8 <= steps / interval <= 12


def test_validations_take_at_most_half_as_long_as_the_training():
    # 128 examples take 16 batches, about 5 steps
    cost = 16 / 3
    interval = validation_interval(args(), 60, cost, has_losses=True)
    assert 60 / interval == pytest.approx(5, abs=1)
    # but there are at least three
    assert validation_interval(args(), 9, cost, has_losses=True) == 3
    long_run = args(max_time="1h")
    assert validation_interval(long_run, 100_000, cost=1 / 3, has_losses=True) == 100


def test_a_short_run_without_a_validation_set_answers_only_at_its_ends():
    """Three answers of 64 tokens take longer than four steps of four short examples."""
    short = LoRAFinetuneArgs(train=TrainArgs(global_batch_size=4))
    data = SimpleNamespace(val=[], train=SimpleNamespace(lengths=np.full(100, 60)))
    cost = validation_cost(short, data)
    # three answers of 64 tokens, a token as long as 16 trained ones
    assert cost == pytest.approx(3 * 64 * 16 / (4 * 60))
    assert validation_interval(short, 4, cost, has_losses=False) == 0
    assert validation_interval(short, 1000, cost, has_losses=False) == 100


def test_the_flags_decide_where_they_are_given():
    fixed = LoRAFinetuneArgs(eval=EvalArgs(interval=7), save=SaveArgs(interval=4))
    assert validation_interval(fixed, 300, cost=1.0, has_losses=True) == 7
    assert [
        step for step in range(1, 13) if checkpoint_is_due(fixed, step, 300, seconds=1e6)
    ] == [
        4,
        8,
        12,
    ]
    never = LoRAFinetuneArgs(eval=EvalArgs(interval=0), save=SaveArgs(interval=0))
    assert validation_interval(never, 300, cost=1.0, has_losses=True) == 0
    assert not checkpoint_is_due(never, 100, 300, seconds=1e6)


def test_checkpoints_are_at_most_ten_minutes_apart():
    assert checkpoint_is_due(args(), 7, 1000, seconds=601)
    assert checkpoint_is_due(args(), 100, 1000, seconds=70)  # a tenth of the run
    assert not checkpoint_is_due(args(), 101, 1000, seconds=70)
    assert not checkpoint_is_due(args(), 100, 1000, seconds=50)  # a minute has not passed
