"""Attention on a CPU: documents of similar length are grouped, and each group runs one forward and
one backward pass."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from litft.model.attention_eager import eager_attention
from litft.model.attention_mask import attention_mask
from litft.model.packed_sequences import PackedSequences

# B batch, T queries, S keys, H query heads, K key/value
# heads, D head dim, N documents, R rows, W row width

# Measured for the backward pass on a CPU. Documents of up to UNSPLIT_LENGTH tokens are computed in
# one piece. Longer ones are computed QUERY_BLOCK queries at a time, which skips most keys after the
# queries. With padding, a group has at most MAX_PADDING times the scores of its documents, and at
# most MAX_SCORES, so that they stay in the CPU's cache.
UNSPLIT_LENGTH = 512
QUERY_BLOCK = 256
MAX_PADDING = 1.2
MAX_SCORES = 3_000_000
aten = torch.ops.aten


class DocumentGroups(NamedTuple):
    """Groups of documents of similar length, each padded to its longest one: few large products
    serve many documents.

    Vectors are stored in rows, ordered by group, document, head and position.
    """

    # (number of documents, padded length) of each group
    shapes: list[tuple[int, int]]
    # (R,) index of each row's vector among B x T x heads; None: rows are in that order
    gather_index: Tensor | None
    inverse_index: Tensor | None  # (B T heads,) row of each vector
    # rows after the end of a document, which repeat its last token
    padding_rows: Tensor | None

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows (R, W) of vectors (B T heads, W)."""
        if self.gather_index is None:
            return x.contiguous()
        return x.index_select(0, self.gather_index)

    def ungather(self, rows: Tensor) -> Tensor:
        """Return the vectors (B T heads, W) of rows (R, W)."""
        if self.inverse_index is None:
            return rows.contiguous()
        return rows.index_select(0, self.inverse_index)

    def zero_padding_(self, rows: Tensor) -> Tensor:
        """Set the padding rows of `rows` (R, W) to zero in place; return `rows`."""
        if self.padding_rows is None:
            return rows
        return rows.index_fill_(0, self.padding_rows, 0)

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Split rows (R, W) by group."""
        positions = [count * length for count, length in self.shapes]
        heads = rows.size(0) // sum(positions)
        return rows.split([count * heads for count in positions])

    def per_group(self, *tensors: Tensor) -> Iterator[list[Tensor]]:
        """Yield, for each group, its part (N, heads, length, D) of every tensor (B, heads, T,
        D)."""
        rows = (self.split(self.gather(_by_token(x))) for x in tensors)
        for shape, *parts in zip(self.shapes, *rows, strict=True):
            group = []
            for part, x in zip(parts, tensors, strict=True):
                # (N length heads, D) -> (N, heads, length, D)
                group.append(part.view(*shape, x.size(1), -1).transpose(1, 2))
            yield group

    def join(self, parts: Sequence[Tensor], batch: int) -> Tensor:
        """Return the tensor (B, heads, T, ...) whose groups are `parts`, (N, heads, length, ...)
        each."""
        rows = self.ungather(torch.cat([_by_token(part) for part in parts]))
        return rows.view(batch, -1, parts[0].size(1), *parts[0].shape[3:]).transpose(1, 2)


# every layer of a model asks for the same groups
@lru_cache(maxsize=8)
# training cannot use inference tensors, and generation may fill this cache first
@torch.inference_mode(False)
def _make_groups(
    bounds: tuple[int, ...], score_heads: int, row_heads: int
) -> DocumentGroups:
    """Group the documents between `bounds`, with one row per token and head.

    score_heads: number of query heads, which limits how many documents a group has. row_heads:
    number of heads that have rows of their own; 1 for a row with all heads.
    """
    grouped = _group_by_length(bounds, score_heads)
    index = []
    padding = []
    # a group has the (length, start) of each of its documents
    for group in grouped:
        # the first document of a group is its longest, to which the others are padded
        lengths, starts = torch.tensor(group)[:, :, None, None].unbind(1)  # (N, 1, 1)
        position = torch.arange(group[0][0])
        head = torch.arange(row_heads)[:, None]
        # positions after the end read the last token again: any valid index will do there;
        # (N, heads, length)
        index.append(
            ((starts + position.minimum(lengths - 1)) * row_heads + head).flatten()
        )
        padding.append((position >= lengths).expand(-1, row_heads, -1).flatten())
    gather_index = torch.cat(index)
    is_padding = torch.cat(padding)
    shapes = [(len(group), group[0][0]) for group in grouped]

    # the rows are in that order already, as with documents of one length: nothing has to be moved
    if torch.equal(gather_index, torch.arange(len(gather_index))):
        return DocumentGroups(shapes, None, None, None)

    # without the padding rows, which would take the place of the token that they repeat
    inverse_index = torch.empty(bounds[-1] * row_heads, dtype=torch.int64)
    token_rows = (~is_padding).nonzero()[:, 0]
    inverse_index[gather_index[token_rows]] = token_rows
    if is_padding.any():
        padding_rows = is_padding.nonzero()[:, 0]
    else:
        padding_rows = None
    return DocumentGroups(shapes, gather_index, inverse_index, padding_rows)


def _group_by_length(bounds: tuple[int, ...], heads: int) -> list[list[tuple[int, int]]]:
    """Group documents of similar length, the longest first; return (length, start) of each document
    by group."""
    documents = []
    for start, end in pairwise(bounds):
        # empty documents, such as those of `PackedSequences.chunked`, are left out
        if start < end:
            documents.append((end - start, start))
    # the longest first, and those of one length in their order
    documents.sort(key=lambda document: (-document[0], document[1]))

    grouped: list[list[tuple[int, int]]] = []
    # scores per head of the last group's documents, without padding
    area = 0
    for length, start in documents:
        area += length**2
        if grouped and _has_room(grouped[-1], area, heads):
            grouped[-1].append((length, start))
        else:
            grouped.append([(length, start)])
            area = length**2
    return grouped


def _has_room(group: list[tuple[int, int]], area: int, heads: int) -> bool:
    """Return whether a group may get one more document; area: the scores per head that it then has
    without padding."""
    count = len(group) + 1
    padded_length = group[0][0]
    # the scores with padding, relative to those without it
    if count * padded_length**2 > MAX_PADDING * area:
        return False
    # the scores computed at a time
    return count * heads * padded_length * _query_block(padded_length) <= MAX_SCORES


def _query_block(length: int) -> int:
    """Return how many queries of a document of this length are computed at a time."""
    if length <= UNSPLIT_LENGTH:
        return length
    return QUERY_BLOCK


def _by_token(x: Tensor) -> Tensor:
    """(B, heads, T, ...) -> (B T, heads ...)"""
    return x.transpose(1, 2).reshape(x.size(0) * x.size(2), -1)


def _by_head(x: Tensor) -> Tensor:
    """(B, heads, T, D) -> (B T heads, D)"""
    return x.transpose(1, 2).reshape(-1, x.size(-1))


@torch.library.custom_op("litft::attend_documents", mutates_args=())
def attend_documents(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return causal attention within documents, (B, H, T, D), and the log-sum-exp of the scores,
    (B, H, T).

    window: the number of keys that a query sees; 0 means no limit. The groups run one after
    another, since the CPU kernels compute masked scores too, and most scores of a packed row are
    masked. This is one operator for autograd and the compiler because the number of documents
    depends on the data.
    """
    groups = _make_groups(tuple(cu_seqlens.tolist()), q.size(1), row_heads=1)
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    outputs = []
    log_sums = []
    # (N, heads, length, D) each
    for inputs in groups.per_group(q, k, v):
        mask = _mask_arguments(inputs[0], window)
        out, lse = kernel(*inputs, 0.0, **mask, scale=scale)
        outputs.append(out)
        log_sums.append(lse)
    batch = q.size(0)
    return groups.join(outputs, batch), groups.join(log_sums, batch)


@torch.library.custom_op("litft::attend_documents_backward", mutates_args=())
def attend_documents_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q (B, H, T, D), k and v (B, K, T, D), in their shapes.

    grad, out: (B, H, T, D). lse: (B, H, T). cu_seqlens: (N + 1,). window: as in `attend_documents`.
    """
    batch, heads, _, width = q.shape
    bounds = tuple(cu_seqlens.tolist())
    # twice as fast as torch's kernel, but without windows
    if q.dtype == torch.bfloat16 and not window:
        return _bf16_gradients(grad, q, k, v, out, lse, bounds, scale)
    # a row for each token, with all its heads
    groups = _make_groups(bounds, score_heads=heads, row_heads=1)
    rows = [groups.gather(_by_token(x)) for x in (grad, q, k, v, out, lse)]
    # with a gradient of 0, padding rows, which repeat a token, add nothing to the gradients of keys
    # and values
    groups.zero_padding_(rows[0])
    gradients = []
    for shape, *parts, lse_rows in zip(
        groups.shapes, *(groups.split(x) for x in rows), strict=True
    ):
        # (R, heads D) -> (N, heads, length, D), in the order of the kernel's arguments
        inputs = [part.view(*shape, -1, width).transpose(1, 2) for part in parts]
        inputs.append(lse_rows.view(*shape, heads).transpose(1, 2))
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients.append(
            backward(*inputs, 0.0, **_mask_arguments(inputs[1], window), scale=scale)
        )
    return _joined(groups, gradients, batch)


def _joined(
    groups: DocumentGroups, gradients: Sequence[tuple[Tensor, Tensor, Tensor]], batch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given those of each group."""
    d_q, d_k, d_v = (groups.join(parts, batch) for parts in zip(*gradients, strict=True))
    return d_q, d_k, d_v


def _mask_arguments(q: Tensor, window: int) -> dict[str, bool | Tensor | None]:
    """Return the mask arguments of torch's kernel for causal attention with a window."""
    if not 0 < window < q.size(2):
        return {"is_causal": True}
    # the kernel has no argument for a window, but adds a mask to the scores
    hidden = ~attention_mask(q, q, None, window)
    return {
        "is_causal": False,
        "attn_mask": torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(
            hidden, -torch.inf
        ),
    }


def _bf16_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: tuple[int, ...],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention's backward (arXiv 2205.14135, appendix B.2) in bf16 matrix products, twice
    as fast as torch's.

    With P = exp(scale Q K^T - lse): dV = P^T dO, dS = P * (dO V^T - rowsum(dO * O)), dQ = scale dS
    K, dK = scale dS^T Q.
    Each subtraction is part of a product: the subtracted value is stored in extra columns, which
    are multiplied by ones. So it is subtracted in the fp32 accumulator of the product, and no large
    score is rounded to bf16. The extra columns stay until the end, since products of slices would
    copy their inputs first.
    """
    # a power of two multiplies q without rounding; other scales multiply the scores
    if math.frexp(scale)[0] == 0.5:
        query_scale = scale
        score_scale = 1.0
    else:
        query_scale = 1.0
        score_scale = scale
    # Queries have H rows a token, keys and values K: the groups of documents are the same.
    q_groups = _make_groups(bounds, q.size(1), row_heads=q.size(1))
    kv_groups = _make_groups(bounds, q.size(1), row_heads=k.size(1))

    # [scale q | -lse] times [k | 1, 1, 1] is the score minus lse; three columns hold lse in bf16.
    # It is divided by score_scale, which the product is multiplied by afterwards.
    minus_lse = _by_token(lse).flatten() / -score_scale
    queries = q_groups.gather(_with_terms(_by_head(q) * query_scale, minus_lse))
    # [dO | -rowsum(dO * O)] times [v | 1, 1, 1] is the second factor of dS
    d_out = _by_head(grad)
    minus_sums = -(d_out.float() * _by_head(out)).sum(-1)
    d_outs = q_groups.gather(_with_terms(d_out, minus_sums))
    keys = kv_groups.gather(_with_ones(_by_head(k)))
    values = kv_groups.gather(_with_ones(_by_head(v)))
    # queries of padding rows then add nothing to d_k and d_v
    q_groups.zero_padding_(d_outs)

    inputs = (queries, d_outs, keys, values)
    d_q, d_k, d_v = _row_gradients(q_groups, kv_groups, inputs, k.size(1), score_scale)
    d_q = _without_terms(q_groups, d_q, q)
    d_k = _without_terms(kv_groups, d_k, k)
    d_v = _without_terms(kv_groups, d_v, v)
    d_q.mul_(scale)
    # otherwise d_k contains the scale already, since the queries were multiplied by it
    if score_scale != 1:
        d_k.mul_(score_scale)
    return d_q, d_k, d_v


def _row_gradients(
    q_groups: DocumentGroups,
    kv_groups: DocumentGroups,
    inputs: tuple[Tensor, ...],
    key_heads: int,
    scale: float,
) -> list[Tensor]:
    """Return the gradients (R, W) of queries, keys and values; their extra columns have no meaning.

    inputs: the rows (R, W) of queries, output gradients, keys and values.
    """
    queries, d_outs, keys, values = inputs
    d_q = torch.empty_like(queries)
    d_k = torch.empty_like(keys)
    d_v = torch.empty_like(values)
    # in the order of the arguments of `_group_gradients`
    by_tensor = [q_groups.split(rows) for rows in (queries, d_outs, d_q)]
    by_tensor += [kv_groups.split(rows) for rows in (keys, values, d_k, d_v)]
    for (count, length), *parts in zip(q_groups.shapes, *by_tensor, strict=True):
        shape = (count * key_heads, -1, length, queries.size(1))
        _group_gradients(*(part.view(shape) for part in parts), scale=scale)
    return [d_q, d_k, d_v]


def _without_terms(groups: DocumentGroups, rows: Tensor, like: Tensor) -> Tensor:
    """Return rows (R, W) without their extra columns as a tensor like `like`, (B, heads, T, D)."""
    batch, heads, length, width = like.shape
    vectors = groups.ungather(rows[:, :width])
    return vectors.view(batch, length, heads, width).transpose(1, 2)


def _group_gradients(
    query: Tensor,
    d_out: Tensor,
    d_q: Tensor,
    key: Tensor,
    value: Tensor,
    d_k: Tensor,
    d_v: Tensor,
    scale: float,
) -> None:
    """Write a group's gradients into d_q, d_k and d_v.

    query, d_out and d_q are (N K, H / K, length, W); key, value, d_k and d_v are (N K, 1, length,
    W). W is the head's width and the extra columns, of which those of query hold -lse. scale: 1 if
    query contains it.
    """
    key = key[:, 0]  # (N K, length, W)
    value = value[:, 0]
    length = key.size(1)
    step = _query_block(length)
    # several blocks of queries add to the same keys and values: bf16 would round each sum
    if step < length:
        sum_d_k, sum_d_v = torch.zeros(2, *key.shape)  # fp32
    for start in range(0, length, step):
        stop = min(length, start + step)
        # concatenate the query heads that share a key head: (N K, H / K * n, W)
        block_q = query[:, :, start:stop].reshape(len(key), -1, key.size(-1))
        block_d_out = d_out[:, :, start:stop].reshape(block_q.shape)
        # only the keys up to the last query of the block are computed
        probs = torch.bmm(block_q, key[:, :stop].mT)  # (N K, H / K * n, S)
        if scale != 1:
            probs.mul_(scale)
        # lse is subtracted in the product, so that exp gives probabilities without a division
        probs.exp_()
        # query i of the block is token start + i, which sees the keys up to itself
        probs.view(-1, stop - start, stop).tril_(start)

        d_scores = torch.bmm(block_d_out, value[:, :stop].mT).mul_(probs)
        block_d_q = torch.bmm(d_scores, key[:, :stop])
        d_q[:, :, start:stop] = block_d_q.view(*d_q.shape[:2], stop - start, -1)
        block_d_k = torch.bmm(d_scores.mT, block_q)
        block_d_v = torch.bmm(probs.mT, block_d_out)

        if step < length:
            sum_d_k[:, :stop] += block_d_k
            sum_d_v[:, :stop] += block_d_v
        else:
            sum_d_k = block_d_k
            sum_d_v = block_d_v
    d_k[:, 0] = sum_d_k
    d_v[:, 0] = sum_d_v


# fp32 has 24 significant bits, bf16 has 8
BF16_TERMS = 3


def _split_to_bf16(x: Tensor) -> Tensor:
    """Split fp32 values into bf16 terms that sum to them, (..., BF16_TERMS)."""
    first = x.bfloat16()
    second = (x - first).bfloat16()
    third = (x - first - second).bfloat16()
    return torch.stack((first, second, third), -1)


def _with_terms(rows: Tensor, values: Tensor) -> Tensor:
    """Return rows (R, D) with extra columns that sum to fp32 values (R,)."""
    return torch.cat((rows, _split_to_bf16(values)), -1)


def _with_ones(rows: Tensor) -> Tensor:
    """Return rows (R, D) with ones in the extra columns."""
    return F.pad(rows, (0, BF16_TERMS), value=1.0)


def _empty_token_major(x: Tensor) -> Tensor:
    """Return an empty tensor like x (B, heads, T, D), stored as (B, T, heads, D), the layout that
    Linears use."""
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


@attend_documents.register_fake
def _(q, k, v, cu_seqlens, window, scale):
    lse = q.new_empty(
        q.size(0), q.size(2), q.size(1), dtype=torch.promote_types(q.dtype, torch.float32)
    )
    return _empty_token_major(q), lse.transpose(1, 2)


@attend_documents_backward.register_fake
def _(grad, q, k, v, out, lse, cu_seqlens, window, scale):
    return tuple(_empty_token_major(x) for x in (q, k, v))


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, cu_seqlens, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def _backward(ctx, grad: Tensor, _):
    return (
        *attend_documents_backward(grad, *ctx.saved_tensors, ctx.window, ctx.scale),
        None,
        None,
        None,
    )


attend_documents.register_autograd(_backward, setup_context=_setup_context)


def eager_attend_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: PackedSequences,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    scale: float,
) -> Tensor:
    """Run `eager_attention` of q (B, H, T, D), k and v (B, K, T, D) on each group of documents;
    return (B, H, T, D)."""
    groups = _make_groups(tuple(documents.cu_seqlens.tolist()), q.size(1), row_heads=1)
    outputs = []
    for queries, keys, values in groups.per_group(q, k, v):
        mask = attention_mask(queries, keys, None, window)
        outputs.append(eager_attention(queries, keys, values, mask, softcap, sinks, scale))
    return groups.join(outputs, q.size(0))
