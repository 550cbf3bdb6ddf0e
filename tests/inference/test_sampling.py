"""Distributions against transformers' filters and closed forms, and draws against distributions."""

import pytest
import torch

from litft.args import Sampling
from litft.inference.sampling import Sampler, draw

V = 50
LOGITS = torch.randn(V, generator=torch.Generator().manual_seed(0)) * 2


def distribution(settings: Sampling, prompt=(), made=(), logits=LOGITS):
    sampler = Sampler(1, len(logits), torch.device("cpu"))
    sampler.begin(0, list(prompt), settings)
    for token in made:
        sampler.append(torch.tensor([token]))
    return sampler.distribution(logits[None])[0]


@pytest.mark.parametrize(
    "settings",
    [
        Sampling(1.0),
        Sampling(0.7, top_k=5),
        Sampling(1.3, top_p=0.6),
        Sampling(0.9, top_k=20, top_p=0.8),
        Sampling(1.0, top_k=1, top_p=0.1),
        Sampling(2.5, min_p=0.2),
        Sampling(0.8, top_k=30, top_p=0.95, min_p=0.05),
        Sampling(2.0, repetition_penalty=1.4),
        Sampling(0.8, repetition_penalty=1.4, top_p=0.9),
        Sampling(0.8, top_k=1000),
    ],
    ids=str,
)
def test_it_is_transformers(settings):
    from transformers import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    held = [3, 23, 23, 9, 43]  # with logits of both signs, of which the largest is likely
    assert LOGITS[held].min() < 0 < LOGITS[held].max()
    scores = RepetitionPenaltyLogitsProcessor(float(settings.repetition_penalty))(torch.tensor([held]), LOGITS[None])
    scores = TemperatureLogitsWarper(settings.temperature)(None, scores) if settings.temperature != 1 else scores
    scores = TopKLogitsWarper(settings.top_k)(None, scores) if settings.top_k else scores
    scores = TopPLogitsWarper(settings.top_p)(None, scores) if settings.top_p < 1 else scores
    scores = MinPLogitsWarper(settings.min_p)(None, scores) if settings.min_p else scores
    found = distribution(settings, held[:2], held[2:])
    torch.testing.assert_close(found, scores.softmax(-1)[0], rtol=1e-5, atol=1e-7)


def test_presence_frequency_and_bias_have_their_closed_form():
    """OpenAI's penalties are of what the answer holds, once and as often as it does, and not of the prompt."""
    expected = LOGITS.clone()
    expected[[4, 5]] -= 1.5
    expected[4] -= 0.25
    expected[5] -= 0.5
    expected[9] += 2.0
    expected[11] = -torch.inf
    bias = {9: 2.0, 11: -float("inf")}
    found = distribution(Sampling(1.0, presence_penalty=1.5, frequency_penalty=0.25, logit_bias=bias), [3, 4], [4, 5, 5])
    torch.testing.assert_close(found, expected.softmax(-1), rtol=1e-5, atol=1e-7)
    assert found[11] == 0


def test_zero_temperature_is_greedy_and_a_tiny_one_does_not_overflow():
    for temperature in (0.0, 1e-30):
        found = distribution(Sampling(temperature))
        assert found[LOGITS.argmax()] == 1 and found.sum() == 1


def test_draws_follow_the_distribution_and_take_no_token_without_weight():
    weights = torch.tensor([[0.0, 0.2, 0.0, 0.5, 0.3, 0.0]])
    uniforms = (torch.arange(1000, dtype=torch.float64)[:, None] + 0.5) / 1000
    found = torch.bincount(draw(weights.expand(1000, -1), uniforms), minlength=6)
    assert found.tolist() == [0, 200, 0, 500, 300, 0]
    edges = torch.tensor([[0.0], [1 - 2**-53]], dtype=torch.float64)
    assert draw(weights.expand(2, -1), edges).tolist() == [1, 4]


def test_a_row_draws_by_its_own_settings_whatever_the_others_do():
    """Rows begin at different times, with other settings each."""
    settings = [Sampling(1.0, seed=3, repetition_penalty=1.2), Sampling(0.0), Sampling(0.7, top_k=9, top_p=0.8, seed=4)]
    logits = torch.randn(6, V, generator=torch.Generator().manual_seed(1))
    alone = []
    for own in settings:
        sampler = Sampler(1, V, torch.device("cpu"))
        sampler.begin(0, [1, 2], own)
        alone.append([int(sampler.next(step[None])) for step in logits])
    together = Sampler(3, V, torch.device("cpu"))
    for row, own in enumerate(settings[:2]):
        together.begin(row, [1, 2], own)
    found = [together.next(step.expand(3, -1)).tolist() for step in logits[:3]]
    together.begin(2, [1, 2], settings[2])
    assert [row[0] for row in found] == alone[0][:3] and [row[1] for row in found] == alone[1][:3]
    found = [together.next(step.expand(3, -1)).tolist() for step in logits]
    assert [row[2] for row in found] == alone[2]


@pytest.mark.parametrize(
    "settings, said",
    [
        (dict(temperature=-1.0), r"--temperature -1.0: must lie in \[0, 1000000\]"),
        (dict(temperature=float("nan")), "--temperature nan"),
        (dict(top_k=0), "--top_k 0: must be at least 1"),
        (dict(top_p=0.0), r"--top_p 0.0: must lie in \(0, 1\]"),
        (dict(min_p=1.5), "--min_p 1.5"),
        (dict(repetition_penalty=0.0), "--repetition_penalty 0.0"),
        (dict(presence_penalty=float("inf")), "--presence_penalty inf"),
    ],
)
def test_what_cannot_be_is_named(settings, said):
    import re

    (problem,) = Sampling(**settings).problems()
    assert re.match(said, problem)


def test_some_of_the_rows_are_looked_at():
    """What the others hold, how they draw and where they are stays as it was."""
    settings = [
        Sampling(1.0, seed=3, repetition_penalty=1.2, logit_bias={4: 3.0}),
        Sampling(0.9, seed=5, frequency_penalty=1.0),
        Sampling(0.7, top_k=9, seed=4, presence_penalty=2.0),
        Sampling(1.0, seed=9, logit_bias={7: 5.0}),
    ]
    logits = torch.randn(8, V, generator=torch.Generator().manual_seed(1))
    together, alone = Sampler(4, V, torch.device("cpu")), []
    for row, own in enumerate(settings):
        sampler = Sampler(1, V, torch.device("cpu"))
        sampler.begin(0, [1, 2], own)
        alone.append([int(sampler.next(step[None])) for step in logits])
        together.begin(row, [1, 2], own)
    found: list[list[int]] = [[] for _ in settings]
    for first, last in ((1, 3), (0, 4), (2, 3), (0, 2), (3, 4), (1, 4), (0, 4)):
        together.select_rows(slice(first, last))
        steps = torch.stack([logits[len(found[row])] for row in range(first, last)])
        for row, token in zip(range(first, last), together.next(steps).tolist(), strict=True):
            found[row].append(token)
    assert found == [own[: len(tokens)] for own, tokens in zip(alone, found, strict=True)]
