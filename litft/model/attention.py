"""The one attention face: `attend`. Which kernel runs is decided here and nowhere else."""

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from litft.model.attention_cpu import attend_documents, attend_packed_eagerly
from litft.model.attention_eager import attention_mask, eager_attention
from litft.model.kv_cache import LayerCache
from litft.model.packed_sequences import PackedSequences, row_cu_seqlens

# B batch, T queries, S keys, H query heads, K key/value heads, D head dim, N documents

# torch 2.11 groups heads unasked
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: PackedSequences | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    cache: LayerCache | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention of q (B, H, T, D) over k and v (B, K, S, D); returns (B, H, T, D).

    documents: a query sees only keys of its own. window: a query sees at most this many keys, itself included. softcap:
    scores become softcap * tanh(score / softcap) (Gemma 2, arXiv 2408.00118). sinks: (H,) logits that take part in each
    softmax and carry no value (gpt-oss). cache: k and v are appended to it first, and the queries are the last T of its
    tokens. scale: multiplies the scores; None means 1 / sqrt(D). Query head h reads key/value head h // (H / K).
    """
    scale = q.size(-1) ** -0.5 if scale is None else scale
    if cache is not None:
        k, v, mask = cache.update(k, v, window)
        if mask is not None:
            return _sdpa(q, k, v, mask, softcap, sinks, scale)
    if q.size(2) == 1 and window is not None:  # decoding: the newest token sees the last keys, no mask needed
        k, v, window = k[:, :, -window:], v[:, :, -window:], None
    square, on_cpu = q.size(2) == k.size(2), q.device.type == "cpu"
    if softcap is not None or sinks is not None:
        if documents is not None and documents.masks and square:
            return _attend_flex(q, k, v, documents.masks[window], softcap, sinks, scale)
        if documents is not None and square and on_cpu:
            return attend_packed_eagerly(q, k, v, documents, window, softcap, sinks, scale)
        return _sdpa(q, k, v, attention_mask(q, k, documents, window), softcap, sinks, scale)
    if square and q.size(2) > 1:
        if on_cpu:
            return attend_documents(q, k, v, _starts(q, documents), window or 0, scale)[0]
        if (documents is not None or window is not None) and q.dtype != torch.float32:
            return _attend_varlen(q, k, v, _starts(q, documents), window, scale)
    if documents is None and window is None and (square or q.size(2) == 1):
        return _scaled_dot_product(q, k, v, None, scale, causal=square and q.size(2) > 1)
    return _sdpa(q, k, v, attention_mask(q, k, documents, window), None, None, scale)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, softcap: float | None, sinks: Tensor | None, scale: float
) -> Tensor:
    """Of the keys those that `mask`, (B, 1, T, S) or (T, S), shows."""
    if softcap is not None or sinks is not None:
        return eager_attention(q, k, v, mask, softcap, sinks, scale)
    return _scaled_dot_product(q, k, v, mask, scale)


def _scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool = False) -> Tensor:
    """torch's own; of single tokens the heads of a group are read as that many tokens of one head, without copies of k."""
    if q.size(2) == 1 and q.size(1) != k.size(1):
        grouped = q.view(q.size(0), k.size(1), -1, q.size(3))  # (B, K, H / K, D)
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale).reshape(q.shape)
    settings = dict(is_causal=causal, scale=scale, enable_gqa=q.size(1) != k.size(1))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **settings)


def _starts(q: Tensor, documents: PackedSequences | None) -> Tensor:
    """Where documents begin; by default each row is one."""
    return documents.cu_seqlens if documents is not None else row_cu_seqlens(q.size(0), q.size(2), q.device)


def _attend_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int | None, scale: float) -> Tensor:
    """The GPU's kernel for documents one behind the other: what one does not see of another is not computed."""
    rows, longest = q.size(0), q.size(2)  # a bound that needs no look at the documents, and changes no result
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (B T, heads, D)
    seen = (-1 if window is None else window - 1, 0)
    y = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, scale=scale, window_size=seen, **GROUPED)
    return y.unflatten(0, (rows, longest)).transpose(1, 2)


def _attend_flex(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, softcap: float | None, sinks: Tensor | None, scale: float
) -> Tensor:
    """The kernel that the compiler makes for changed scores (arXiv 2412.05496). A sink takes its part of each softmax."""
    cap = None if softcap is None else q.new_full((), softcap, dtype=torch.float32)  # the compiler takes no number here

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    change, grouped = None if softcap is None else capped, q.size(1) != k.size(1)
    if sinks is None:
        return flex_attention(q, k, v, change, mask, scale, grouped)
    y, aux = flex_attention(q, k, v, change, mask, scale, grouped, return_aux=AuxRequest(lse=True))
    return y * torch.sigmoid(aux.lse - sinks.float()[:, None])[..., None].to(y.dtype)
