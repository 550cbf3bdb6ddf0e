"""Fused attention kernels against eager attention."""

import itertools
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from graphs import counted_graphs
from parity import ROWS
from transformers import DeepseekV3Config, LlamaConfig

from litft.families import read_config
from litft.model.attention import (
    MAX_BUFFER_ENTRIES,
    _scaled_dot_product,
    attend,
    check_packed_backward,
)
from litft.model.attention_cpu import attend_documents, attend_documents_backward
from litft.model.attention_eager import eager_attention
from litft.model.attention_mask import attention_mask
from litft.model.config import Config, LayerConfig, NormConfig
from litft.model.device_type import planned_for
from litft.model.kv_cache import KVCache
from litft.model.packed_sequences import PackedSequences
from litft.model.transformer import GPT


def random_qkv(t: int, s: int, heads: int = 4, kv_heads: int = 2, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, heads, t, 8, generator=generator)
    k, v = torch.randn(2, 2, kv_heads, s, 8, generator=generator)
    return q, k, v


@pytest.mark.parametrize(
    "window, packed", list(itertools.product([None, 1, 5, 64], [False, True]))
)
def test_fused_equals_eager_attention(window, packed):
    q, k, v = random_qkv(19, 19)
    documents = (
        PackedSequences.of(torch.tensor([[0] * 7 + [1] * 12, [4] * 15 + [2] * 4]))
        if packed
        else None
    )
    expected = eager_attention(q, k, v, attention_mask(q, k, documents, window))
    torch.testing.assert_close(
        attend(q, k, v, documents, window), expected, rtol=1e-5, atol=1e-6
    )


# of documents: several similar ones, and one that is computed in blocks
LENGTHS = [40, 1, 200, 15, 6, 38, 195, 700]


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float32, 1e-5)]
)
@pytest.mark.parametrize(
    "packed, window, scale, head_dim, kv_heads",
    [
        (True, None, None, 64, 2),
        (True, 37, None, 64, 2),
        (False, None, 0.3, 48, 2),
        (False, None, None, 64, 1),
    ],
)
def test_gradients_equal_those_of_fp64_attention(
    dtype, tolerance, packed, window, scale, head_dim, kv_heads
):
    """For packed documents and unpacked rows, with a scale that is not a power of two and scores of
    up to 30."""
    torch.manual_seed(0)
    rows, length = (1, sum(LENGTHS)) if packed else (3, 250)
    q, k, v = (
        torch.randn(rows, heads, length, head_dim).to(dtype)
        for heads in (6, kv_heads, kv_heads)
    )
    documents = (
        PackedSequences.of(
            torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None]
        )
        if packed
        else None
    )
    inputs = [(2 * q).requires_grad_(), k.requires_grad_(), v.requires_grad_()]
    fp64_inputs = [x.detach().double().requires_grad_() for x in inputs]
    expected = eager_attention(
        *fp64_inputs, attention_mask(q, k, documents, window), scale=scale
    )
    output, grad = attend(*inputs, documents, window, scale=scale), torch.randn_like(q)
    pairs = zip(
        (output, *torch.autograd.grad(output, inputs, grad)),
        (expected, *torch.autograd.grad(expected, fp64_inputs, grad.double())),
        strict=True,
    )
    for actual, reference in pairs:
        assert float((actual.double() - reference).norm() / reference.norm()) < tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ends", [[12, 24], [5, 11, 12, 24]])
def test_fake_implementations_match_the_real_ones(dtype, ends):
    q = torch.randn(2, 12, 4, 8).to(dtype).transpose(1, 2)
    k, v = q[:, :1], q[:, 1:2]
    starts = torch.tensor([0, *ends], dtype=torch.int32)
    torch.library.opcheck(
        attend_documents, (q, k, v, starts, 0, 0.5), test_utils="test_faketensor"
    )
    out, sums = attend_documents(q, k, v, starts, 0, 0.5)
    arguments = (torch.randn_like(q), q, k, v, out, sums, starts, 0, 0.5)
    torch.library.opcheck(
        attend_documents_backward, arguments, test_utils="test_faketensor"
    )


@pytest.mark.parametrize("window, softcap, sinks", [(None, 5.0, False), (4, None, True)])
def test_softcap_and_sinks_are_isolated_per_document(window, softcap, sinks):
    inputs = [x.requires_grad_() for x in random_qkv(29, 29)]
    documents = PackedSequences.of(
        torch.tensor([[0] * 7 + [1] * 12 + [2] * 10, [4] * 15 + [2] * 8 + [3] * 6])
    )
    settings = (softcap, torch.randn(4) if sinks else None)
    expected = eager_attention(
        *inputs, attention_mask(*inputs[:2], documents, window), *settings
    )
    output, grad = attend(*inputs, documents, window, *settings), torch.randn_like(expected)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(
        torch.autograd.grad(output, inputs, grad),
        torch.autograd.grad(expected, inputs, grad),
    )
    with torch.no_grad():  # flex_attention has no backward pass on CPUs
        detached = [x.detach() for x in inputs]
        torch.testing.assert_close(
            attend(*detached, documents.with_masks([window]), window, *settings), expected
        )


def test_strides_and_inference_mode_do_not_change_the_result():
    """Non-contiguous inputs; packed sequences that were first used in inference mode."""
    q, v = torch.randn(2, 4, 33, 8), torch.randn(2, 1, 33, 8)
    k = torch.randn(2, 33, 16)[..., ::2][:, None]
    torch.testing.assert_close(
        attend(q, k, v), eager_attention(q, k, v, attention_mask(q, k, None, None))
    )
    documents = PackedSequences.of(torch.tensor([[0] * 20 + [1] * 13, [2] * 5 + [3] * 28]))
    with torch.inference_mode():
        expected = attend(q, k, v, documents, softcap=3.0)
    inputs = [x.requires_grad_() for x in (q, v)]
    output = attend(q, k, v, documents, softcap=3.0)
    output.sum().backward()
    assert torch.equal(output, expected) and all(x.grad is not None for x in inputs)


def make_cache(capacity: int, window: int | None = None) -> KVCache:
    """Return a KV cache of one layer with 2 key/value heads of dim 8, for 2 rows."""
    return KVCache(
        Config("x", 9, 99, 32, 9, 4, 2, 8, (LayerConfig(window=window),), NormConfig()),
        2,
        capacity,
    )


def attend_cached(cache: KVCache, q, k, v, window=None, positions=None):
    """Add keys and values to the cache, and return the attention output."""
    cache.begin(torch.zeros(q.size(0), q.size(2)), positions)
    output = attend(q, k, v, None, window, cache=cache.layers[0])
    cache.end()
    return output


@pytest.mark.parametrize("window", [None, 4, 50])
@pytest.mark.parametrize("new", [1, 3])
def test_with_a_cache_the_queries_are_the_last_tokens(window, new):
    q, k, v = random_qkv(12, 12)
    cache = make_cache(12, window)
    attend_cached(cache, q[:, :, :-new], k[:, :, :-new], v[:, :, :-new], window)
    output = attend_cached(cache, q[:, :, -new:], k[:, :, -new:], v[:, :, -new:], window)
    torch.testing.assert_close(
        output, attend(q, k, v, None, window)[:, :, -new:], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("window", [None, 4])
def test_rows_of_a_cache_may_have_different_lengths(window):
    """The second row is 5 tokens behind, and overwrites 2 rejected draft tokens."""
    q, k, v = random_qkv(12, 12)
    expected, cache = attend(q, k, v, None, window), make_cache(14, window)
    for row, length, rejected in ((0, 9, 0), (1, 4, 2)):
        rows = slice(row, row + 1)
        rejected_kv = torch.full((1, 2, rejected, 8), 9.0)
        keys, values = (torch.cat((x[rows, :, :length], rejected_kv), 2) for x in (k, v))
        attend_cached(
            cache.rows(row, row + 1),
            torch.cat((q[rows, :, :length], q[rows, :, :rejected]), 2),
            keys,
            values,
            window,
        )
    for step in range(3):
        positions = torch.tensor([[9 + step], [4 + step]])
        step_qkv = [
            torch.stack([x[row, :, positions[row, 0]] for row in range(2)])[:, :, None]
            for x in (q, k, v)
        ]
        output = attend_cached(cache, *step_qkv, window, positions)
        for row in range(2):
            torch.testing.assert_close(
                output[row, :, 0], expected[row, :, positions[row, 0]], rtol=1e-5, atol=1e-6
            )


def test_softcap_and_sinks_match_the_closed_form():
    """With one key the softmax is 1 without a sink, and 1 / (1 + exp(sink - score)) with one."""
    q, k, v = random_qkv(1, 1, heads=2, kv_heads=2)
    score = (q * k).sum(-1) * 8**-0.5
    torch.testing.assert_close(attend(q, k, v, softcap=0.5), v)
    sinks = torch.tensor([0.3, -1.2])
    capped = 0.5 * torch.tanh(score / 0.5)
    weight = 1 / (1 + torch.exp(sinks[None, :, None] - capped))
    torch.testing.assert_close(
        attend(q, k, v, softcap=0.5, sinks=sinks), weight[..., None] * v
    )


def test_a_full_cache_raises():
    q, k, v = random_qkv(5, 5)
    with pytest.raises(ValueError, match="capacity of 4 tokens, but 5 are needed"):
        attend_cached(make_cache(4), q, k, v)


def test_causal_attention_with_dynamic_shapes_is_one_graph():
    """A symbolic `is_causal` or `enable_gqa` would make Dynamo leave the function alone."""
    q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16)
    with counted_graphs() as counts:
        attention = torch.compile(
            lambda q, k, v: _scaled_dot_product(
                q, k, v, None, 0.25, causal=q.size(2) == k.size(2)
            ),
            dynamic=True,
        )
        attention(q, k, k)
        assert counts.reset() == (1, 1) and not counts.breaks


@pytest.mark.parametrize("documents, is_refused", [(3, False), (4, True)])
def test_too_many_documents_for_the_kernels_gradient_are_refused(
    monkeypatch, documents, is_refused
):
    """Beyond 2^31 entries, the kernel would write outside of its buffer."""
    monkeypatch.setattr("litft.model.attention.MAX_BUFFER_ENTRIES", (16 + 128 * 4) * 4 * 32)
    sizes = dict(num_attention_heads=4, head_dim=20, num_hidden_layers=1)
    config = read_config(LlamaConfig(**sizes, hidden_size=80).to_dict())
    with torch.device("meta"):
        model = GPT(config).bfloat16()
    packed = PackedSequences.of(torch.arange(16)[None] * documents // 16)
    on_gpu = packed.to(lambda tensor: tensor.to("meta"))
    refused = pytest.raises(
        ValueError, match=f"16 tokens in {documents} documents is too large"
    )
    with planned_for("cuda"), refused if is_refused else nullcontext():
        model(torch.zeros(1, 16, dtype=torch.int64, device="meta"), documents=on_gpu)


def test_the_kernels_buffer_has_the_expanded_heads_of_latent_attention():
    """They are larger than the rotated part, which the config names as the size of a head."""
    values = next(iter(ROWS["deepseek_v3"][1].values()))
    config = read_config(DeepseekV3Config(**values).to_dict())
    latent = config.layers[0].latent
    layers = (replace(config.layers[0], latent=replace(latent, value_dim=40)),)
    config = replace(config, layers=layers)
    width = config.n_heads * 64  # of 40, in steps of 32
    documents = MAX_BUFFER_ENTRIES // (128 * width)
    with pytest.raises(ValueError, match="too large for the gradient of attention"):
        check_packed_backward(config, 128, documents)
    check_packed_backward(config, 0, documents - 1)


def test_the_kernel_is_told_the_longest_document(monkeypatch):
    """It starts thread blocks for that many tokens of each document, not for those of a row."""
    told = []

    def kernel(q, k, v, *, max_queries, max_keys, **settings):
        told.append((max_queries, max_keys))
        return torch.empty_like(q)

    monkeypatch.setattr("litft.model.attention._flash_attention", kernel)
    ids = torch.tensor([[0] * 5 + [1] * 7 + [2] * 4, [3] * 10 + [4] * 3 + [5] * 3])
    on_gpu = PackedSequences.of(ids).to(lambda tensor: tensor.to("meta"))
    q = torch.empty(2, 4, 16, 8, device="meta", dtype=torch.bfloat16)
    k = torch.empty(2, 2, 16, 8, device="meta", dtype=torch.bfloat16)
    assert attend(q, k, k, on_gpu, None, scale=1.0).shape == q.shape
    # the host does not know the lengths of ids that are on a GPU
    attend(q, k, k, on_gpu._replace(longest=None), 4, scale=1.0)
    # a single token is no constant of compiled code
    single = PackedSequences.of(torch.arange(16)[None])
    assert told == [(10, 10), (16, 16)] and single.longest == 2
