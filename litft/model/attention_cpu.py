"""Attention on a CPU: packed documents in groups of like length, each with a forward and a backward pass."""

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

# B batch, T queries, S keys, H query heads, K key/value heads, D head dim, N documents

# of the CPU's backward, as measured: documents up to WHOLE are computed in one piece, longer ones QUERIES at a time, which
# leaves out most keys behind them; a group's scores are at most FILLED times its documents' own, and SCORES stay in cache
WHOLE, QUERIES, FILLED, SCORES = 512, 256, 1.2, 3_000_000
aten = torch.ops.aten


class Groups(NamedTuple):
    """Documents of like length side by side, filled up to the longest of them: few large products serve many documents.

    Their numbers stand in rows, ordered by group, document, head and position.
    """

    shapes: list[tuple[int, int]]  # how many documents a group has, and their length
    index: Tensor | None  # (R,) which of the batch's B x T x heads vectors a row holds; None: they are in order
    places: Tensor | None  # (B T heads,) the row of each
    beyond: Tensor | None  # the rows behind the end of a document, which hold its last token once more

    def gather(self, x: Tensor) -> Tensor:
        """The rows (R, W) of vectors (B T heads, W)."""
        return x.contiguous() if self.index is None else x.index_select(0, self.index)

    def spread(self, rows: Tensor) -> Tensor:
        """Vectors (B T heads, W) from their rows (R, W)."""
        return rows.contiguous() if self.places is None else rows.index_select(0, self.places)

    def without_beyond(self, rows: Tensor) -> Tensor:
        """Zeros behind the end of each document, in place."""
        return rows if self.beyond is None else rows.index_fill_(0, self.beyond, 0)

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Each group's rows (R, W)."""
        total = sum(count * length for count, length in self.shapes)
        return rows.split([count * length * (rows.size(0) // total) for count, length in self.shapes])

    def each(self, *tensors: Tensor) -> Iterator[list[Tensor]]:
        """Of tensors (B, heads, T, D), every group's part (N, heads, length, D)."""
        rows = (self.split(self.gather(_by_token(x))) for x in tensors)
        for shape, *parts in zip(self.shapes, *rows, strict=True):
            yield [part.view(*shape, x.size(1), -1).transpose(1, 2) for part, x in zip(parts, tensors, strict=True)]

    def whole(self, parts: Sequence[Tensor], batch: int) -> Tensor:
        """A tensor (B, heads, T, ...) from every group's part (N, heads, length, ...)."""
        rows = self.spread(torch.cat([_by_token(part) for part in parts]))
        return rows.view(batch, -1, parts[0].size(1), *parts[0].shape[3:]).transpose(1, 2)


@lru_cache(maxsize=8)  # the layers of a model ask for the same
@torch.inference_mode(False)  # or training could not use what generation has left here
def _groups(bounds: tuple[int, ...], sharing: int, heads: int) -> Groups:
    """Groups of documents that begin at these tokens, of which `sharing` query heads compute scores; rows for `heads`."""
    grouped = _alike(bounds, sharing)
    index, beyond = [], []
    for group in grouped:
        lengths, begins = torch.tensor(group)[:, :, None, None].unbind(1)  # (N, 1, 1)
        position, head = torch.arange(group[0][0]), torch.arange(heads)[:, None]
        index.append(((begins + position.minimum(lengths - 1)) * heads + head).flatten())  # (N, heads, length)
        beyond.append((position >= lengths).expand(-1, heads, -1).flatten())
    rows, hidden = torch.cat(index), torch.cat(beyond)
    shapes = [(len(group), group[0][0]) for group in grouped]
    if torch.equal(rows, torch.arange(len(rows))):
        return Groups(shapes, None, None, None)
    places, seen = torch.empty(bounds[-1] * heads, dtype=torch.int64), (~hidden).nonzero()[:, 0]
    places[rows[seen]] = seen
    return Groups(shapes, rows, places, hidden.nonzero()[:, 0] if hidden.any() else None)


def _alike(bounds: tuple[int, ...], heads: int) -> list[list[tuple[int, int]]]:
    """Documents of like length, the longest first: (length, begin) of each, group by group."""
    grouped: list[list[tuple[int, int]]] = []
    area = 0  # of a head's scores of the last group's documents
    for begin, end in sorted(pairwise(bounds), key=lambda ends: (ends[0] - ends[1], ends[0])):
        length, area = end - begin, area + (end - begin) ** 2
        count, widest = (len(grouped[-1]) + 1, grouped[-1][0][0]) if grouped else (1, length)
        fits = count * widest**2 <= FILLED * area and count * heads * widest * _queries(widest) <= SCORES
        if grouped and fits:
            grouped[-1].append((length, begin))
        else:
            grouped.append([(length, begin)])
            area = length**2
    return grouped


def _queries(length: int) -> int:
    """How many queries of documents this long are computed at a time."""
    return length if length <= WHOLE else QUERIES


def _by_token(x: Tensor) -> Tensor:
    """(B, heads, T, ...) as (B T, heads ...)."""
    return x.transpose(1, 2).reshape(x.size(0) * x.size(2), -1)


def _by_head(x: Tensor) -> Tensor:
    """(B, heads, T, D) as (B T heads, D)."""
    return x.transpose(1, 2).reshape(-1, x.size(-1))


@torch.library.custom_op("litft::attend_documents", mutates_args=())
def attend_documents(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention within documents, and the logarithm of each softmax's sum (B, H, T); window 0: none.

    Group after group: no kernel of the CPU skips what a mask hides, and most of a packed row is hidden. One operator to
    autograd and the compiler, since how many documents there are is data.
    """
    groups = _groups(tuple(cu_seqlens.tolist()), q.size(1), 1)
    found = []
    for own in groups.each(q, k, v):
        forward = aten._scaled_dot_product_flash_attention_for_cpu
        found.append(forward(*own, 0.0, **_masking(own[0], window), scale=scale))
    out, sums = (groups.whole(parts, q.size(0)) for parts in zip(*found, strict=True))
    return out, sums


@torch.library.custom_op("litft::attend_documents_backward", mutates_args=())
def attend_documents_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, cu_seqlens: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    batch, heads, _, width = q.shape
    bounds = tuple(cu_seqlens.tolist())
    if q.dtype == torch.bfloat16 and not window:
        return _gradients(grad, q, k, v, out, sums, bounds, scale)
    groups = _groups(bounds, heads, 1)
    rows = [groups.gather(_by_token(x)) for x in (grad, q, k, v, out, sums)]
    groups.without_beyond(rows[0])
    found = []
    for shape, *parts, s in zip(groups.shapes, *(groups.split(x) for x in rows), strict=True):
        own = [part.view(*shape, -1, width).transpose(1, 2) for part in parts]
        own.append(s.view(*shape, heads).transpose(1, 2))
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        found.append(backward(*own, 0.0, **_masking(own[1], window), scale=scale))
    return tuple(groups.whole(parts, batch) for parts in zip(*found, strict=True))


def _masking(q: Tensor, window: int) -> dict[str, bool | Tensor | None]:
    """What torch's kernel is told of what is visible."""
    if not 0 < window < q.size(2):
        return {"is_causal": True}
    hidden = ~attention_mask(q, q, None, window)
    return {"is_causal": False, "attn_mask": torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(hidden, -torch.inf)}


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, bounds: tuple[int, ...], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention's backward (arXiv 2205.14135, appendix B.2) as bf16 matrix products; torch's kernel takes twice the time.

    With P = exp(scale Q K^T - sums): dV = P^T dO, dS = P * (dO V^T - rowsum(dO * O)), dQ = scale dS K, dK = scale dS^T Q.
    What is subtracted from a product is made part of it, as columns that meet ones: so it happens in the fp32 in which the
    product is summed, and no score is rounded while it is large. The columns stay until the end: products of whole
    matrices are not copied first.
    """
    batch, heads, length, width = q.shape
    power = math.frexp(scale)[0] == 0.5  # then it multiplies a number without rounding it
    inner, outer = (scale, 1.0) if power else (1.0, scale)
    of_q, of_k = _groups(bounds, heads, heads), _groups(bounds, heads, k.size(1))
    rate = _by_head(grad)
    queries = of_q.gather(torch.cat((_by_head(q) * inner, _split(_by_token(sums).flatten() / -outer)), -1))
    rates = of_q.gather(torch.cat((rate, _split(-(rate.float() * _by_head(out)).sum(-1))), -1))
    keys, values = (of_k.gather(F.pad(_by_head(x), (0, BF16_TERMS), value=1.0)) for x in (k, v))
    of_q.without_beyond(rates)
    d_q, d_k, d_v = (torch.empty_like(x) for x in (queries, keys, values))
    shared = [of_k.split(x) for x in (keys, values, d_k, d_v)]
    for (count, size), *parts in zip(of_q.shapes, *(of_q.split(x) for x in (queries, rates, d_q)), *shared, strict=True):
        _add_up(*(part.view(count * k.size(1), -1, size, width + BF16_TERMS) for part in parts), 1.0 if power else outer)

    def whole(groups: Groups, rows: Tensor) -> Tensor:
        return groups.spread(rows[:, :width]).view(batch, length, -1, width).transpose(1, 2)

    d_q, d_k, d_v = whole(of_q, d_q), whole(of_k, d_k), whole(of_k, d_v)
    return d_q.mul_(scale), d_k if power else d_k.mul_(outer), d_v


def _add_up(
    query: Tensor, rate: Tensor, d_q: Tensor, key: Tensor, value: Tensor, d_k: Tensor, d_v: Tensor, scale: float
) -> None:
    """A group's gradients, into d_q (N K, H / K, length, W) and d_k, d_v (N K, 1, length, W); the rest alike."""
    key, value, length, step = key[:, 0], value[:, 0], key.size(2), _queries(key.size(2))
    sum_k, sum_v = torch.zeros(2, *key.shape) if step < length else (0, 0)  # fp32
    for start in range(0, length, step):
        stop = min(length, start + step)
        # the queries that share keys, one behind the other: (N K, H / K * n, W)
        own, own_rate = (x[:, :, start:stop].reshape(len(key), -1, key.size(-1)) for x in (query, rate))
        shares = torch.bmm(own, key[:, :stop].mT)  # (N K, H / K * n, S)
        shares = (shares if scale == 1 else shares.mul_(scale)).exp_()
        shares.view(-1, stop - start, stop).tril_(start)
        d_scores = torch.bmm(own_rate, value[:, :stop].mT).mul_(shares)
        d_q[:, :, start:stop] = torch.bmm(d_scores, key[:, :stop]).view(*d_q.shape[:2], stop - start, -1)
        of_k, of_v = torch.bmm(d_scores.mT, own), torch.bmm(shares.mT, own_rate)
        if step < length:
            sum_k[:, :stop] += of_k
            sum_v[:, :stop] += of_v
        else:
            sum_k, sum_v = of_k, of_v
    d_k[:, 0], d_v[:, 0] = sum_k, sum_v


BF16_TERMS = 3


def _split(x: Tensor) -> Tensor:
    """fp32 numbers as bf16 ones that sum up to them: (..., PIECES)."""
    first = x.bfloat16()
    second = (x - first).bfloat16()
    return torch.stack((first, second, (x - first - second).bfloat16()), -1)


def _rows_first(x: Tensor) -> Tensor:
    """Room for as much as x (B, heads, T, D), in memory as (B, T, heads, D): how Linears write and read it."""
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


@attend_documents.register_fake
def _(q, k, v, cu_seqlens, window, scale):
    sums = q.new_empty(q.size(0), q.size(2), q.size(1), dtype=torch.promote_types(q.dtype, torch.float32))
    return _rows_first(q), sums.transpose(1, 2)


@attend_documents_backward.register_fake
def _(grad, q, k, v, out, sums, cu_seqlens, window, scale):
    return tuple(_rows_first(x) for x in (q, k, v))


def _keep(ctx, inputs, output) -> None:
    q, k, v, cu_seqlens, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def _backward(ctx, grad: Tensor, _):
    return *attend_documents_backward(grad, *ctx.saved_tensors, ctx.window, ctx.scale), None, None, None


attend_documents.register_autograd(_backward, setup_context=_keep)


def attend_packed_eagerly(
    q: Tensor, k: Tensor, v: Tensor, documents: PackedSequences, window: int | None, *settings
) -> Tensor:
    """Attention written out, group after group of documents."""
    groups = _groups(tuple(documents.cu_seqlens.tolist()), q.size(1), 1)
    out = [eager_attention(*own, attention_mask(*own[:2], None, window), *settings) for own in groups.each(q, k, v)]
    return groups.whole(out, q.size(0))
