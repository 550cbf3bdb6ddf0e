"""torch.compile for each block. Results and parameter names do not change."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch._functorch.config
from torch import Tensor

from litft.methods.mixins import subclass_with
from litft.model.compilation import compile_block
from litft.model.config import Chunk
from litft.model.kv_cache import KVCache
from litft.model.packed_sequences import PackedSequences
from litft.model.rope import CosSin
from litft.model.transformer import GPT
from litft.training.memory_saving.activation_checkpointing import RecomputedElementwise


class Compiled(GPT):
    """A network with compiled blocks and a compiled loss."""

    def embed_tokens(
        self,
        tokens: Tensor,
        positions: Tensor,
        noise: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return the first block's input (B, T, C) of tokens (B, T), with a gradient if that block
        is trained, so that all blocks share a graph."""
        x = super().embed_tokens(tokens, positions, noise)
        needs_gradient = (
            torch.is_grad_enabled() and is_compiled(self) and trains_first_block(self)
        )
        if needs_gradient and not x.requires_grad:
            return x.requires_grad_()
        return x

    def cos_sin(
        self,
        positions: Tensor,
        cache: KVCache | None,
        dtype: torch.dtype,
        document_ids: Tensor | None = None,
    ) -> list[CosSin]:
        """Return cos and sin; their width is a constant of the compiled code."""
        tables = super().cos_sin(positions, cache, dtype, document_ids)
        for table in tables:
            torch._dynamo.mark_static(table.cos, 3)
            torch._dynamo.mark_static(table.sin, 3)
        return tables

    def prepare_documents(
        self, documents: PackedSequences | None, tokens: Tensor
    ) -> PackedSequences | None:
        """Return `documents` with FlexAttention block masks, if attention on a GPU changes scores
        before the softmax."""
        # otherwise Dynamo may treat the number of documents as a constant
        if documents is not None:
            _mark_dynamic(documents)
        if not (
            changes_scores(self)
            and tokens.is_cuda
            and torch.is_grad_enabled()
            and is_compiled(self)
        ):
            return documents
        if documents is None:  # each row is one document
            batch, length = tokens.shape
            documents = PackedSequences.rows(batch, length, tokens.device)
        windows = set()
        for layer in self.config.layers:
            # documents in chunks are made of these later, and have no masks
            if not isinstance(layer.window, Chunk):
                windows.add(layer.window)
        return documents.with_masks(windows)


def _mark_dynamic(documents: PackedSequences) -> None:
    """Tell Dynamo that the number of documents changes, and that of tokens in whole documents."""
    torch._dynamo.maybe_mark_dynamic(documents.cu_seqlens, 0)
    if documents.host_cu_seqlens is not None:
        torch._dynamo.maybe_mark_dynamic(documents.host_cu_seqlens, 0)
    if documents.shared is not None:
        torch._dynamo.maybe_mark_dynamic(documents.shared.expand, 0)
        torch._dynamo.maybe_mark_dynamic(documents.shared.collapse, 0)
        torch._dynamo.maybe_mark_dynamic(documents.shared.documents.ids, 1)
        _mark_dynamic(documents.shared.documents)


def compile_blocks(model: GPT) -> None:
    """Compile the loss and each block, for any number of tokens and documents; identical blocks
    share a graph."""
    model.__class__ = subclass_with(Compiled, type(model))
    model.compiled_loss = True
    # Whether the compiler may compute the outputs of norms and gates again: it would keep them, as
    # what the products before and after them have in common.
    recomputes = isinstance(model.blocks[0], RecomputedElementwise)
    torch._functorch.config.ban_recompute_materialized_backward = not recomputes
    for block in model.blocks:
        compile_block(block)


def compiles(
    requested: bool | None, device: str, offloads_blocks: bool, recomputed: str = "none"
) -> bool:
    """Return whether blocks are compiled: as requested, or on a GPU whose blocks' weights stay
    there. Blocks with MLPs in pieces are not: each number of pieces would be another graph."""
    if recomputed == "tiled":
        return False
    if requested is not None:
        return requested
    return device == "cuda" and not offloads_blocks


def trains_first_block(model: GPT) -> bool:
    """Return whether the first block has trained parameters; without them, nothing below the first
    one needs a gradient."""
    return any(parameter.requires_grad for parameter in model.blocks[0].parameters())


def changes_scores(model: GPT) -> bool:
    """Return whether attention changes scores before the softmax, for which compiled blocks run
    FlexAttention on a GPU."""
    return model.config.attention_softcap is not None or model.config.sinks


def is_compiled(model: GPT) -> bool:
    """Return whether the blocks are compiled."""
    return any(block._compiled_call_impl is not None for block in model.blocks)


def run_uncompiled(model: GPT, reason: str) -> None:
    """Run the blocks without compilation from now on, and warn about the reason."""
    warnings.warn(
        f"the blocks run uncompiled, since torch.compile fails: {reason}", stacklevel=2
    )
    model.compiled_loss = False
    for block in model.blocks:
        block._compiled_call_impl = None


@contextmanager
def uncompiled() -> Iterator[None]:
    """Within the context, blocks run without compilation: for rare calls with shapes of their
    own."""
    with torch.compiler.set_stance("force_eager"):
        yield
