"""Attention without a fused kernel."""

import torch
from torch import Tensor

# B batch, T queries, S keys, H query heads, K key/value heads, D head dim, V value dim


def eager_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute attention of q (B, H, T, D) over k (B, K, S, D) and v (B, K, S, V) without a fused
    kernel; return (B, H, T, V).

    The softmax is in fp32. This form serves softcaps and sinks, and is the reference in tests.
    mask: booleans that broadcast to (B, H, T, S). sinks: (H,). In k and v of a prefix that all rows
    share, B is 1.
    """
    groups = q.size(1) // k.size(1)
    k = k.repeat_interleave(groups, dim=1)
    v = v.repeat_interleave(groups, dim=1)
    # (B, H, T, S)
    scores = (q @ k.transpose(-2, -1)).float() * (scale or q.size(-1) ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        # (B, H, T, 1): one more score in each softmax; its weight is cut off, as it has no value
        column = sinks.float()[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    return scores.softmax(-1)[..., : k.size(2)].to(v.dtype) @ v
