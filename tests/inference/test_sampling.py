"""Distributions against transformers' filters and closed forms, and sampled tokens against
distributions."""

import pytest
import torch

from litft.args import Sampling
from litft.inference.sampling import TokenSampler, draw

V = 50
LOGITS = torch.randn(V, generator=torch.Generator().manual_seed(0)) * 2


def distribution(settings: Sampling, prompt=(), generated=(), logits=LOGITS):
    sampler = TokenSampler(1, len(logits), torch.device("cpu"))
    sampler.begin(0, list(prompt), settings)
    for token in generated:
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
def test_distributions_equal_transformers(settings):
    from transformers import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    tokens = [3, 23, 23, 9, 43]  # their logits have both signs, and the largest is likely
    assert LOGITS[tokens].min() < 0 < LOGITS[tokens].max()
    scores = RepetitionPenaltyLogitsProcessor(float(settings.repetition_penalty))(
        torch.tensor([tokens]), LOGITS[None]
    )
    scores = (
        TemperatureLogitsWarper(settings.temperature)(None, scores)
        if settings.temperature != 1
        else scores
    )
    scores = TopKLogitsWarper(settings.top_k)(None, scores) if settings.top_k else scores
    scores = (
        TopPLogitsWarper(settings.top_p)(None, scores) if settings.top_p < 1 else scores
    )
    scores = MinPLogitsWarper(settings.min_p)(None, scores) if settings.min_p else scores
    actual = distribution(settings, tokens[:2], tokens[2:])
    torch.testing.assert_close(actual, scores.softmax(-1)[0], rtol=1e-5, atol=1e-7)


def test_presence_frequency_and_bias_equal_their_closed_form():
    """OpenAI's penalties apply to tokens of the answer, not of the prompt: once, and per
    occurrence."""
    expected = LOGITS.clone()
    expected[[4, 5]] -= 1.5
    expected[4] -= 0.25
    expected[5] -= 0.5
    expected[9] += 2.0
    expected[11] = -torch.inf
    bias = {9: 2.0, 11: -float("inf")}
    actual = distribution(
        Sampling(1.0, presence_penalty=1.5, frequency_penalty=0.25, logit_bias=bias),
        [3, 4],
        [4, 5, 5],
    )
    torch.testing.assert_close(actual, expected.softmax(-1), rtol=1e-5, atol=1e-7)
    assert actual[11] == 0


def test_zero_temperature_is_greedy_and_a_tiny_one_does_not_overflow():
    for temperature in (0.0, 1e-30):
        actual = distribution(Sampling(temperature))
        assert actual[LOGITS.argmax()] == 1 and actual.sum() == 1


def test_draws_follow_the_distribution_and_never_take_a_token_of_zero_weight():
    weights = torch.tensor([[0.0, 0.2, 0.0, 0.5, 0.3, 0.0]])
    uniforms = (torch.arange(1000, dtype=torch.float64)[:, None] + 0.5) / 1000
    actual = torch.bincount(draw(weights.expand(1000, -1), uniforms), minlength=6)
    assert actual.tolist() == [0, 200, 0, 500, 300, 0]
    edges = torch.tensor([[0.0], [1 - 2**-53]], dtype=torch.float64)
    assert draw(weights.expand(2, -1), edges).tolist() == [1, 4]


def test_rows_are_sampled_independently():
    """Each row has its own settings and starts at its own time."""
    settings = [
        Sampling(1.0, seed=3, repetition_penalty=1.2),
        Sampling(0.0),
        Sampling(0.7, top_k=9, top_p=0.8, seed=4),
    ]
    logits = torch.randn(6, V, generator=torch.Generator().manual_seed(1))
    expected = []
    for row_settings in settings:
        sampler = TokenSampler(1, V, torch.device("cpu"))
        sampler.begin(0, [1, 2], row_settings)
        expected.append([int(sampler.next(step[None])) for step in logits])
    batched = TokenSampler(3, V, torch.device("cpu"))
    for row, row_settings in enumerate(settings[:2]):
        batched.begin(row, [1, 2], row_settings)
    actual = [batched.next(step.expand(3, -1)).tolist() for step in logits[:3]]
    batched.begin(2, [1, 2], settings[2])
    assert [row[0] for row in actual] == expected[0][:3] and [
        row[1] for row in actual
    ] == expected[1][:3]
    actual = [batched.next(step.expand(3, -1)).tolist() for step in logits]
    assert [row[2] for row in actual] == expected[2]


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(temperature=-1.0), r"--temperature -1.0: must lie in \[0, 1000000\]"),
        (dict(temperature=float("nan")), "--temperature nan"),
        (dict(top_k=-2), "--top_k -2: must be at least 1; 0 and -1: off"),
        (dict(top_p=0.0), r"--top_p 0.0: must lie in \(0, 1\]"),
        (dict(min_p=1.5), "--min_p 1.5"),
        (dict(repetition_penalty=0.0), "--repetition_penalty 0.0"),
        (dict(presence_penalty=float("inf")), "--presence_penalty inf"),
    ],
)
def test_invalid_settings_are_reported(settings, message):
    import re

    (problem,) = Sampling(**settings).problems()
    assert re.match(message, problem)


def test_sampling_some_rows_leaves_the_others_unchanged():
    """The history, random state and position of the other rows stay unchanged."""
    settings = [
        Sampling(1.0, seed=3, repetition_penalty=1.2, logit_bias={4: 3.0}),
        Sampling(0.9, seed=5, frequency_penalty=1.0),
        Sampling(0.7, top_k=9, seed=4, presence_penalty=2.0),
        Sampling(1.0, seed=9, logit_bias={7: 5.0}),
    ]
    logits = torch.randn(8, V, generator=torch.Generator().manual_seed(1))
    batched, expected = TokenSampler(4, V, torch.device("cpu")), []
    for row, row_settings in enumerate(settings):
        sampler = TokenSampler(1, V, torch.device("cpu"))
        sampler.begin(0, [1, 2], row_settings)
        expected.append([int(sampler.next(step[None])) for step in logits])
        batched.begin(row, [1, 2], row_settings)
    actual: list[list[int]] = [[] for _ in settings]
    for first, last in ((1, 3), (0, 4), (2, 3), (0, 2), (3, 4), (1, 4), (0, 4)):
        batched.select_rows(slice(first, last))
        steps = torch.stack([logits[len(actual[row])] for row in range(first, last)])
        for row, token in zip(
            range(first, last), batched.next(steps).tolist(), strict=True
        ):
            actual[row].append(token)
    assert actual == [
        tokens[: len(sampled)] for tokens, sampled in zip(expected, actual, strict=True)
    ]


def test_a_top_p_below_the_smallest_fp32_number_keeps_the_likeliest_token():
    sampler = TokenSampler(1, 4, torch.device("cpu"))
    sampler.begin(0, [0], Sampling(temperature=1.0, top_p=1e-46))
    logits = torch.tensor([[0.0, 9.0, 0.0, 0.0]])
    assert sampler.distribution(logits).tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_equal_probabilities_do_not_depend_on_the_batch():
    """Ties at the limit of top_k are all kept, alone and beside a row that keeps more tokens."""
    logits = torch.tensor([[2.0, 2.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    settings = Sampling(temperature=1.0, top_k=1, top_p=0.9)
    for others in ([], [Sampling(temperature=0.0)]):
        sampler = TokenSampler(1 + len(others), 4, torch.device("cpu"))
        for row, of_row in enumerate([settings, *others]):
            sampler.begin(row, [0], of_row)
        first = sampler.distribution(logits[: 1 + len(others)])[0]
        assert first.tolist() == [0.5, 0.5, 0.0, 0.0]


def test_all_tokens_stay_beside_a_row_that_cuts_some():
    """The sum of many fp32 probabilities passes 1 before the last one."""
    logits = 3 * torch.randn(2, 150_000, generator=torch.Generator().manual_seed(0))
    sampler = TokenSampler(2, 150_000, torch.device("cpu"))
    sampler.begin(0, [0], Sampling(temperature=1.0))
    sampler.begin(1, [0], Sampling(temperature=1.0, top_p=0.9))
    kept = (sampler.distribution(logits) > 0).sum(-1)
    assert kept[0] == 150_000 > kept[1]
