"""The fused kernels against attention written out."""

import itertools

import pytest
import torch

from litft.model.attention import attend
from litft.model.attention_cpu import attend_documents, attend_documents_backward
from litft.model.attention_eager import attention_mask, eager_attention
from litft.model.config import Config, LayerConfig, NormConfig
from litft.model.kv_cache import KVCache
from litft.model.packed_sequences import PackedSequences


def tensors(t: int, s: int, heads: int = 4, kv_heads: int = 2, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, heads, t, 8, generator=generator)
    k, v = torch.randn(2, 2, kv_heads, s, 8, generator=generator)
    return q, k, v


@pytest.mark.parametrize("window, packed", list(itertools.product([None, 1, 5, 64], [False, True])))
def test_fused_is_plain(window, packed):
    q, k, v = tensors(19, 19)
    documents = PackedSequences.of(torch.tensor([[0] * 7 + [1] * 12, [4] * 15 + [2] * 4])) if packed else None
    expected = eager_attention(q, k, v, attention_mask(q, k, documents, window))
    torch.testing.assert_close(attend(q, k, v, documents, window), expected, rtol=1e-5, atol=1e-6)


LENGTHS = [40, 1, 200, 15, 6, 38, 195, 700]  # of documents: like ones, and one that is computed in parts


@pytest.mark.parametrize("dtype, most", [(torch.bfloat16, 1e-2), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    "packed, window, scale, width, shared",
    [(True, None, None, 64, 2), (True, 37, None, 64, 2), (False, None, 0.3, 48, 2), (False, None, None, 64, 1)],
)
def test_gradients_are_those_of_attention_in_fp64(dtype, most, packed, window, scale, width, shared):
    """Of packed documents and of whole rows; a scale that is no power of two; scores of up to 30."""
    torch.manual_seed(0)
    rows, length = (1, sum(LENGTHS)) if packed else (3, 250)
    q, k, v = (torch.randn(rows, heads, length, width).to(dtype) for heads in (6, shared, shared))
    documents = (
        PackedSequences.of(torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None]) if packed else None
    )
    inputs = [(2 * q).requires_grad_(), k.requires_grad_(), v.requires_grad_()]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = eager_attention(*exact, attention_mask(q, k, documents, window), scale=scale)
    found, grad = attend(*inputs, documents, window, scale=scale), torch.randn_like(q)
    pairs = zip(
        (found, *torch.autograd.grad(found, inputs, grad)),
        (expected, *torch.autograd.grad(expected, exact, grad.double())),
        strict=True,
    )
    for a, b in pairs:
        assert float((a.double() - b).norm() / b.norm()) < most


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ends", [[12, 24], [5, 11, 12, 24]])
def test_the_compiler_is_told_what_comes_out(dtype, ends):
    q = torch.randn(2, 12, 4, 8).to(dtype).transpose(1, 2)
    k, v = q[:, :1], q[:, 1:2]
    starts = torch.tensor([0, *ends], dtype=torch.int32)
    torch.library.opcheck(attend_documents, (q, k, v, starts, 0, 0.5), test_utils="test_faketensor")
    out, sums = attend_documents(q, k, v, starts, 0, 0.5)
    given = (torch.randn_like(q), q, k, v, out, sums, starts, 0, 0.5)
    torch.library.opcheck(attend_documents_backward, given, test_utils="test_faketensor")


@pytest.mark.parametrize("window, softcap, sinks", [(None, 5.0, False), (4, None, True)])
def test_soft_cap_and_sinks_see_their_document_alone(window, softcap, sinks):
    inputs = [x.requires_grad_() for x in tensors(29, 29)]
    documents = PackedSequences.of(torch.tensor([[0] * 7 + [1] * 12 + [2] * 10, [4] * 15 + [2] * 8 + [3] * 6]))
    settings = (softcap, torch.randn(4) if sinks else None)
    expected = eager_attention(*inputs, attention_mask(*inputs[:2], documents, window), *settings)
    found, grad = attend(*inputs, documents, window, *settings), torch.randn_like(expected)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad))
    with torch.no_grad():  # on a CPU torch has no gradient of flex_attention
        own = [x.detach() for x in inputs]
        torch.testing.assert_close(attend(*own, documents.with_masks([window]), window, *settings), expected)


def test_strides_and_what_generation_leaves_change_nothing():
    """Numbers that do not lie side by side; documents that were laid out in inference mode."""
    q, v = torch.randn(2, 4, 33, 8), torch.randn(2, 1, 33, 8)
    k = torch.randn(2, 33, 16)[..., ::2][:, None]
    torch.testing.assert_close(attend(q, k, v), eager_attention(q, k, v, attention_mask(q, k, None, None)))
    documents = PackedSequences.of(torch.tensor([[0] * 20 + [1] * 13, [2] * 5 + [3] * 28]))
    with torch.inference_mode():
        expected = attend(q, k, v, documents, softcap=3.0)
    inputs = [x.requires_grad_() for x in (q, v)]
    found = attend(q, k, v, documents, softcap=3.0)
    found.sum().backward()
    assert torch.equal(found, expected) and all(x.grad is not None for x in inputs)


def cache_of(capacity: int, window: int | None = None) -> KVCache:
    """Of one layer with 2 key/value heads of size 8, for 2 rows."""
    return KVCache(Config("x", 9, 99, 32, 9, 4, 2, 8, (LayerConfig(window=window),), NormConfig()), 2, capacity)


def through(cache: KVCache, q, k, v, window=None, positions=None):
    """What the queries see once their keys and values are in the cache."""
    cache.begin(torch.zeros(q.size(0), q.size(2)), positions)
    found = attend(q, k, v, None, window, cache=cache.layers[0])
    cache.end()
    return found


@pytest.mark.parametrize("window", [None, 4, 50])
@pytest.mark.parametrize("new", [1, 3])
def test_with_a_cache_the_queries_are_the_last_tokens(window, new):
    q, k, v = tensors(12, 12)
    cache = cache_of(12, window)
    through(cache, q[:, :, :-new], k[:, :, :-new], v[:, :, :-new], window)
    found = through(cache, q[:, :, -new:], k[:, :, -new:], v[:, :, -new:], window)
    torch.testing.assert_close(found, attend(q, k, v, None, window)[:, :, -new:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 4])
def test_rows_of_a_cache_may_have_come_differently_far(window):
    """The second row lags 5 tokens behind, and has made a wrong guess of 2 tokens, which it writes over."""
    q, k, v = tensors(12, 12)
    expected, cache = attend(q, k, v, None, window), cache_of(14, window)
    for row, length, wrong in ((0, 9, 0), (1, 4, 2)):
        own = slice(row, row + 1)
        wrongly = torch.full((1, 2, wrong, 8), 9.0)
        keys, values = (torch.cat((x[own, :, :length], wrongly), 2) for x in (k, v))
        through(cache.rows(row, row + 1), torch.cat((q[own, :, :length], q[own, :, :wrong]), 2), keys, values, window)
    for step in range(3):
        at = torch.tensor([[9 + step], [4 + step]])
        now = [torch.stack([x[row, :, at[row, 0]] for row in range(2)])[:, :, None] for x in (q, k, v)]
        found = through(cache, *now, window, at)
        for row in range(2):
            torch.testing.assert_close(found[row, :, 0], expected[row, :, at[row, 0]], rtol=1e-5, atol=1e-6)


def test_soft_cap_and_sinks_have_their_closed_form():
    """With one key the softmax is 1 without a sink, and 1 / (1 + exp(sink - score)) with one."""
    q, k, v = tensors(1, 1, heads=2, kv_heads=2)
    score = (q * k).sum(-1) * 8**-0.5
    torch.testing.assert_close(attend(q, k, v, softcap=0.5), v)
    sinks = torch.tensor([0.3, -1.2])
    capped = 0.5 * torch.tanh(score / 0.5)
    weight = 1 / (1 + torch.exp(sinks[None, :, None] - capped))
    torch.testing.assert_close(attend(q, k, v, softcap=0.5, sinks=sinks), weight[..., None] * v)


def test_a_full_cache_says_so():
    q, k, v = tensors(5, 5)
    with pytest.raises(ValueError, match="capacity of 4 tokens, but 5 are needed"):
        through(cache_of(4), q, k, v)
