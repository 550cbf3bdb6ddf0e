"""Which keys a query sees: causal, within a sliding window or a chunk, within a document.

Kernels that need no mask have these rules in their own terms: `_flash_attention` in attention.py
takes the window's size, and `with_masks` in packed_sequences.py makes FlexAttention's block masks.
"""

import torch
from torch import Tensor

from litft.model.config import Chunk
from litft.model.packed_sequences import PackedSequences

# B batch, T queries, S or N keys


def attention_mask(
    q: Tensor, k: Tensor, documents: PackedSequences | None, window: int | None
) -> Tensor:
    """Return which keys each query sees: booleans (T, S), or (B, 1, T, S) with documents, which
    differ by row."""
    key_positions = torch.arange(k.size(2), device=q.device)
    # the last query is the token of the last key
    query_positions = key_positions[None, k.size(2) - q.size(2) :]
    mask = causal_mask(query_positions, key_positions, window)[0, 0]
    if documents is not None:
        mask = mask & (documents.ids[:, None, :, None] == documents.ids[:, None, None, :])
    return mask


def causal_mask(
    positions: Tensor, key_positions: Tensor, window: int | Chunk | None
) -> Tensor:
    """Return which keys, at positions (N,), the tokens at positions (B, T) see: booleans (B, 1, T,
    N)."""
    query_positions = positions[:, None, :, None]
    mask = key_positions <= query_positions
    if isinstance(window, Chunk):
        return mask & (key_positions // window.size == query_positions // window.size)
    if window is None:
        return mask
    return mask & (key_positions > query_positions - window)
