"""Activation checkpointing: blocks, their MLPs, or norms and gates run again in the backward pass
instead of saving their activations; MLPs may also run in pieces of a row."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from litft.methods.mixins import change_class, subclass_with
from litft.model.recomputation import saving_recomputations
from litft.model.transformer import GPT

# in decreasing order of speed and of memory
RECOMPUTED = ("none", "elementwise", "selective", "full", "tiled")
# those that save the inputs of blocks alone
OF_BLOCKS = ("full", "tiled")
# tokens of a piece of an MLP's input: products of so many rows keep a GPU busy
PIECE_TOKENS = 4096


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


class InPieces(nn.Module):
    """An MLP that computes a long input in pieces of tokens, one after the other.

    Each piece saves only its input and runs again in the backward pass, so that the hidden values
    of a single piece exist at a time (tiled MLP, arXiv 2506.13996).
    """

    uses_rng = False

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., C) for x (..., C)."""
        run = super().forward
        rows = x.flatten(0, -2)
        if rows.size(0) <= PIECE_TOKENS:
            return run(x)
        outputs = []
        for piece in rows.split(PIECE_TOKENS):
            if torch.is_grad_enabled():
                y = checkpoint(
                    run, piece[None], use_reentrant=False, preserve_rng_state=self.uses_rng
                )
            else:
                y = run(piece[None])
            outputs.append(y.flatten(0, -2))
        return torch.cat(outputs).view(*x.shape[:-1], -1)


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
    activations, or norms and gates (elementwise), which saves a fifth and costs little. tiled: as
    full, with the MLPs in pieces."""
    if kind == "elementwise":
        for block in model.blocks:
            block.__class__ = subclass_with(RecomputedElementwise, type(block))
        return
    mlps = []
    for block in model.blocks:
        if block.mlp is not None:
            mlps.append(block.mlp)
    if kind == "tiled":
        for mlp in mlps:
            _run_again(mlp, InPieces)
    modules = {"none": [], "selective": mlps}.get(kind, list(model.blocks))
    for module in modules:
        _run_again(module, Recomputed)


def _run_again(module: nn.Module, how: type[Recomputed] | type[InPieces]) -> None:
    """Let a module run again in the backward pass."""
    changed = change_class(module, how)
    # dropout must draw the same mask again
    changed.uses_rng = any(
        getattr(child, "lora_dropout", 0.0) for child in module.modules()
    )


def is_recomputed(model: GPT) -> bool:
    """Return whether blocks or MLPs are recomputed."""
    for block in model.blocks:
        if isinstance(block, Recomputed) or isinstance(block.mlp, Recomputed):
            return True
    return False
