"""Completions of one prompt share its computation, with the losses and gradients of separate
rows."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from parity import ROWS

import litft
from litft.data.packing import BatchLayout, collate_shared
from litft.data.sample import Sample
from litft.data.shared_prompts import prompt_units
from litft.evaluation.log_probs import sample_batches
from litft.model.loss import IGNORED
from litft.training.memory_saving.compile import compile_blocks

# (rows of tests/parity.py, variation): what attention may have beside keys and values
KINDS = [
    ("llama", "grouped"),
    ("mistral", "window"),
    ("gemma2", next(iter(ROWS["gemma2"][1]))),
    ("gpt_oss", next(iter(ROWS["gpt_oss"][1]))),
    ("deepseek_v3", next(iter(ROWS["deepseek_v3"][1]))),
    ("gemma3n_text", "four streams, shared keys"),
    ("gpt2", "tied"),
    ("muse_glimmer_text", "RoPE by layer"),
]


def completions(groups: int, size: int, seed: int = 0) -> list[Sample]:
    """Samples of random prompts, `size` of each, with a random advantage."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(groups):
        prompt = rng.integers(3, 90, rng.integers(2, 20))
        for _ in range(size):
            answer = rng.integers(3, 90, rng.integers(1, 12))
            tokens = torch.from_numpy(np.concatenate([prompt, answer]))
            targets = tokens[1:].clone()
            targets[: len(prompt) - 1] = IGNORED
            samples.append(
                Sample(
                    tokens[:-1],
                    targets,
                    advantage=float(rng.normal()),
                    shared_tokens=len(prompt) - 1,
                )
            )
    return samples


def losses_and_gradients(model, samples, layout):
    """The losses of each sample's targets, the gradients of their weighted sum, and the tokens."""
    model.zero_grad()
    losses = [None] * len(samples)
    tokens = 0
    for order, batch in sample_batches(samples, layout, 0):
        tokens += batch.tokens.numel()
        of_tokens = model(batch.tokens, **batch.inputs(), reduction="none")
        completions = batch.completions
        (of_tokens * completions.advantages[completions.numbers]).sum().backward()
        parts = of_tokens.detach().split([samples[index].supervised for index in order])
        for index, part in zip(order, parts, strict=True):
            losses[index] = part
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.clone()
    return torch.cat(losses), gradients, tokens


def assert_equal(model, layout, limit=2e-5):
    samples = completions(groups=5, size=4)
    separate, expected, all_tokens = losses_and_gradients(
        model, samples, replace(layout, shares_prompts=False)
    )
    shared, gradients, tokens = losses_and_gradients(model, samples, layout)
    assert tokens < 0.8 * all_tokens
    torch.testing.assert_close(shared, separate, atol=limit * 5, rtol=limit)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        scale = expected[name].abs().max().clamp(min=0.1)
        assert (gradient - expected[name]).abs().max() <= limit * scale, name


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("family", "name"), KINDS, ids=[family for family, _ in KINDS])
def test_losses_and_gradients_equal_those_of_separate_samples(
    make_model, family, name, rows
):
    config_class, variations = ROWS[family]
    _, folder = make_model(getattr(transformers, config_class), **variations[name])
    model = litft.load(folder, "fp32")[0].requires_grad_(True)
    assert model.config.can_share_prompts
    assert_equal(model, BatchLayout(rows, 100, shares_prompts=True))


@pytest.mark.slow
def test_compiled_blocks_share_prompts(make_model):
    config_class, variations = ROWS["llama"]
    _, folder = make_model(getattr(transformers, config_class), **variations["grouped"])
    model = litft.load(folder, "fp32")[0].requires_grad_(True)
    compiled = copy.deepcopy(model)
    compile_blocks(compiled.train())
    layout = BatchLayout(2, 100, shares_prompts=True)
    samples = completions(groups=5, size=4)
    expected = losses_and_gradients(model, samples, layout)
    losses, gradients, _ = losses_and_gradients(compiled, samples, layout)
    torch.testing.assert_close(losses, expected[0], atol=1e-4, rtol=1e-4)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[1][name], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_next", next(iter(ROWS["qwen3_next"][1]))),
        ("llama4_text", "chunks, NoPE, experts"),
        ("llama", "dynamic"),
        ("bloom", next(iter(ROWS["bloom"][1]))),
    ],
)
def test_networks_that_see_more_than_keys_and_values_do_not_share(make_model, family, name):
    """The state of a recurrent mixer, chunks, a rotation by the length of the document, and
    distances in the row."""
    config_class, variations = ROWS[family]
    _, folder = make_model(getattr(transformers, config_class), **variations[name])
    assert not litft.load(folder)[0].config.can_share_prompts


@pytest.mark.parametrize("seed", range(20))
def test_each_sample_is_whole_in_one_row(seed):
    """What attention sees are the samples, and no row needs more memory than without sharing."""
    rng = np.random.default_rng(seed)
    groups, size, ranks = rng.integers(1, 7), rng.integers(1, 6), int(rng.integers(1, 4))
    samples = completions(groups, size, seed)
    layout = BatchLayout(2, int(rng.integers(32, 128)), ranks, shares_prompts=True)
    lengths = [sample.tokens.numel() for sample in samples]
    largest = 0
    for batch in layout.plan(lengths):
        largest = max(largest, *(sum(lengths[index] for index in row) for row in batch), 0)
    planned = layout.plan_samples(samples)
    assert sorted(index for batch in planned for row in batch for index in row) == list(
        range(len(samples))
    )
    assert len(planned) % ranks == 0
    for batch in planned:
        if not batch:
            continue
        rows = [[samples[index] for index in row] for row in batch]
        made = collate_shared(rows)
        shared = made.documents.shared
        whole = made.tokens.flatten()[shared.expand]
        numbers = shared.documents.ids.flatten()
        for number, sample in enumerate(sample for row in rows for sample in row):
            assert torch.equal(whole[numbers == number], sample.tokens)
        # the way back, but for the padding
        is_token = made.documents.ids.flatten() >= 0
        places = torch.arange(made.tokens.numel())
        assert torch.equal(shared.expand[shared.collapse][is_token], places[is_token])
        for row in rows:
            # the mean of the tokens that attention sees, and of those that the rest computes
            attended = sum(sample.tokens.numel() for sample in row)
            computed = attended
            for unit in prompt_units(row, 10**9):
                computed -= (len(unit) - 1) * row[unit[0]].shared_tokens
            assert (attended + computed) // 2 <= largest
        targets = []
        for row in rows:
            for sample in row:
                targets.append(sample.targets[sample.targets != IGNORED])
        assert torch.equal(made.targets.flatten()[made.target_indices], torch.cat(targets))
