"""Packed sequences: which tokens of a batch see each other, and where each document begins."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


class PackedSequences(NamedTuple):
    """Which tokens of a batch see each other. Made once a batch, on the host, so that no GPU is asked."""

    ids: Tensor  # (B, T) integers, one value a document of its row
    cu_seqlens: Tensor  # (N + 1,) int32: where documents begin among the flattened B x T tokens, and B x T itself
    masks: dict[int | None, BlockMask] | None = None  # by window, for flex_attention, which is to be used where they are

    @classmethod
    def of(cls, ids: Tensor) -> "PackedSequences":
        """From the ids alone; a row ends its last document."""
        begins = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True).flatten()
        cu_seqlens = F.pad(begins.nonzero()[:, 0], (0, 1), value=ids.numel())
        return cls(ids, cu_seqlens.to(torch.int32))

    def with_masks(self, windows: Iterable[int | None]) -> "PackedSequences":
        """With the blocks of queries and keys that see each other; made by the device, which is not waited for."""
        batch, length = self.ids.shape

        def seen(window: int | None, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
            own = (key <= query) & (self.ids[row, query] == self.ids[row, key])
            return own if window is None else own & (query - key < window)

        def mask(window: int | None) -> BlockMask:
            return create_block_mask(
                lambda row, _, query, key: seen(window, row, query, key), batch, None, length, length, self.ids.device
            )

        return self._replace(masks={window: mask(window) for window in windows})


def row_cu_seqlens(rows: int, length: int, device: torch.device) -> Tensor:
    """Where documents begin if each row is one, (rows + 1,) int32."""
    return torch.arange(rows + 1, device=device, dtype=torch.int32) * length
