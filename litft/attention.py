"""The one attention face: `attend`. Which kernel runs is decided here and nowhere else."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from litft.cache import LayerCache

# B batch, T queries, S keys, H query heads, K key/value heads, D head dim


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    cache: LayerCache | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention of q (B, H, T, D) over k and v (B, K, S, D); returns (B, H, T, D).

    documents: (B, T) integers; a query sees only keys of its own document. window: a query sees at most this many keys,
    itself included. softcap: scores become softcap * tanh(score / softcap) (Gemma 2, arXiv 2408.00118). sinks: (H,)
    logits that take part in each softmax and carry no value (gpt-oss). cache: k and v are appended to it first, and the
    queries are the last T of its tokens. scale: multiplies the scores; None means 1 / sqrt(D). Query head h reads
    key/value head h // (H / K).
    """
    if cache is not None:
        k, v = cache.extend(k, v)
    if q.size(2) == 1 and window is not None:  # decoding: the newest token sees the last keys, no mask needed
        k, v, window = k[:, :, -window:], v[:, :, -window:], None
    if documents is not None and cache is None and q.device.type == "cpu":
        return _attend_each(q, k, v, documents, window=window, softcap=softcap, sinks=sinks, scale=scale)
    if softcap is not None or sinks is not None:
        return attend_plainly(q, k, v, visible(q, k, documents, window), softcap, sinks, scale)
    grouped = q.size(1) != k.size(1)
    causal = q.size(2) == k.size(2)
    if documents is None and (window is None or window >= k.size(2)) and (causal or q.size(2) == 1):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal and q.size(2) > 1, scale=scale, enable_gqa=grouped)
    mask = visible(q, k, documents, window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _attend_each(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, **settings: Any) -> Tensor:
    """Document after document: no kernel of the CPU skips what a mask hides, and most of a packed row is hidden."""
    rows = []
    for row, ids in enumerate(documents):
        lengths = ids.unique_consecutive(return_counts=True)[1].tolist()
        parts = zip(*(x[row : row + 1].split(lengths, dim=2) for x in (q, k, v)), strict=True)
        rows.append(torch.cat([attend(*part, **settings) for part in parts], dim=2))
    return torch.cat(rows)


def visible(q: Tensor, k: Tensor, documents: Tensor | None, window: int | None) -> Tensor:
    """Which keys a query sees: booleans of shape (T, S), or (B, 1, T, S) where documents differ by row."""
    rows = torch.arange(k.size(2) - q.size(2), k.size(2), device=q.device)[:, None]
    columns = torch.arange(k.size(2), device=q.device)[None, :]
    mask = columns <= rows
    if window is not None:
        mask = mask & (columns > rows - window)
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    return mask


def attend_plainly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention written out, softmax in fp32: for what the fused kernels lack, and the reference in the tests."""
    groups = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q @ k.transpose(-2, -1)).float() * (scale or q.size(-1) ** -0.5)  # (B, H, T, S)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    return scores.softmax(-1)[..., : k.size(2)].to(v.dtype) @ v
