"""The kernels of flash-linear-attention equal the plain PyTorch forms, on packed rows in bf16.

Their first launch compiles all block sizes that they choose from, which takes a minute or two for
each kind of recurrence.
"""

import pytest
import torch
from torch.nn.functional import softplus

from gpu.comparisons import CUDA, check
from gpu.test_gpu_kernels import IDS, gradients
from litft.model.mixers import kernels
from litft.model.mixers.mixer import CausalConv, causal_conv
from litft.model.mixers.recurrence import recurrence
from litft.model.packed_sequences import PackedSequences

pytest.importorskip("fla", reason="pip install 'litft[kernels]'")


@pytest.mark.parametrize("kind", ["linear attention", "delta rule", "decay of each row"])
def test_recurrences_equal_the_plain_form(kind):
    """Those of flash-linear-attention in bf16."""
    by_row, heads = kind == "decay of each row", 2 if kind == "decay of each row" else 4
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (2, 128, 2, 64),
        (2, 128, 2, 64),
        (2, 128, heads, 64),
        (2, 128, 2, 64) if by_row else (2, 128, heads),
    )
    q, k, v, g, b = (
        torch.randn(shape, generator=generator) for shape in (*shapes, (2, 128, heads))
    )
    tensors = [
        q / 8,
        k / k.norm(dim=-1, keepdim=True),
        v,
        -softplus(g) / 20,
        *([] if kind == "linear attention" else [b.sigmoid()]),
    ]
    documents = PackedSequences.of(IDS).to(lambda tensor: tensor.to(CUDA))

    def compute(q, k, v, g, b=None):
        return recurrence(q, k, v, g, b, documents, None)[0].float()

    wide = [tensor.to(CUDA).requires_grad_() for tensor in tensors]
    half = [
        tensor.to(CUDA, torch.bfloat16 if index < 3 else None).requires_grad_()
        for index, tensor in enumerate(tensors)
    ]
    assert kernels.can_run(half[0]) and not kernels.can_run(wide[0])
    for got, expected in zip(
        gradients(compute, half), gradients(compute, wide), strict=True
    ):
        check(got, expected, 0.02)


@pytest.mark.parametrize("bias", [True, False])
def test_convolutions_equal_the_plain_form(bias):
    """Those of flash-linear-attention or causal-conv1d in bf16."""
    conv = CausalConv(64, 4, bias).to(CUDA)
    for parameter in conv.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 128, 64, generator=torch.Generator().manual_seed(0)).to(CUDA)
    documents = PackedSequences.of(IDS).to(lambda tensor: tensor.to(CUDA))

    def compute(x):
        return causal_conv(x, conv.weight, conv.bias, documents, None).float()

    leaves = [x.to(dtype).requires_grad_() for dtype in (torch.bfloat16, torch.float32)]
    for got, expected in zip(*(gradients(compute, [leaf]) for leaf in leaves), strict=True):
        check(got, expected, 0.02)
