"""Speculative decoding keeps the distribution: chi-square tests on a tiny vocabulary against the
exact one."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

import litft
from litft.args import Sampling
from litft.inference.decoder import BrokenModel, Decoder
from litft.inference.generation import Request, generate_batch
from litft.inference.sampling import TokenSampler
from litft.inference.speculative import Draft, DraftModel, PromptLookup, speculative_rounds

V, RUNS = 6, 900
PROMPT = [1, 2, 3, 1, 2]


@pytest.fixture(scope="module")
def models(make_model):
    sizes = dict(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    return [
        litft.load(
            make_model(
                LlamaConfig, **sizes, num_key_value_heads=2, max_position_embeddings=32
            )[1]
        )[0]
        for _ in range(2)
    ]


@torch.no_grad()
def exact(model, settings, length):
    """Return the probability of each text of `length` tokens."""
    probabilities = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, probability in probabilities.items():
            sampler = TokenSampler(1, V, torch.device("cpu"))
            sampler.begin(0, PROMPT, settings)
            for token in text:
                sampler.append(torch.tensor([token]))
            logits = model(torch.tensor([[*PROMPT, *text]]))[:, -1]
            for token, conditional in enumerate(sampler.distribution(logits)[0].tolist()):
                longer[(*text, token)] = probability * conditional
        probabilities = longer
    return probabilities


def chi_square(counts, expected, runs):
    """Return the statistic and its degrees of freedom; texts with an expected count below five form
    one group."""
    rare = [text for text, probability in expected.items() if probability * runs < 5]
    groups = [[text] for text in expected if text not in rare] + ([rare] if rare else [])
    pairs = [
        (sum(counts[t] for t in group), runs * sum(expected[t] for t in group))
        for group in groups
    ]
    pairs = [
        (observed, expected_count)
        for observed, expected_count in pairs
        if expected_count > 0
    ]
    return sum(
        (observed - expected_count) ** 2 / expected_count
        for observed, expected_count in pairs
    ), len(pairs) - 1


class ConstantDrafter:
    """Always drafts the same two tokens, which are likely enough to be accepted sometimes."""

    def draft(self, text, settings):
        return Draft([4, 3], None)


def drafter(name, draft):
    return {
        "draft": DraftModel(Decoder(draft, 1, 32), V, num_draft_tokens=2),
        "wrong": ConstantDrafter(),
    }[name]


CHANGED = Sampling(0.7, top_p=0.9, repetition_penalty=1.3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "name"),
    [
        pytest.param(Sampling(1.0), "wrong", id="1-wrong", marks=pytest.mark.slow),
        pytest.param(CHANGED, "draft", id="changed-draft"),
        pytest.param(Sampling(1.0), "draft", id="1-draft", marks=pytest.mark.slow),
        pytest.param(CHANGED, "wrong", id="changed-wrong", marks=pytest.mark.slow),
    ],
)
def test_speculative_decoding_keeps_the_distribution(models, name, settings):
    target, draft = models
    text_drafter, expected, counts = (
        drafter(name, draft),
        exact(target, settings, 3),
        Counter(),
    )
    decoder = Decoder(target, 1, 32)
    for seed in range(RUNS):
        sampler = TokenSampler(1, V, decoder.device)
        sampler.begin(0, PROMPT, replace(settings, seed=seed))
        tokens = []
        for accepted in speculative_rounds(
            decoder, sampler, text_drafter, decoder.prefill(0, PROMPT)
        ):
            tokens += accepted.tokens
            if len(tokens) >= 3:
                break
        counts[tuple(tokens[:3])] += 1
    statistic, degrees = chi_square(counts, expected, RUNS)
    assert degrees > 10
    # four standard deviations of a chi-square: the probability of a false failure is at most
    # 1/5,000
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5 + 8, (statistic, degrees)


def test_prompt_lookup_finds_repetitions():
    lookup = PromptLookup(num_draft_tokens=3, max_ngram=2)
    assert lookup.draft([1, 2, 3, 4, 9, 2, 3], Sampling()).tokens == [4, 9, 2]
    assert lookup.draft([1, 2, 3, 2, 7, 2], Sampling()).tokens == [7, 2], (
        "the latest occurrence"
    )
    assert (
        lookup.draft([1, 2, 3], Sampling()).tokens
        == []
        == lookup.draft([1], Sampling()).tokens
    )


def test_drafting_ends_at_the_context_limit(models):
    target = models[0]
    decoder = Decoder(target, 1, 12)
    sampler = TokenSampler(1, V, decoder.device)
    sampler.begin(0, PROMPT, Sampling(0.0))
    tokens = [
        token
        for step in speculative_rounds(
            decoder,
            sampler,
            DraftModel(Decoder(target, 1, 12), V),
            decoder.prefill(0, PROMPT),
        )
        for token in step.tokens
    ]
    assert len(tokens) == 12 - len(PROMPT) + 1 and len(decoder.texts[0]) == 12


def test_nan_after_the_prompt_ends_the_answer(make_model, tiny):
    """The model breaks at a later position: an error, and no token drawn from NaN."""
    _, tokenizer = litft.load(tiny)
    model, _ = litft.load(make_model(GPT2Config, n_positions=64)[1])
    model.embed_positions.weight.data[20] = torch.nan
    decoder = Decoder(model, capacity=40)
    request = Request(list(range(1, 12)), 25)
    with pytest.raises(BrokenModel, match="logits are NaN"):
        list(generate_batch(decoder, tokenizer, [request], drafter=ConstantDrafter()))
