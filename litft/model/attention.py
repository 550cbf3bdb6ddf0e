"""`attend`, the one entry point to attention. It alone decides which kernel runs."""

from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from litft.model.attention_cpu import attend_documents, eager_attend_documents
from litft.model.attention_eager import eager_attention
from litft.model.attention_mask import attention_mask
from litft.model.config import Chunk, Config, LayerConfig
from litft.model.device_type import device_type, is_planned, runs_flash_attention
from litft.model.kv_cache import LayerCache
from litft.model.packed_sequences import PackedSequences, SharedPrompts, row_cu_seqlens

# B batch, T queries, S keys, H query heads, K key/value heads, D head dim, V value
# dim, N documents


class _WindowSize(TypedDict, total=False):
    """The arguments of FlashAttention for a sliding window."""

    window_size_left: int
    window_size_right: int


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: PackedSequences | None = None,
    window: int | Chunk | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    cache: LayerCache | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of q (B, H, T, D) over k (B, K, S, D) and v (B, K, S, V); return (B,
    H, T, V).

    documents: a query sees only keys of its own document. window: a query sees at most this many
    keys, including its own; chunks are documents, as from `PackedSequences.chunked`, except in the
    cache. softcap: scores become softcap * tanh(score / softcap) (Gemma 2, arXiv 2408.00118).
    sinks: (H,) logits that are included in each softmax and have no value vector (gpt-oss). cache:
    k and v are first added to it, and the queries are the tokens of this call. scale: multiplies
    the scores; None: 1 / sqrt(D). mask: of a cache that the caller has updated. Query head h uses
    key/value head h // (H / K).
    """
    scale = float(q.size(-1) ** -0.5) if scale is None else scale
    if documents is not None and documents.shared is not None:
        return _attend_shared(q, k, v, documents.shared, window, softcap, sinks, scale)
    if cache is not None:
        k, v, mask = cache.update(k, v, window)
        if mask is None and cache.cache.call.texts is not None:
            return _attend_cached(q, cache, window, scale)
    if mask is not None:
        return _masked_attention(q, k, v, mask, softcap, sinks, scale)

    # Several tokens need nothing here: if they fill more than one chunk, `documents` holds the
    # chunks. A decode step sees the cached keys from the start of its chunk.
    if isinstance(window, Chunk):
        if q.size(2) == 1:
            start = (k.size(2) - 1) // window.size * window.size
        else:
            start = 0
        k = k[:, :, start:]
        v = v[:, :, start:]
        window = None

    # decode step: the newest token sees the last keys, so no mask is needed
    if q.size(2) == 1 and window is not None:
        k = k[:, :, -window:]
        v = v[:, :, -window:]
        window = None

    if softcap is not None or sinks is not None:
        return _attend_capped(q, k, v, documents, window, softcap, sinks, scale)
    # whole sequences, without a cache or with an empty one
    if q.size(2) == k.size(2) > 1:
        return _attend_whole(q, k, v, documents, window, scale)
    return _attend_plain(q, k, v, documents, window, scale)


def _attend_capped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: PackedSequences | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    scale: float,
) -> Tensor:
    """Compute `attend` with a softcap or sinks: by compiled FlexAttention if masks were built for
    it, else by plain products."""
    if documents is not None and q.size(2) == k.size(2):
        if documents.masks:
            return _attend_flex(q, k, v, documents.masks[window], softcap, sinks, scale)
        if device_type(q) == "cpu":
            return eager_attend_documents(q, k, v, documents, window, softcap, sinks, scale)
    mask = attention_mask(q, k, documents, window)
    return _masked_attention(q, k, v, mask, softcap, sinks, scale)


def _attend_whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: PackedSequences | None,
    window: int | None,
    scale: float,
) -> Tensor:
    """Compute `attend` where queries and keys are the same tokens, by kernels that skip hidden
    scores."""
    # these kernels take one size; zeros add nothing
    if v.size(3) != q.size(3):
        width = max(q.size(3), v.size(3))
        wide_q, wide_k, wide_v = (F.pad(x, (0, width - x.size(3))) for x in (q, k, v))
        y = _attend_whole(wide_q, wide_k, wide_v, documents, window, scale)
        return y[..., : v.size(3)]
    if device_type(q) == "cpu":
        y, _ = attend_documents(q, k, v, _cu_seqlens(q, documents), window or 0, scale)
        return y
    has_hidden_keys = documents is not None or window is not None
    if has_hidden_keys and runs_flash_attention(q, q.size(3)):
        return _attend_varlen(q, k, v, documents, window, scale)
    return _attend_plain(q, k, v, documents, window, scale)


def _attend_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: PackedSequences | None,
    window: int | None,
    scale: float,
) -> Tensor:
    """Compute `attend` by torch's kernel, with a mask tensor where one is needed."""
    square = q.size(2) == k.size(2)
    # a single query sees every key, and torch's kernel can be causal
    if documents is None and window is None and (square or q.size(2) == 1):
        return _scaled_dot_product(q, k, v, None, scale, causal=square and q.size(2) > 1)
    mask = attention_mask(q, k, documents, window)
    return _masked_attention(q, k, v, mask, None, None, scale)


def _attend_shared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shared: SharedPrompts,
    window: int | Chunk | None,
    softcap: float | None,
    sinks: Tensor | None,
    scale: float,
) -> Tensor:
    """Return `attend` of rows whose documents share their beginnings: each document gets a copy."""
    wide_q, wide_k, wide_v = (_picked(x, shared.expand) for x in (q, k, v))
    y = attend(
        wide_q,
        wide_k,
        wide_v,
        shared.documents,
        window,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
    )
    return _picked(y, shared.collapse)


def _picked(x: Tensor, places: Tensor) -> Tensor:
    """Return x (B, H, T, D) at these places (B * S,) of its flattened tokens: (B, H, S, D)."""
    batch, heads, _, width = x.shape
    rows = x.transpose(1, 2).flatten(0, 1).flatten(1)
    picked = rows.index_select(0, places)
    return picked.view(batch, -1, heads, width).transpose(1, 2)


def _masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    softcap: float | None,
    sinks: Tensor | None,
    scale: float,
) -> Tensor:
    """Attend to the keys where `mask`, (B, 1, T, S) or (T, S), is True."""
    if softcap is not None or sinks is not None:
        return eager_attention(q, k, v, mask, softcap, sinks, scale)
    return _scaled_dot_product(q, k, v, mask, scale)


def _scaled_dot_product(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool = False
) -> Tensor:
    """Call torch's kernel.

    With one query, the heads sharing a key head become queries of one head, so k is not copied.
    """
    if q.size(2) == 1 and q.size(1) != k.size(1):
        grouped = q.view(q.size(0), k.size(1), -1, q.size(3))  # (B, K, H / K, D)
        return F.scaled_dot_product_attention(
            grouped, k, v, attn_mask=mask, scale=scale
        ).reshape(*q.shape[:3], -1)
    # with dynamic shapes a comparison of sizes is symbolic: sdpa raises a TypeError for it, and
    # Dynamo then runs the whole function uncompiled without a warning; `bool()` leaves it symbolic,
    # a branch does not
    is_causal = True if causal else False  # noqa: SIM210
    enable_gqa = True if q.size(1) != k.size(1) else False  # noqa: SIM210
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _cu_seqlens(q: Tensor, documents: PackedSequences | None) -> Tensor:
    """Return the cu_seqlens of the documents; by default each row is one document."""
    if documents is not None:
        return documents.cu_seqlens
    return row_cu_seqlens(q.size(0), q.size(2), q.device)


# FlashAttention's backward pass counts the entries of a buffer in 32 bits
MAX_BUFFER_ENTRIES = 2**31


def check_packed_backward(config: Config, tokens: int, documents: int) -> None:
    """Raise ValueError if packed rows have too many tokens and documents for the backward pass of
    FlashAttention: it would write outside of its buffer, which has 128 rows for each document."""
    head_dim = max((_head_size(layer, config) for layer in config.layers), default=0)
    width = config.n_heads * (head_dim + -head_dim % 32)
    entries = (tokens + 128 * documents) * width
    if entries >= MAX_BUFFER_ENTRIES:
        raise ValueError(
            f"a micro-batch of {tokens:,} tokens in {documents:,} documents is too large for the "
            f"gradient of attention on a GPU ({entries:,} entries, at most {MAX_BUFFER_ENTRIES:,});"
            " lower --train.micro_batch_size or --data.max_seq_length"
        )


def _head_size(layer: LayerConfig, config: Config) -> int:
    """Return the size of a head as the kernel gets it."""
    if layer.latent:
        return max(layer.latent.head_dim, layer.latent.value_dim)
    # two entries more for ALiBi
    return (layer.head_dim or config.head_dim) + 2 * bool(config.alibi)


def _attend_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: PackedSequences | None,
    window: int | None,
    scale: float,
) -> Tensor:
    """Run the GPU kernel for packed sequences, which computes no scores between documents.

    documents None: each row is one document. v has the head size of q: `_attend_whole` pads it.
    """
    cu_seqlens = _cu_seqlens(q, documents)
    batch, _, length, head_dim = q.shape
    # an upper bound changes no result, but every document gets thread blocks for that many tokens
    longest = length
    if documents is not None and documents.longest is not None:
        longest = documents.longest
    # the kernel takes head sizes that are multiples of 8; zeros change no score
    padding = -head_dim % 8
    if padding:
        q, k, v = (F.pad(x, (0, padding)) for x in (q, k, v))
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (B T, heads, D)
    y = _flash_attention(
        q,
        k,
        v,
        query_starts=cu_seqlens,
        key_starts=cu_seqlens,
        max_queries=longest,
        max_keys=longest,
        window=window,
        scale=scale,
    )
    y = y[..., :head_dim] if padding else y
    return y.unflatten(0, (batch, length)).transpose(1, 2)


def _attend_cached(
    q: Tensor, cache: LayerCache, window: int | Chunk | None, scale: float
) -> Tensor:
    """Run the GPU kernel for packed sequences with queries (B, H, T, D), the last tokens of texts
    in the cache; it reads no keys behind a text, and splits the keys of a long one."""
    texts = cache.cache.call.texts
    assert texts is not None  # the caller has asked
    assert not isinstance(window, Chunk)  # chunks have masks
    batch, _, length, _ = q.shape
    # the heads of a token are stored side by side, so nothing is copied
    keys = cache.keys.transpose(1, 2).flatten(0, 1)  # (B S, K, D)
    values = cache.values.transpose(1, 2).flatten(0, 1)
    queries = q.transpose(1, 2).flatten(0, 1)  # (B T, H, D)
    y = _flash_attention(
        queries,
        keys,
        values,
        query_starts=texts.query_starts.to(q.device),
        key_starts=texts.key_starts.to(q.device),
        max_queries=length,
        max_keys=cache.cache.call.end,
        window=window,
        scale=scale,
        key_counts=texts.lengths.to(q.device),
    )
    return y.unflatten(0, (batch, length)).transpose(1, 2)


def _flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    query_starts: Tensor,
    key_starts: Tensor,
    max_queries: int,
    max_keys: int,
    window: int | None,
    scale: float,
    key_counts: Tensor | None = None,
) -> Tensor:
    """Run FlashAttention with packed queries (N, H, D) and keys and values (M, K, D); return
    (N, H, D). Queries are the last tokens of their texts.

    query_starts, key_starts: (B + 1,) in int32, where each text starts. key_counts: (B,) in int32,
    the keys of each text; None: up to the next text's.

    `varlen_attn` calls the same operator, but is a custom operator itself: each call takes the host
    50 microseconds more, and inductor has no C++ code for it.
    """
    # a single query sees all keys, and only without a causal mask does the kernel split the keys
    is_causal = True if max_queries > 1 else False  # noqa: SIM210
    window_size: _WindowSize = {}
    if window is not None:
        window_size = {"window_size_left": window - 1, "window_size_right": 0}
    output, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        query_starts,
        key_starts,
        max_queries,
        max_keys,
        0.0,  # no dropout
        is_causal,
        False,  # no debug mask
        scale=scale,
        seqused_k=key_counts,
        **window_size,
    )
    return output


def _attend_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    softcap: float | None,
    sinks: Tensor | None,
    scale: float,
) -> Tensor:
    """Run FlexAttention (arXiv 2412.05496) with softcapped scores; the log-sum-exp then adds the
    sinks to each softmax."""
    # A memory plan counts the bytes that are kept, and FlexAttention's kernel exists in compiled
    # code alone. It keeps what the kernel for packed sequences keeps, whatever is masked.
    if is_planned():
        return _attend_varlen(q, k, v, documents=None, window=None, scale=scale)
    score_mod = None
    if softcap is not None:
        cap = q.new_full((), softcap, dtype=torch.float32)

        def apply_softcap(score: Tensor, *_: Tensor) -> Tensor:
            return cap * torch.tanh(score / cap)

        score_mod = apply_softcap
    grouped = q.size(1) != k.size(1)

    if sinks is None:
        return flex_attention(q, k, v, score_mod, mask, scale, grouped)
    y, aux = flex_attention(
        q, k, v, score_mod, mask, scale, grouped, return_aux=AuxRequest(lse=True)
    )

    # A sink s adds exp(s) to a softmax's sum, exp(lse). So the output is multiplied by exp(lse) /
    # (exp(lse) + exp(s)), which is sigmoid(lse - s).
    assert aux.lse is not None  # it was requested
    return y * torch.sigmoid(aux.lse - sinks.float()[:, None])[..., None].to(y.dtype)
