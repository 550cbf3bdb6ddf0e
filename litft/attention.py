"""The one attention face: `attend`. Which kernel runs is decided here and nowhere else."""

import inspect
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from litft.cache import LayerCache

# B batch, T queries, S keys, H query heads, K key/value heads, D head dim, N documents

QUERIES = 192  # at a time in the CPU's backward: their scores stay in its cache, and the keys behind them are left out
aten = torch.ops.aten
# torch 2.11 groups heads unasked
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


class Documents(NamedTuple):
    """Which tokens of a batch see each other. Made once a batch, on the host, so that no GPU is asked."""

    ids: Tensor  # (B, T) integers, one value a document of its row
    starts: Tensor  # (N + 1,) int32: where documents begin among the flattened B x T tokens, and B x T itself

    @classmethod
    def of(cls, ids: Tensor) -> "Documents":
        """From the ids alone; a row ends its last document."""
        begins = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True).flatten()
        starts = F.pad(begins.nonzero()[:, 0], (0, 1), value=ids.numel())
        return cls(ids, starts.to(torch.int32))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents | None = None,
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
    if cache is not None:
        k, v = cache.extend(k, v)
    if q.size(2) == 1 and window is not None:  # decoding: the newest token sees the last keys, no mask needed
        k, v, window = k[:, :, -window:], v[:, :, -window:], None
    scale = q.size(-1) ** -0.5 if scale is None else scale
    square, on_cpu = q.size(2) == k.size(2), q.device.type == "cpu"
    if softcap is not None or sinks is not None:
        if documents is not None and square and on_cpu:
            return _each_plainly(q, k, v, documents, window, softcap, sinks, scale)
        return attend_plainly(q, k, v, visible(q, k, documents, window), softcap, sinks, scale)
    if square and q.size(2) > 1:
        if on_cpu:
            return attend_documents(q, k, v, _starts(q, documents), window or 0, scale)[0]
        if (documents is not None or window is not None) and q.dtype != torch.float32:
            return _attend_varlen(q, k, v, _starts(q, documents), window, scale)
    grouped, causal = q.size(1) != k.size(1), square and q.size(2) > 1
    if documents is None and window is None and (square or q.size(2) == 1):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    mask = visible(q, k, documents, window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _starts(q: Tensor, documents: Documents | None) -> Tensor:
    """Where documents begin; by default each row is one."""
    if documents is not None:
        return documents.starts
    return torch.arange(q.size(0) + 1, device=q.device, dtype=torch.int32) * q.size(2)


def _attend_varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, window: int | None, scale: float) -> Tensor:
    """The GPU's kernel for documents one behind the other: what one does not see of another is not computed."""
    rows, longest = q.size(0), q.size(2)  # a bound that needs no look at the documents, and changes no result
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (B T, heads, D)
    seen = (-1 if window is None else window - 1, 0)
    y = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale, window_size=seen, **GROUPED)
    return y.unflatten(0, (rows, longest)).transpose(1, 2)


# ---- on a CPU -------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Some documents of one length: these rows of a batch, from token `start` to `stop`."""

    rows: slice
    start: int
    stop: int

    def of(self, x: Tensor) -> Tensor:
        """Their part of x (B, heads, T, ...)."""
        return x[self.rows, :, self.start : self.stop]


def _parts(starts: Tensor, batch: int, length: int) -> Iterator[Part]:
    """The documents one by one, or all at once where each row is one."""
    bounds = starts.tolist()
    if len(bounds) == batch + 1:
        yield Part(slice(None), 0, length)
        return
    for begin, end in pairwise(bounds):
        row = begin // length
        yield Part(slice(row, row + 1), begin - row * length, end - row * length)


@torch.library.custom_op("litft::attend_documents", mutates_args=())
def attend_documents(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention within documents, and the logarithm of each softmax's sum (B, H, T); window 0: none.

    Document after document: no kernel of the CPU skips what a mask hides, and most of a packed row is hidden. One
    operator to autograd and the compiler, since how many there are is data.
    """
    batch, heads, length, _ = q.shape
    out = _rows_first(q)
    sums = q.new_empty(batch, heads, length, dtype=torch.promote_types(q.dtype, torch.float32))
    for part in _parts(starts, batch, length):
        y, s = aten._scaled_dot_product_flash_attention_for_cpu(
            *(part.of(x) for x in (q, k, v)), 0.0, **_masking(part, window, q), scale=scale
        )
        part.of(out).copy_(y)
        part.of(sums).copy_(s)
    return out, sums


@torch.library.custom_op("litft::attend_documents_backward", mutates_args=())
def attend_documents_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, starts: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    if q.dtype == torch.bfloat16 and not window:
        return _gradients(grad, q, k, v, out, sums, starts, scale)
    grads = tuple(_rows_first(x) for x in (q, k, v))
    for part in _parts(starts, q.size(0), q.size(2)):
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(part.of(x) for x in (grad, q, k, v, out, sums)), 0.0, **_masking(part, window, q), scale=scale
        )
        for whole, value in zip(grads, found, strict=True):
            part.of(whole).copy_(value)
    return grads


def _masking(part: Part, window: int, q: Tensor) -> dict[str, bool | Tensor | None]:
    """What torch's kernel is told of what is visible."""
    length = part.stop - part.start
    if not 0 < window < length:
        return {"is_causal": True}
    x = q[:1, :, :length]
    hidden = ~visible(x, x, None, window)
    return {"is_causal": False, "attn_mask": torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(hidden, -torch.inf)}


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, starts: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention's backward (arXiv 2205.14135, appendix B.2) as bf16 matrix products; torch's kernel takes twice the time.

    With P = exp(scale Q K^T - sums): dV = P^T dO, dS = P * (dO V^T - rowsum(dO * O)), dQ = scale dS K, dK = scale dS^T Q.
    What is subtracted from a product is made part of it, as columns that meet ones: so it happens in the fp32 in which the
    product is summed, and no score is rounded while it is large.
    """
    width, heads, groups = q.size(-1), q.size(1), k.size(1)
    power = math.frexp(scale)[0] == 0.5  # then it multiplies a number without rounding it
    inner, outer = (scale, 1.0) if power else (1.0, scale)
    queries = torch.cat((q * inner, _split(sums / -outer)), -1)
    rates = torch.cat((grad, _split(-(grad.float() * out).sum(-1))), -1)
    keys, values = (F.pad(x, (0, PIECES), value=1.0) for x in (k, v))
    d_q, d_k, d_v = (_rows_first(x) for x in (q, k, v))
    for part in _parts(starts, q.size(0), q.size(2)):
        length = part.stop - part.start
        key, value = (part.of(x).flatten(0, 1) for x in (keys, values))  # (B K, T, D + PIECES)
        sum_k, sum_v = torch.zeros(2, *key.shape[:2], width) if length > QUERIES else (0, 0)  # fp32
        for start in range(0, length, QUERIES):
            stop = min(length, start + QUERIES)
            rows = part._replace(start=part.start + start, stop=part.start + stop)
            # the queries that share keys, one behind the other: (B K, H / K * n, D + PIECES)
            own, rate = (rows.of(x).reshape(key.size(0), -1, x.size(-1)) for x in (queries, rates))
            shares = torch.bmm(own, key[:, :stop].mT)  # (B K, H / K * n, S)
            shares = (shares if power else shares.mul_(outer)).exp_()
            shares.view(-1, stop - start, stop).tril_(start)
            d_scores = torch.bmm(rate, value[:, :stop].mT).mul_(shares)
            rows.of(d_q).copy_(torch.bmm(d_scores, key[:, :stop, :width]).view(-1, heads, stop - start, width))
            of_k, of_v = torch.bmm(d_scores.mT, own[..., :width]), torch.bmm(shares.mT, rate[..., :width])
            if length > QUERIES:
                sum_k[:, :stop] += of_k
                sum_v[:, :stop] += of_v
            else:
                sum_k, sum_v = of_k, of_v
        part.of(d_k).copy_(sum_k.view(-1, groups, length, width))
        part.of(d_v).copy_(sum_v.view(-1, groups, length, width))
    return d_q.mul_(scale), d_k if power else d_k.mul_(outer), d_v


PIECES = 3


def _split(x: Tensor) -> Tensor:
    """fp32 numbers as bf16 ones that sum up to them: (..., PIECES)."""
    first = x.bfloat16()
    second = (x - first).bfloat16()
    return torch.stack((first, second, (x - first - second).bfloat16()), -1)


def _rows_first(x: Tensor) -> Tensor:
    """Room for as much as x (B, heads, T, D), in memory as (B, T, heads, D): how Linears write and read it."""
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


@attend_documents.register_fake
def _(q, k, v, starts, window, scale):
    return _rows_first(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@attend_documents_backward.register_fake
def _(grad, q, k, v, out, sums, starts, window, scale):
    return tuple(_rows_first(x) for x in (q, k, v))


def _keep(ctx, inputs, output) -> None:
    q, k, v, starts, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, starts)


def _backward(ctx, grad: Tensor, _):
    return *attend_documents_backward(grad, *ctx.saved_tensors, ctx.window, ctx.scale), None, None, None


attend_documents.register_autograd(_backward, setup_context=_keep)


def _each_plainly(q: Tensor, k: Tensor, v: Tensor, documents: Documents, window: int | None, *settings) -> Tensor:
    """Attention written out, document after document."""
    out = []
    for part in _parts(documents.starts, q.size(0), q.size(2)):
        own = [part.of(x) for x in (q, k, v)]
        out.append(attend_plainly(*own, visible(own[0], own[1], None, window), *settings).transpose(1, 2).flatten(0, 1))
    return torch.cat(out).unflatten(0, (q.size(0), q.size(2))).transpose(1, 2)


# ---- the plain form -------------------------------------------------------------------------------------------------


def visible(q: Tensor, k: Tensor, documents: Documents | None, window: int | None) -> Tensor:
    """Which keys a query sees: booleans of shape (T, S), or (B, 1, T, S) where documents differ by row."""
    rows = torch.arange(k.size(2) - q.size(2), k.size(2), device=q.device)[:, None]
    columns = torch.arange(k.size(2), device=q.device)[None, :]
    mask = columns <= rows
    if window is not None:
        mask = mask & (columns > rows - window)
    if documents is not None:
        mask = mask & (documents.ids[:, None, :, None] == documents.ids[:, None, None, :])
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
