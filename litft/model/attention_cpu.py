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

from litft.model.attention_eager import attention_mask, eager_attention
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
        """Set the padding rows to zero in place."""
        if self.padding_rows is None:
            return rows
        return rows.index_fill_(0, self.padding_rows, 0)

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Split rows (R, W) by group."""
        total = sum(count * length for count, length in self.shapes)
        return rows.split(
            [count * length * (rows.size(0) // total) for count, length in self.shapes]
        )

    def per_group(self, *tensors: Tensor) -> Iterator[list[Tensor]]:
        """Yield, for each group, its part (N, heads, length, D) of every tensor (B, heads, T,
        D)."""
        rows = (self.split(self.gather(_by_token(x))) for x in tensors)
        for shape, *parts in zip(self.shapes, *rows, strict=True):
            # (N length heads, D) -> (N, heads, length, D)
            yield [
                part.view(*shape, x.size(1), -1).transpose(1, 2)
                for part, x in zip(parts, tensors, strict=True)
            ]

    def join(self, parts: Sequence[Tensor], batch: int) -> Tensor:
        """Return the tensor (B, heads, T, ...) whose groups are `parts`, (N, heads, length, ...)
        each."""
        rows = self.ungather(torch.cat([_by_token(part) for part in parts]))
        return rows.view(batch, -1, parts[0].size(1), *parts[0].shape[3:]).transpose(1, 2)


# every layer of a model asks for the same groups
@lru_cache(maxsize=8)
# training cannot use inference tensors, and generation may fill this cache first
@torch.inference_mode(False)
def _make_groups(bounds: tuple[int, ...], score_heads: int, heads: int) -> DocumentGroups:
    """Group the documents between `bounds`, with one row per token and head.

    score_heads: number of query heads, which limits how many documents a group has. heads: number
    of heads in the rows.
    """
    grouped = _group_by_length(bounds, score_heads)
    index = []
    padding = []
    for group in grouped:
        # the first document of a group is its longest, to which the others are padded
        lengths, starts = torch.tensor(group)[:, :, None, None].unbind(1)  # (N, 1, 1)
        position = torch.arange(group[0][0])
        head = torch.arange(heads)[:, None]
        # (N, heads, length)
        # positions after the end read the last token again: any valid index will do there
        index.append(((starts + position.minimum(lengths - 1)) * heads + head).flatten())
        padding.append((position >= lengths).expand(-1, heads, -1).flatten())
    gather_index = torch.cat(index)
    is_padding = torch.cat(padding)
    shapes = [(len(group), group[0][0]) for group in grouped]

    # the rows are in that order already, as with documents of one length: nothing has to be moved
    if torch.equal(gather_index, torch.arange(len(gather_index))):
        return DocumentGroups(shapes, None, None, None)

    # without the padding rows, which would take the place of the token that they repeat
    inverse_index = torch.empty(bounds[-1] * heads, dtype=torch.int64)
    token_rows = (~is_padding).nonzero()[:, 0]
    inverse_index[gather_index[token_rows]] = token_rows
    return DocumentGroups(
        shapes,
        gather_index,
        inverse_index,
        is_padding.nonzero()[:, 0] if is_padding.any() else None,
    )


def _group_by_length(bounds: tuple[int, ...], heads: int) -> list[list[tuple[int, int]]]:
    """Group documents of similar length, the longest first; return (length, start) of each document
    by group."""
    grouped: list[list[tuple[int, int]]] = []
    # scores per head of the last group's documents, without padding
    area = 0
    # empty documents, such as those of `PackedSequences.chunked`, are left out
    filled = (ends for ends in pairwise(bounds) if ends[0] < ends[1])
    for start, end in sorted(filled, key=lambda ends: (ends[0] - ends[1], ends[0])):
        length = end - start
        area = area + (end - start) ** 2
        count, padded_length = (len(grouped[-1]) + 1, grouped[-1][0][0]) if grouped else (1, length)
        # the scores with padding, relative to those without it, and the scores computed at a time
        fits = (
            count * padded_length**2 <= MAX_PADDING * area
            and count * heads * padded_length * _query_block(padded_length) <= MAX_SCORES
        )
        if grouped and fits:
            grouped[-1].append((length, start))
        else:
            grouped.append([(length, start)])
            area = length**2
    return grouped


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
    groups = _make_groups(tuple(cu_seqlens.tolist()), q.size(1), 1)
    outputs = []
    # (N, heads, length, D) each
    for inputs in groups.per_group(q, k, v):
        forward = aten._scaled_dot_product_flash_attention_for_cpu
        outputs.append(forward(*inputs, 0.0, **_mask_arguments(inputs[0], window), scale=scale))
    # the kernel returns (output, log-sum-exp) for each group
    out, lse = (groups.join(parts, q.size(0)) for parts in zip(*outputs, strict=True))
    return out, lse


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
    """Return the gradients of q, k and v."""
    batch, heads, _, width = q.shape
    bounds = tuple(cu_seqlens.tolist())
    if q.dtype == torch.bfloat16 and not window:
        return _bf16_gradients(grad, q, k, v, out, lse, bounds, scale)
    groups = _make_groups(bounds, heads, 1)
    rows = [groups.gather(_by_token(x)) for x in (grad, q, k, v, out, lse)]
    # with a gradient of 0, the repeated tokens add nothing to the gradients of keys and values
    groups.zero_padding_(rows[0])
    gradients = []
    for shape, *parts, lse_rows in zip(
        groups.shapes, *(groups.split(x) for x in rows), strict=True
    ):
        # (R, heads D) -> (N, heads, length, D), in the order of the kernel's arguments
        inputs = [part.view(*shape, -1, width).transpose(1, 2) for part in parts]
        inputs.append(lse_rows.view(*shape, heads).transpose(1, 2))
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients.append(backward(*inputs, 0.0, **_mask_arguments(inputs[1], window), scale=scale))
    return tuple(groups.join(parts, batch) for parts in zip(*gradients, strict=True))


def _mask_arguments(q: Tensor, window: int) -> dict[str, bool | Tensor | None]:
    """Return the mask arguments of torch's kernel for causal attention with a window."""
    if not 0 < window < q.size(2):
        return {"is_causal": True}
    # the kernel has no argument for a window, but adds a mask to the scores
    hidden = ~attention_mask(q, q, None, window)
    return {
        "is_causal": False,
        "attn_mask": torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(hidden, -torch.inf),
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
    batch, heads, length, width = q.shape
    # such a scale multiplies q without rounding
    is_power_of_two = math.frexp(scale)[0] == 0.5
    query_scale, score_scale = (scale, 1.0) if is_power_of_two else (1.0, scale)
    # Queries have H rows a token, keys and values K: the groups of documents are the same.
    q_groups = _make_groups(bounds, heads, heads)
    kv_groups = _make_groups(bounds, heads, k.size(1))

    d_out = _by_head(grad)
    # [scale q | -lse] times [k | 1, 1, 1] is the score minus lse; three columns hold lse in bf16
    queries = q_groups.gather(
        torch.cat(
            (_by_head(q) * query_scale, _split_to_bf16(_by_token(lse).flatten() / -score_scale)), -1
        )
    )
    # [dO | -rowsum(dO * O)] times [v | 1, 1, 1] is the second factor of dS
    d_outs = q_groups.gather(
        torch.cat((d_out, _split_to_bf16(-(d_out.float() * _by_head(out)).sum(-1))), -1)
    )
    keys, values = (
        kv_groups.gather(F.pad(_by_head(x), (0, BF16_TERMS), value=1.0)) for x in (k, v)
    )
    # queries of padding rows then add nothing to d_k and d_v
    q_groups.zero_padding_(d_outs)

    # with the extra columns, which `join` removes
    d_q, d_k, d_v = (torch.empty_like(x) for x in (queries, keys, values))
    kv_parts = [kv_groups.split(x) for x in (keys, values, d_k, d_v)]
    for (count, size), *parts in zip(
        q_groups.shapes,
        *(q_groups.split(x) for x in (queries, d_outs, d_q)),
        *kv_parts,
        strict=True,
    ):
        _group_gradients(
            *(part.view(count * k.size(1), -1, size, width + BF16_TERMS) for part in parts),
            1.0 if is_power_of_two else score_scale,
        )

    def join(groups: DocumentGroups, rows: Tensor) -> Tensor:
        return groups.ungather(rows[:, :width]).view(batch, length, -1, width).transpose(1, 2)

    d_q = join(q_groups, d_q)
    d_k = join(kv_groups, d_k)
    d_v = join(kv_groups, d_v)

    # d_k contains the scale already if the queries were multiplied by it
    return d_q.mul_(scale), d_k if is_power_of_two else d_k.mul_(score_scale), d_v


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
    W).
    """
    key, value, length, step = key[:, 0], value[:, 0], key.size(2), _query_block(key.size(2))
    # several blocks of queries add to the same keys and values: bf16 would round each sum
    sum_d_k, sum_d_v = torch.zeros(2, *key.shape) if step < length else (0, 0)  # fp32
    for start in range(0, length, step):
        stop = min(length, start + step)
        # only the keys up to the last query of the block are computed
        # concatenate the query heads that share a key head: (N K, H / K * n, W)
        block_q, block_d_out = (
            x[:, :, start:stop].reshape(len(key), -1, key.size(-1)) for x in (query, d_out)
        )
        # lse is subtracted in the product, so that exp gives probabilities without a division
        probs = torch.bmm(block_q, key[:, :stop].mT)  # (N K, H / K * n, S)
        probs = (probs if scale == 1 else probs.mul_(scale)).exp_()
        # query i of the block is token start + i, which sees the keys up to itself
        probs.view(-1, stop - start, stop).tril_(start)

        d_scores = torch.bmm(block_d_out, value[:, :stop].mT).mul_(probs)
        d_q[:, :, start:stop] = torch.bmm(d_scores, key[:, :stop]).view(
            *d_q.shape[:2], stop - start, -1
        )
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
    return torch.stack((first, second, (x - first - second).bfloat16()), -1)


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
    q: Tensor, k: Tensor, v: Tensor, documents: PackedSequences, window: int | None, *settings
) -> Tensor:
    """Run `eager_attention` on each group of documents; `settings` are its softcap, sinks and
    scale."""
    groups = _make_groups(tuple(documents.cu_seqlens.tolist()), q.size(1), 1)
    out = [
        eager_attention(*inputs, attention_mask(*inputs[:2], None, window), *settings)
        for inputs in groups.per_group(q, k, v)
    ]
    return groups.join(out, q.size(0))
