"""Packed sequences: which tokens of a batch may attend to each other, and where each document
starts."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

# B batch, T tokens, N documents


class SharedPrompts(NamedTuple):
    """How rows (B, T) in which documents share their beginning become rows (B, S) of whole
    documents, for attention."""

    documents: "PackedSequences"  # of the rows with whole documents
    # (B * S,) and (B * T,) int64: the place of each token in the other flattened rows
    expand: Tensor
    collapse: Tensor

    def to(self, move: Callable[[Tensor], Tensor]) -> "SharedPrompts":
        """Return a copy on a device; move: as in `PackedSequences.to`."""
        return SharedPrompts(
            self.documents.to(move), move(self.expand), move(self.collapse)
        )


class PackedSequences(NamedTuple):
    """Which tokens of a batch may attend to each other.

    Built once per batch on the host, which avoids a GPU sync.
    """

    # (B, T) integers; within a row, each document has its own value
    ids: Tensor
    # (N + 1,) int32: document starts in the flattened B x T tokens, then B x T
    cu_seqlens: Tensor
    # the same on the CPU, for kernels whose launches depend on the lengths
    host_cu_seqlens: Tensor | None = None
    # by window; if present, flex_attention uses them
    masks: dict[int | None, BlockMask] | None = None
    # tokens of the longest document, which decides how many thread blocks a GPU starts; None:
    # the host does not know it
    longest: int | None = None
    # documents that share their beginning, which then is one document here
    shared: SharedPrompts | None = None

    @property
    def attended_sizes(self) -> tuple[int, int]:
        """The numbers of tokens and of documents in the rows that attention sees."""
        seen = self.shared.documents if self.shared else self
        return seen.ids.numel(), seen.cu_seqlens.size(0) - 1

    @classmethod
    def of(cls, ids: Tensor) -> "PackedSequences":
        """Build from document ids (B, T); a document never continues in the next row."""
        # the first token of each row always starts a document
        is_start = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True).flatten()
        cu_seqlens = F.pad(is_start.nonzero()[:, 0], (0, 1), value=ids.numel()).to(
            torch.int32
        )
        if ids.is_cuda:
            # reading the lengths would wait for the GPU
            return cls(ids, cu_seqlens)
        # compiled code would treat a length of 1 as a constant
        longest = max(2, int(cu_seqlens.diff().max()))
        return cls(ids, cu_seqlens, host_cu_seqlens=cu_seqlens, longest=longest)

    @classmethod
    def rows(cls, rows: int, length: int, device: torch.device) -> "PackedSequences":
        """Build for a batch in which each row is one document."""
        ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
        return cls(ids, row_cu_seqlens(rows, length, device), longest=length)

    def to(self, move: Callable[[Tensor], Tensor]) -> "PackedSequences":
        """Return a copy with ids (B, T) and cu_seqlens (N + 1,) moved to a device by `move`, which
        keeps their shapes.

        The tensors that stay on the CPU, and masks, are not moved.
        """
        return self._replace(
            ids=move(self.ids),
            cu_seqlens=move(self.cu_seqlens),
            shared=self.shared and self.shared.to(move),
        )

    def chunked(self, size: int) -> "PackedSequences":
        """Return the chunks of `size` tokens that the documents consist of.

        Their number depends on the data, and a GPU's host would wait for it. So there are as many
        as there can be, and the last ones are empty.
        """
        ids = self.ids
        device = ids.device
        batch, length = ids.shape
        num_tokens = ids.numel()
        # (B, T), counted from the start of each document
        positions = torch.arange(length, device=device) - document_starts(ids)
        is_start = (positions % size == 0).flatten()

        # a document of n tokens has at most 1 + n // size chunks
        num_documents = self.cu_seqlens.numel() - 1
        limit = num_documents + batch * length // size
        # the chunk that a token starts; the others go to a slot after the last chunk
        numbers = torch.where(is_start, is_start.cumsum(0) - 1, limit)
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=device)
        starts = torch.full((limit + 1,), num_tokens, dtype=torch.int32, device=device)
        starts.scatter_(0, numbers, tokens)
        # the slot that collects all tokens that start no chunk
        starts[limit:].fill_(num_tokens)

        # a document has at most that many chunks, so each chunk of a row has its own value
        most_chunks = length // size + 1
        chunk_ids = ids * most_chunks + positions // size
        return PackedSequences(chunk_ids, starts, longest=min(size, length))

    def with_masks(self, windows: Iterable[int | None]) -> "PackedSequences":
        """Return a copy with a FlexAttention block mask for each window; built on the device
        without a sync."""
        batch, length = self.ids.shape

        def is_visible(
            window: int | None, row: Tensor, query: Tensor, key: Tensor
        ) -> Tensor:
            visible = (key <= query) & (self.ids[row, query] == self.ids[row, key])
            if window is None:
                return visible
            return visible & (query - key < window)

        def block_mask(window: int | None) -> BlockMask:
            # None: the same mask for all heads
            return create_block_mask(
                lambda row, _, query, key: is_visible(window, row, query, key),
                batch,
                None,
                length,
                length,
                self.ids.device,
            )

        masks = {window: block_mask(window) for window in windows}
        return self._replace(masks=masks)


def document_starts(ids: Tensor) -> Tensor:
    """Return the index (B, T) of the first token of each token's document, from document ids (B,
    T)."""
    index = torch.arange(ids.size(1), device=ids.device)
    is_start = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)
    # starts grow along a row, so the running maximum is the latest start
    return torch.where(is_start, index, 0).cummax(dim=1).values


def document_lengths(ids: Tensor) -> Tensor:
    """Return the number of tokens (B, T) of each token's document, from document ids (B, T)."""
    # the index after the last token
    ends = ids.size(1) - document_starts(ids.flip(1)).flip(1)
    return ends - document_starts(ids)


def row_cu_seqlens(rows: int, length: int, device: torch.device) -> Tensor:
    """Return cu_seqlens (B + 1,) int32 for a batch of B rows, each of which is one document."""
    return torch.arange(rows + 1, device=device, dtype=torch.int32) * length
