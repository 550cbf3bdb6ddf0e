"""Activation checkpointing: blocks, their MLPs, or norms and gates run again in the backward pass
instead of saving their activations."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from litft.methods.mixins import subclass_with
from litft.model.recomputation import saving_recomputations
from litft.model.transformer import GPT

# in decreasing order of speed and of memory
RECOMPUTED = ("none", "elementwise", "selective", "full")


class Recomputed(nn.Module):
    """A module that saves only its inputs, and runs again in the backward pass (arXiv
    1604.06174)."""

    # whether it draws random numbers, which recomputation must repeat
    uses_rng = False

    def forward(self, *inputs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(*inputs)
        return checkpoint(
            super().forward, *inputs, use_reentrant=False, preserve_rng_state=self.uses_rng
        )


class RecomputedElementwise(nn.Module):
    """A block that does not save the outputs of its norms and gates, and rounded weights."""

    def forward(self, *inputs: Any) -> Tensor:
        # a compiled block decides itself what it saves: see `compile_blocks`
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return super().forward(*inputs)
        with saving_recomputations():
            return super().forward(*inputs)


def recompute(model: GPT, kind: str) -> None:
    """Recompute every block (full), every MLP (selective), which saves at least half of a block's
    activations, or norms and gates (elementwise), which saves a fifth and costs little."""
    if kind == "elementwise":
        for block in model.blocks:
            block.__class__ = subclass_with(RecomputedElementwise, type(block))
        return
    mlps = []
    for block in model.blocks:
        if block.mlp is not None:
            mlps.append(block.mlp)
    modules = {"none": [], "selective": mlps, "full": list(model.blocks)}[kind]
    for module in modules:
        module.__class__ = subclass_with(Recomputed, type(module))
        # dropout must draw the same mask again when the module is recomputed
        module.uses_rng = any(getattr(child, "lora_dropout", 0.0) for child in module.modules())


def is_recomputed(model: GPT) -> bool:
    """Return whether blocks or MLPs are recomputed."""
    for block in model.blocks:
        if isinstance(block, Recomputed) or isinstance(block.mlp, Recomputed):
            return True
    return False
