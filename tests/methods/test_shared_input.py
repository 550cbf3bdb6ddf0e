"""Linears with one input compute the first product of their LoRA updates together."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from litft.methods.lora_modules import LoRALinear
from litft.model.linear import Linear, apply_linears

# T tokens, C channels


class CountProducts(TorchDispatchMode):
    """Counts products of two matrices without a bias."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def adapted(out_dim, r, dora=False, dropout=0.0, init="default"):
    """Return a Linear of 24 inputs with a LoRA update that is not zero."""
    linear = LoRALinear.convert_module(
        Linear(24, out_dim, bias=False).requires_grad_(False)
    )
    linear.add_factors(r, 0.5, dropout, dora, init)
    with torch.no_grad():
        linear.reset_parameters()
        linear.lora_b.normal_(std=0.3)
    return linear


def outputs_and_gradients(outputs, x, linears):
    """Return the outputs, and the gradients of x and of the factors."""
    trained = []
    for linear in linears:
        trained += [
            parameter for parameter in linear.parameters() if parameter.requires_grad
        ]
    total = sum((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() for y in outputs)
    return [*outputs, *torch.autograd.grad(total, [x, *trained])]


@pytest.mark.parametrize(
    "kinds, products",
    [
        # each Linear has one product of its own, and its update another one
        ([dict(r=4), dict(r=2), dict(r=8)], 3 + 1),
        ([dict(r=4, dora=True), dict(r=2)], 2 + 1),
        # its large products cancel, and keep their own rounding
        ([dict(r=4), dict(r=2, init="pissa")], 2 + 2),
        # dropout draws other zeros for each Linear
        ([dict(r=4), dict(r=2, dropout=0.5), dict(r=3)], 3 + 2),
        ([dict(r=4), None], 2 + 1),
    ],
)
def test_updates_of_one_input_share_a_product(kinds, products):
    torch.manual_seed(0)
    linears = []
    for number, kind in enumerate(kinds):
        out_dim = 16 + 4 * number
        if kind is None:
            linears.append(Linear(24, out_dim, bias=False).requires_grad_(False))
        else:
            linears.append(adapted(out_dim, **kind))
    x = torch.randn(2, 5, 24, requires_grad=True)  # (B, T, C)

    torch.manual_seed(1)
    with CountProducts() as counted:
        shared = apply_linears(x, *linears)
    torch.manual_seed(1)
    alone = [linear(x) for linear in linears]
    # DoRA's norms of rows are products, too
    assert counted.count == products + 3 * any(kind and kind.get("dora") for kind in kinds)
    pairs = zip(
        outputs_and_gradients(shared, x, linears),
        outputs_and_gradients(alone, x, linears),
        strict=True,
    )
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
