"""The kernels of a GPU beside their plain forms: attention, experts, the loss, quantized
weights."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from transformers import MistralConfig

from gpu.comparisons import CUDA, check, skip_host_counts
from litft.families import read_config
from litft.model import attention, loss
from litft.model.attention import attend
from litft.model.attention_eager import eager_attention
from litft.model.attention_mask import attention_mask, causal_mask
from litft.model.kv_cache import KVCache
from litft.model.mlp import grouped_product
from litft.model.packed_sequences import PackedSequences
from litft.model.quantization import KINDS, QuantizedTensor

pytestmark = pytest.mark.quick
# two rows of 128 tokens
IDS = torch.tensor([[0] * 60 + [1] * 5 + [2] * 63, [0] * 100 + [-1] * 28])


def inputs(heads, kv_heads, head_dim, dtype):
    """Return queries, keys and values on the GPU, (2, heads, 128, head_dim)."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, count, 128, head_dim) for count in (heads, kv_heads, kv_heads)]
    return [
        torch.randn(shape, generator=generator).to(CUDA, dtype).requires_grad_()
        for shape in shapes
    ]


def gradients(function, tensors):
    """Return the output of `function` and the gradients of a weighted sum of it."""
    output = function(*tensors)
    weights = torch.linspace(
        -1, 1, output.numel(), device=CUDA, dtype=output.dtype
    ).view_as(output)
    return [output, *torch.autograd.grad((output * weights).sum(), tensors)]


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim", [(8, 2, 64), (4, 4, 128), (6, 3, 20), (4, 1, 256)]
)
@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 0.02), (torch.float32, 1e-5)])
@pytest.mark.parametrize("packed", [True, False])
def test_attention_equals_the_eager_form(
    packed, dtype, limit, heads, kv_heads, head_dim, window
):
    """varlen in bf16, for head sizes that are no multiple of 8 too; SDPA in fp32."""
    documents = PackedSequences.of(IDS.to(CUDA)) if packed else None
    tensors = inputs(heads, kv_heads, head_dim, dtype)
    actual = gradients(lambda q, k, v: attend(q, k, v, documents, window), tensors)
    wide = [tensor.detach().float().requires_grad_() for tensor in tensors]
    mask = attention_mask(wide[0], wide[1], documents, window)
    for got, expected in zip(
        actual, gradients(lambda q, k, v: eager_attention(q, k, v, mask), wide), strict=True
    ):
        check(got, expected, limit)


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(8, 2, 64), (4, 4, 128), (6, 3, 24)])
@pytest.mark.parametrize("count", [1, 20])
def test_cached_attention_equals_the_eager_form(count, heads, kv_heads, head_dim, window):
    """The queries are the last tokens of a long and of a short text in one cache."""
    sizes = dict(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)
    mistral = MistralConfig(**sizes, sliding_window=window, num_hidden_layers=1)
    cache = KVCache(read_config(mistral.to_dict()), 2, 4096, CUDA, torch.bfloat16)
    assert cache.unmasked == {window}
    generator = torch.Generator().manual_seed(0)
    (layer,) = cache.layers
    shapes = [(2, count_of, count, head_dim) for count_of in (heads, kv_heads, kv_heads)]
    q, k, v = (
        torch.randn(shape, generator=generator).to(CUDA, torch.bfloat16) for shape in shapes
    )
    for stored in (layer.keys, layer.values):
        stored.copy_(torch.randn(stored.shape, generator=generator))

    positions = torch.tensor([[3000], [37]], device=CUDA) + torch.arange(count, device=CUDA)
    cache.begin(positions, positions)
    actual = attend(q, k, v, window=window, cache=layer)
    mask = causal_mask(positions, torch.arange(4096, device=CUDA), window)
    expected = eager_attention(q.float(), layer.keys.float(), layer.values.float(), mask)
    check(actual, expected, 0.01)


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("softcap, with_sinks", [(20.0, False), (None, True)])
def test_flex_attention_equals_the_eager_form(monkeypatch, softcap, with_sinks, window):
    """Softcaps and sinks in compiled blocks: only there does FlexAttention run as one kernel."""
    monkeypatch.setattr(attention, "flex_attention", torch.compile(flex_attention))
    documents = PackedSequences.of(IDS.to(CUDA)).with_masks({window})
    sinks = (
        torch.randn(8, generator=torch.Generator().manual_seed(1)).to(CUDA)
        if with_sinks
        else None
    )
    tensors = inputs(8, 2, 64, torch.bfloat16)
    actual = gradients(
        lambda q, k, v: attend(q, k, v, documents, window, softcap, sinks), tensors
    )
    wide = [tensor.detach().float().requires_grad_() for tensor in tensors]
    mask = attention_mask(wide[0], wide[1], documents, window)
    expected = gradients(
        lambda q, k, v: eager_attention(q, k, v, mask, softcap, sinks), wide
    )
    for got, want in zip(actual, expected, strict=True):
        check(got, want, 0.02)


@pytest.mark.parametrize("in_dim, out_dim", [(64, 48), (20, 30)])
@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 0.01), (torch.float32, 1e-5)])
def test_grouped_products_equal_a_loop(dtype, limit, in_dim, out_dim):
    """One expert has no rows; widths that the kernel does not take are padded."""
    skip_host_counts(dtype == torch.float32)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, in_dim, generator=generator).to(CUDA, dtype).requires_grad_()
    weight = (
        torch.randn(5, in_dim, out_dim, generator=generator)
        .to(CUDA, dtype)
        .requires_grad_()
    )
    counts = [8, 0, 17, 5, 10]
    ends = torch.tensor(counts).cumsum(0).to(CUDA, torch.int32)
    actual = gradients(lambda x, weight: grouped_product(x, weight, ends), [x, weight])
    wide = [x.detach().float().requires_grad_(), weight.detach().float().requires_grad_()]

    def loop(x, weight):
        return torch.cat(
            [rows @ matrix for rows, matrix in zip(x.split(counts), weight, strict=True)]
        )

    for got, expected in zip(actual, gradients(loop, wide), strict=True):
        check(got, expected, limit)


@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_equals_the_unchunked_form(monkeypatch, softcap, compiled):
    monkeypatch.setattr(loss, "LOGIT_ROWS", 64)
    generator = torch.Generator().manual_seed(0)
    hidden = (
        torch.randn(1, 150, 32, generator=generator)
        .to(CUDA, torch.bfloat16)
        .requires_grad_()
    )
    head = (
        torch.nn.Linear(32, 4000, bias=False).to(CUDA, torch.bfloat16).requires_grad_(False)
    )
    targets = torch.randint(4000, (1, 150), generator=generator).to(CUDA)
    total, _ = loss.summed_cross_entropy(hidden, head, targets, softcap, compiled=compiled)
    total.backward()
    wide = hidden.detach().float().requires_grad_()
    logits = loss.apply_softcap(
        torch.nn.functional.linear(wide, head.weight.float()), softcap
    )[0]
    expected = torch.nn.functional.cross_entropy(logits, targets[0], reduction="sum")
    expected.backward()
    check(total, expected, 1e-3)
    check(hidden.grad, wide.grad, 0.02)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(64, 128), (48, 80)])
def test_quantized_weights_equal_the_cpus(kind, shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    on_cpu = QuantizedTensor.quantize(weight, kind).dequantize(torch.float32)
    on_gpu = QuantizedTensor.quantize(weight.to(CUDA), kind).dequantize(torch.float32)
    check(on_gpu, on_cpu, 1e-2)
