"""A frozen network made quicker to decode with: Linears that read the same input as one product, and packed weights."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from litft.methods.mixins import TrainedWeight, mixed
from litft.model.linear import Linear
from litft.model.mlp import GatedMLP
from litft.model.transformer import GPT, Attention

READERS = {Attention: ("q_proj", "k_proj", "v_proj"), GatedMLP: ("gate_proj", "up_proj")}


class FusedLinears(nn.Module):
    """A module whose `projections` are made at once by the Linear `joined`, in the place of its own."""

    def projections(self, x: Tensor) -> tuple[Tensor, ...]:
        """As the module's own."""
        return self.fused(x).split_with_sizes(self.widths, -1)


@torch.no_grad()
def fuse_linears(model: GPT, pack: bool = False) -> None:
    """Have plain Linears read together where they can: large pieces of memory are read faster.

    pack: lay weights out for oneDNN, on a CPU. Compiled code cannot read those.
    """
    for module in list(model.modules()):
        names = next((names for kind, names in READERS.items() if type(module) is kind), ())
        linears = [getattr(module, name) for name in names]
        if linears and all(type(linear) is Linear for linear in linears):
            module.fused, module.widths = _one(linears), [linear.out_features for linear in linears]
            module.__class__ = mixed(FusedLinears, type(module))
            for name in names:
                delattr(module, name)
    if pack:
        pack_weights([model])


@torch.no_grad()
def pack_weights(models: Sequence[GPT]) -> None:
    """Lay weights out for oneDNN; what networks share is packed once, and the plain one goes where none reads it."""
    packed: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by the plain one's id, with it: ids of the living differ
    for model in models:
        for module in model.modules():
            if isinstance(module, Linear) and not _read_besides(module, model):
                before = module.weight
                if id(before) in packed:
                    module.weight = packed[id(before)][1]
                else:
                    module.pack()
                packed[id(before)] = before, module.weight


def _read_besides(linear: Linear, model: GPT) -> bool:
    """Whether something else reads a Linear's weight: DoRA, the rounding of what is trained, the embedding."""
    by_method = isinstance(linear, TrainedWeight) or getattr(linear, "reads_weight", False)
    return by_method or (linear is model.lm_head and model.config.tied)


def _one(linears: Sequence[Linear]) -> Linear:
    """A Linear of all their rows."""
    has_bias = linears[0].bias is not None
    one = Linear(linears[0].in_features, sum(linear.out_features for linear in linears), bias=has_bias, device="meta")
    for leaf in ("weight", "bias") if has_bias else ("weight",):
        whole = torch.cat([getattr(linear, leaf) for linear in linears])
        setattr(one, leaf, nn.Parameter(whole, requires_grad=False))
    return one
