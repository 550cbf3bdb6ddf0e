"""Activation checkpointing: a block, or its MLP, runs again in the backward pass instead of keeping its activations."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from litft.methods.mixins import mixed
from litft.model.transformer import GPT

RECOMPUTED = ("none", "selective", "full")  # from the fastest to the smallest


class Recomputed(nn.Module):
    """A module that keeps its inputs alone, and runs again when its gradient is asked for (arXiv 1604.06174)."""

    draws = False  # whether it draws random numbers, which have to be the same again

    def forward(self, *inputs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(*inputs)
        return checkpoint(super().forward, *inputs, use_reentrant=False, preserve_rng_state=self.draws)


def recompute(model: GPT, kind: str) -> None:
    """full: every block. selective: every MLP, which keeps half or more of a block, and the attention nothing."""
    modules = {"none": [], "selective": [block.mlp for block in model.blocks], "full": list(model.blocks)}[kind]
    for module in modules:
        module.__class__ = mixed(Recomputed, type(module))
        module.draws = any(getattr(part, "lora_dropout", 0.0) for part in module.modules())
