"""Linears that read the same input, as one product: decoding reads weights faster in few large pieces."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from litft.linear import Linear
from litft.mlp import GatedMLP
from litft.model import GPT, Attention
from litft.peft.parts import mixed

READERS = {Attention: ("q_proj", "k_proj", "v_proj"), GatedMLP: ("gate_proj", "up_proj")}


class Joined(nn.Module):
    """A module whose `projections` are made at once, by a Linear without parameters of its own: theirs are parts of it."""

    def projections(self, x: Tensor) -> tuple[Tensor, ...]:
        """As the module's own."""
        return self.joined[0].forward(x).split_with_sizes(self.widths, -1)


@torch.no_grad()
def join(model: GPT) -> None:
    """Have a frozen network's plain Linears read together where they can; parameters keep their names and values."""
    for module in list(model.modules()):
        names = next((names for kind, names in READERS.items() if type(module) is kind), ())
        linears = [getattr(module, name) for name in names]
        if linears and all(type(linear) is Linear for linear in linears):
            module.joined, module.widths = [_one(linears)], [linear.out_features for linear in linears]
            module.__class__ = mixed(Joined, type(module))


def _one(linears: Sequence[Linear]) -> Linear:
    """A Linear of all their rows, in which their parameters lie from now on."""
    has_bias, rows = linears[0].bias is not None, [linear.out_features for linear in linears]
    one = Linear(linears[0].in_features, sum(rows), bias=has_bias, device="meta")
    for leaf in ("weight", "bias") if has_bias else ("weight",):
        parts = [getattr(linear, leaf) for linear in linears]
        whole = torch.cat(parts)
        setattr(one, leaf, nn.Parameter(whole, requires_grad=False))
        for part, own in zip(parts, whole.split(rows), strict=True):
            part.data = own
    return one
