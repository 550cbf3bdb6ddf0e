"""torch.compile, block by block: it changes neither what is computed nor any parameter's name."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from litft.methods.mixins import mixed
from litft.model.packed_sequences import PackedSequences, row_cu_seqlens
from litft.model.transformer import GPT


class Compiled(nn.Module):
    """A network of compiled blocks."""

    def arranged(self, documents: PackedSequences | None, tokens: Tensor) -> PackedSequences | None:
        """On a GPU, where scores are changed before the softmax, with what its compiled attention needs."""
        if documents is not None:  # Dynamo may take their count for a constant, unless it is told
            torch._dynamo.maybe_mark_dynamic(documents.cu_seqlens, 0)
        changed = self.config.attention_softcap is not None or self.config.sinks
        if not (changed and tokens.is_cuda and torch.is_grad_enabled() and is_compiled(self)):
            return documents
        if documents is None:  # each row is one
            documents = PackedSequences(torch.zeros_like(tokens), row_cu_seqlens(*tokens.shape, tokens.device))
        return documents.with_masks({layer.window for layer in self.config.layers})


def compile_blocks(model: GPT) -> None:
    """Each block by torch.compile, for any count of tokens and documents; blocks that are alike share a graph."""
    model.__class__ = mixed(Compiled, type(model))
    for block in model.blocks:
        block.compile(dynamic=True)


def is_compiled(model: GPT) -> bool:
    """Whether its blocks are."""
    return any(block._compiled_call_impl is not None for block in model.blocks)


def run_uncompiled(model: GPT, reason: str) -> None:
    """Take the blocks as they are written, and say why."""
    warnings.warn(f"the blocks run uncompiled, since torch.compile fails: {reason}", stacklevel=2)
    for block in model.blocks:
        block._compiled_call_impl = None


@contextmanager
def as_written() -> Iterator[None]:
    """Inside, nothing is compiled: for what runs rarely, in shapes of its own."""
    with torch.compiler.set_stance("force_eager"):
        yield
