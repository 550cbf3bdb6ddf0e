"""Every variation of every family on a GPU beside the CPU in fp32: loss, gradients, and logits with
a KV cache."""

import copy

import pytest
import torch
from parity import ROWS, TINY, draw, redraw

from gpu.comparisons import (
    CUDA,
    PRETENDED,
    check,
    error,
    published_config,
    skip_host_counts,
)
from litft.data.packing import BatchLayout
from litft.data.sample import Sample
from litft.families import read_config
from litft.model.kv_cache import KVCache
from litft.model.transformer import GPT

CASES = [
    pytest.param(
        family,
        variation,
        marks=[pytest.mark.quick] if number == 0 else [],
        id=f"{family}: {variation}",
    )
    for family, (_, variations) in ROWS.items()
    for number, variation in enumerate(variations)
]

# the largest norm of a gradient that is zero, as a part of the largest gradient's
ZERO = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def network(family, variation):
    """Return a network in fp32 on the CPU, with random values in every tensor."""
    config_class, variations = ROWS[family]
    hf = published_config(config_class, **{**TINY, **variations[variation]})
    model = GPT(read_config(hf))
    redraw(model)
    return model.train()


def batch(packed):
    """Return five samples in two rows, packed, or in five rows with padding."""
    tokens = [draw(length, seed=length) for length in (20, 9, 14, 5, 31)]
    layout = BatchLayout(2 if packed else 5, 40 if packed else None)
    (batch,) = layout.batches([Sample(each[:-1], each[1:]) for each in tokens])
    return batch


def loss_and_gradients(model, micro_batch):
    """Return the summed loss, and the gradients by name; constants, such as Gemma 4's scales of
    layers, have none."""
    loss, _ = model(micro_batch.tokens, **micro_batch.inputs())
    loss.backward()
    return loss, {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def bf16_limits(model, rounded, gradients):
    """Return the largest relative error of each gradient that can be compared, given those of the
    CPU in bf16 and in fp32."""
    # rounding may choose other experts, which changes everything behind them
    if any(layer.experts for layer in model.config.layers):
        return {}
    limits = {}
    for name, expected in gradients.items():
        own_error = error(rounded[name], expected)
        # Gemma 4 with random weights amplifies rounding until nothing is left to compare
        if own_error < 0.2:
            limits[name] = 2 * own_error + 0.02
    return limits


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("family, variation", CASES)
def test_loss_and_gradients_equal_the_cpus(family, variation, packed):
    """In fp32 to 3e-4, since the CPU's own gradients are up to 6e-5 away from fp64's; in bf16 no
    further from fp32 than twice the CPU's bf16 is, where that is close at all."""
    model, micro_batch = network(family, variation), batch(packed)
    skip_host_counts(any(layer.experts for layer in model.config.layers))
    loss, gradients = loss_and_gradients(copy.deepcopy(model), micro_batch)
    largest = max(gradient.norm() for gradient in gradients.values())
    for dtype in (torch.float32, torch.bfloat16):
        actual, on_gpu = loss_and_gradients(
            copy.deepcopy(model).to(CUDA, dtype), micro_batch.to(CUDA)
        )
        if dtype == torch.float32:
            limits = dict.fromkeys(gradients, 3e-4)
        else:
            _, rounded = loss_and_gradients(copy.deepcopy(model).to(dtype), micro_batch)
            limits = bf16_limits(model, rounded, gradients)
        check(actual, loss, 1e-5 if dtype == torch.float32 else 2e-2, "loss")
        for name in limits:
            expected = gradients[name]
            # softmax ignores a bias of the keys, so its gradient is zero up to rounding
            if expected.norm() < 1e-6 * largest:
                assert PRETENDED or on_gpu[name].norm().cpu() < ZERO[dtype] * largest, name
                continue
            check(on_gpu[name], expected, limits[name], f"{dtype}, {name}")


@pytest.mark.parametrize("family, variation", CASES)
@torch.no_grad()
def test_cached_logits_equal_the_cpus(family, variation):
    """A prompt in two chunks, then single tokens; two rows, of which the second is three tokens
    behind at the end, unless it has a state that cannot go back."""
    model = network(family, variation).eval()
    skip_host_counts(any(layer.experts for layer in model.config.layers))
    tokens = draw(2, 40, seed=3)
    expected = model(tokens)
    on_gpu = copy.deepcopy(model).to(CUDA)
    cache = KVCache(model.config, 2, 40, CUDA)
    pieces = [tokens[:, :20], tokens[:, 20:33], *tokens[:, 33:37].split(1, 1)]
    logits = torch.cat([on_gpu(piece.to(CUDA), cache=cache) for piece in pieces], 1)
    check(logits, expected[:, :37], 1e-4)
    second = 37 if KVCache.state_bytes(model.config) else 34
    positions = torch.tensor([[37], [second]])
    last = on_gpu(
        tokens.gather(1, positions).to(CUDA), positions=positions.to(CUDA), cache=cache
    )
    check(last, torch.stack([expected[0, 37:38], expected[1, second : second + 1]]), 1e-4)
