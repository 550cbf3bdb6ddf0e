"""Faster decoding with a frozen model: fuse Linears that share an input into one matmul, and pack
weights for oneDNN."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from litft.methods.mixins import TrainedWeight, subclass_with
from litft.model.blocks import Attention
from litft.model.linear import Linear
from litft.model.mlp import GatedMLP
from litft.model.transformer import GPT

SHARED_INPUTS = {
    Attention: ("q_proj", "k_proj", "v_proj"),
    GatedMLP: ("gate_proj", "up_proj"),
}


class FusedLinears(nn.Module):
    """Mixin that computes a module's `projections` with one Linear, `fused`."""

    fused: Linear
    # the number of outputs of each original Linear
    widths: list[int]

    def projections(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of the original Linears, which are slices of the fused output.

        x: (..., number of inputs). Each result: (..., width of its Linear).
        """
        return self.fused(x).split_with_sizes(self.widths, -1)


@torch.no_grad()
def fuse_linears(model: GPT, pack: bool = False) -> None:
    """Fuse plain Linears that share an input: one large matmul uses memory bandwidth better than
    several small ones.

    pack: also pack weights for oneDNN, on a CPU. Compiled code cannot read packed weights.
    """
    for module in list(model.modules()):
        # the exact class: one that a method has mixed in may use the single Linears
        names = SHARED_INPUTS.get(type(module), ())
        linears = [getattr(module, name) for name in names]
        if linears and all(type(linear) is Linear for linear in linears):
            module.__class__ = subclass_with(FusedLinears, type(module))
            assert isinstance(module, FusedLinears)
            module.fused = _concatenate(linears)
            module.widths = [linear.out_features for linear in linears]
            for name in names:
                delattr(module, name)
    if pack:
        pack_weights([model])


@torch.no_grad()
def pack_weights(models: Sequence[GPT]) -> None:
    """Pack weights for oneDNN.

    A weight that models share is packed once; the plain copy is freed if nothing reads it.
    """
    # id of a plain weight -> (plain, packed); keeping the plain one alive keeps its id unique
    packed: dict[int, tuple[Tensor, Tensor]] = {}
    for model in models:
        for module in model.modules():
            if isinstance(module, Linear) and not _has_other_readers(module, model):
                plain = module.weight
                if id(plain) in packed:
                    module.weight = packed[id(plain)][1]
                else:
                    module.pack()
                packed[id(plain)] = plain, module.weight


def _has_other_readers(linear: Linear, model: GPT) -> bool:
    """Return whether other code reads a Linear's weight: DoRA, the rounding of trained weights, a
    tied embedding."""
    by_method = isinstance(linear, TrainedWeight) or getattr(linear, "reads_weight", False)
    return by_method or (linear is model.lm_head and model.config.tied)


def _concatenate(linears: Sequence[Linear]) -> Linear:
    """Concatenate Linears along the output dimension."""
    has_bias = linears[0].bias is not None
    if has_bias:
        names = ("weight", "bias")
    else:
        names = ("weight",)
    num_outputs = sum(linear.out_features for linear in linears)
    # on meta, since its parameters are replaced at once
    fused = Linear(linears[0].in_features, num_outputs, bias=has_bias, device="meta")
    for name in names:
        tensor = torch.cat([getattr(linear, name) for linear in linears])
        setattr(fused, name, nn.Parameter(tensor, requires_grad=False))
    return fused
