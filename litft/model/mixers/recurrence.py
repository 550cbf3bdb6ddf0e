"""Linear recurrences over a matrix-valued state, in chunks: gated linear attention and the gated
delta rule.

With a query q, key k, value v, log decay g and, for the delta rule, a write strength b for each
token and head:

    S <- exp(g) S                                  # (K, V)
    S <- S + k^T v                                 # linear attention, Mamba-2 (arXiv 2405.21060)
    S <- S + b k^T (v - k S)                       # delta rule (arXiv 2412.06464)
    y = q S

g is one number a head, or one for each row of the state (Kimi Delta Attention, arXiv 2510.26692).
All in fp32; on a GPU, the kernels of `kernels.py` multiply in bf16.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from litft.model.mixers import kernels
from litft.model.packed_sequences import PackedSequences

# B batch, T tokens, H heads, G groups of R heads that share queries and keys, K key dim, V value
# dim, N chunks of L tokens

CHUNK_TOKENS = 64  # tokens


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor | None,
    documents: PackedSequences | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return y (B, T, H, V) and the state after the last token (B, H, K, V) in fp32.

    q, k: (B, T, G, K); head h uses those of group h // (H / G). v: (B, T, H, V). g: (B, T, H), or
    with G = H (B, T, H, K) for a decay of each row. b: (B, T, H) for the delta rule. state: before
    the first token. documents: the state starts anew with each; no state is taken or returned.
    """
    # a decode step: the recurrence itself, with one query and key for each head
    if v.size(1) == 1 and state is not None:
        q, k = (x.repeat_interleave(v.size(2) // x.size(2), dim=2) for x in (q, k))
        # (B, 1, H, .) -> (B, H, .)
        q, k, v, g = (x.float().squeeze(1) for x in (q, k, v, g))
        if b is not None:
            b = b.float().squeeze(1)
        return _step(q, k, v, g, b, state)

    # Compiled code sees a single operator, since the number of chunks depends on the length. Block
    # masks are no tensors, and no mixer reads them: the first three fields are enough.
    if torch.compiler.is_compiling():
        lengths = []
        if documents is not None:
            for x in documents[:3]:
                if x is not None:
                    lengths.append(x)
        y, state = recurrence_operator(q, k, v, g, b, lengths, state)
        return y, state if documents is None else None

    # a decay of each row has a kernel only together with the delta rule, and key dims have a limit
    has_kernel = (b is not None or g.dim() == 3) and k.size(3) <= kernels.MAX_KEY_DIM
    if has_kernel and kernels.can_run_recurrence(q, k, v):
        return kernels.fused_recurrence(q, k, v, g, b, documents, state)
    ids = None if documents is None else documents.ids
    return _chunked(q, k, v, g, b, ids, state)


def _step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Do the same for a single token, whose dimension T is missing in the arguments."""
    # one decay a head, or one for each row of the state: (B, H, 1, 1) or (B, H, K, 1)
    decay = g[..., None, None] if g.dim() == 2 else g[..., None]
    state = state * decay.exp()
    # delta rule: only what the decayed state does not predict yet is written
    if b is not None:
        v = (v - (k[..., None, :] @ state).squeeze(-2)) * b[..., None]
    state = state + k[..., None] * v[..., None, :]
    return (q[..., None, :] @ state).transpose(1, 2), state


# one operator, so that a piece of a prompt is one graph
@torch.library.custom_op("litft::recurrence", mutates_args=())
def recurrence_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor | None,
    documents: Sequence[Tensor],
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return `recurrence`'s y (B, T, H, V) and state (B, H, K, V), both in fp32, in compiled code
    without gradients.

    documents: the tensors of PackedSequences, at least ids (B, T) and cu_seqlens, or none. An
    operator returns no None: the state after documents is an empty tensor, (0,). The other
    arguments have the shapes of `recurrence`.
    """
    packed = None
    if documents:
        ids, cu_seqlens, *others = documents
        packed = PackedSequences(ids, cu_seqlens)
        if others:
            packed = packed._replace(host_cu_seqlens=others[0])
    y, new_state = recurrence(q, k, v, g, b, packed, state)
    if new_state is None:
        new_state = y.new_empty(0, dtype=torch.float32)
    return y.float().contiguous(), new_state


@recurrence_operator.register_fake
def _(q, k, v, g, b, documents, state):
    if documents:
        state_shape = (0,)
    else:
        state_shape = (v.size(0), v.size(2), k.size(3), v.size(3))
    return v.new_empty(v.shape, dtype=torch.float32), v.new_empty(
        state_shape, dtype=torch.float32
    )


def _chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor | None,
    ids: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The plain form of `recurrence`: products of matrices within a chunk, and a loop over chunks
    for the state. ids: (B, T), of documents; with them, no state is returned."""
    length = v.size(1)
    groups = k.size(2)
    by_row = g.dim() == 4
    if not by_row:
        g = g[..., None]
    q, k, v, g = (_in_chunks(x, groups) for x in (q, k, v, g))  # (B, G, 1 or R, N, L, .)
    if b is not None:
        b = _in_chunks(b[..., None], groups)
    decays = _decays(g, ids)

    # products of all pairs of tokens within a chunk, (B, G, R, N, L, L)
    if by_row:
        scores, system = _row_decay_pairs(q, k, b, decays.total, decays.visible)
    else:
        scores, system = _pairs(q, k, b, decays.total, decays.visible)
    k_start = None
    # there is a system for the delta rule
    if b is not None and system is not None:
        v, k_start = _delta_values(k, v, b, system, decays.from_start)

    y, state = _over_chunks(q, k, v, k_start, scores, decays, by_row, state)
    # (B, G, R, N, L, V) -> (B, T, H, V), without the padding of the last chunk
    y = y.flatten(3, 4)[:, :, :, :length].flatten(1, 2).transpose(1, 2)
    if ids is not None:
        return y, None
    return y, state.flatten(1, 2)


class _Decays(NamedTuple):
    """Which tokens of a chunk see each other, and how the state decays between them."""

    # (L, L), or with documents (B, 1, 1, N, L, L): a token sees itself and the earlier ones of its
    # chunk and document
    visible: Tensor
    # log decay from the start of the chunk, or of the document in it, to each token: (B, G, R, N,
    # L, K or 1)
    total: Tensor
    # what a token sees of the state at the start of its chunk
    from_start: Tensor
    # the decay of a token's contribution k v^T up to the end of the chunk
    to_end: Tensor
    # decay of the state over the whole chunk, (B, G, R, N, K or 1); 0 if the last token is of
    # another document than the token before the chunk
    carry: Tensor


def _decays(g: Tensor, ids: Tensor | None) -> _Decays:
    """Compute the decays of the log decays g (B, G, R, N, L, K or 1) of single tokens."""
    visible = torch.ones(
        CHUNK_TOKENS, CHUNK_TOKENS, dtype=torch.bool, device=g.device
    ).tril()
    if ids is None:
        enters = leaves = passes = None
        total = g.cumsum(-2)
    else:
        visible, enters, leaves, passes = _document_masks(ids, visible)
        total = visible.to(g.dtype) @ g
    from_start = _masked_exp(total, enters)
    to_end = _masked_exp(total[..., -1:, :] - total, leaves)
    carry = total[..., -1, :].exp()
    if passes is not None:
        carry = carry * passes
    return _Decays(visible, total, from_start, to_end, carry)


def _delta_values(
    k: Tensor, v: Tensor, b: Tensor, system: Tensor, from_start: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what the delta rule writes of each value, and the keys with which the value subtracts
    what the state at the start of its chunk holds."""
    # S_t = a_t S_(t-1) + k_t u_t^T with u_t = b_t (v_t - S_(t-1)^T k_t): within a chunk, the u are
    # the solution of a triangular system (the WY form), here with two right-hand sides
    right = torch.cat((v * b, k * b * from_start), -1)
    solved = torch.linalg.solve_triangular(
        system.tril(-1), right, upper=False, unitriangular=True
    )
    return solved.split((v.size(-1), k.size(-1)), dim=-1)


def _over_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_start: Tensor | None,
    scores: Tensor,
    decays: _Decays,
    by_row: bool,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs (B, G, R, N, L, V), and the last state; k_start: from `_delta_values`."""
    heads = v.shape[:3]  # (B, G, R)
    if state is None:
        state = v.new_zeros(*heads, k.size(-1), v.size(-1))
    else:
        state = state.view(*heads, *state.shape[2:])

    # a decay of each row scales queries and keys; one decay a head scales the products instead
    if by_row:
        q = q * decays.from_start
        k = k * decays.to_end

    # The loop has one step a chunk: it adds what the
    # incoming state contributes, and passes the state on.
    outputs = []
    for n in range(v.size(3)):
        values = v[:, :, :, n]
        if k_start is not None:
            values = values - k_start[:, :, :, n] @ state
        seen = q[:, :, :, n] @ state
        if not by_row:
            seen = seen * decays.from_start[:, :, :, n]
        outputs.append(scores[:, :, :, n] @ values + seen)
        # what the tokens of the chunk leave in the state: (B, G, R, K, V)
        if not by_row:
            values = values * decays.to_end[:, :, :, n]
        added = k[:, :, :, n].mT @ values
        state = state * decays.carry[:, :, :, n, :, None] + added
    return torch.stack(outputs, 3), state


def _pairs(
    q: Tensor, k: Tensor, b: Tensor | None, total: Tensor, visible: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return q k and b k k of all pairs of tokens of a chunk, decayed from the second to the first:
    (B, G, R, N, L, L)."""
    # The mask comes before exp: from a later to an earlier token the exponent is positive, and exp
    # could overflow.
    between = (total - total.mT).masked_fill(~visible, -torch.inf).exp()
    scores = q @ k.mT * between
    if b is None:
        return scores, None
    return scores, k @ k.mT * between * b


def _row_decay_pairs(
    q: Tensor, k: Tensor, b: Tensor | None, total: Tensor, visible: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return what `_pairs` does, with a decay for each entry of q and k.

    Pairs of tokens in two neighbouring blocks are one product: the first factor decays from the end
    of the left block to its token in the right one, the second from its token in the left block to
    that end. No exponent is positive, as one of a single product for the chunk would be. Two such
    blocks make one of twice the size.
    """
    # (B, G, R, N, 1 or 2, L, K)
    if b is None:
        rows = q[..., None, :, :]
    else:
        rows = torch.stack((q, k * b), -3)
    # the pairs of a token with itself, which have no decay: blocks of size 1
    scores = (rows * k[..., None, :, :]).sum(-1)
    scores = scores[..., None, None]  # (B, G, R, N, 1 or 2, L, 1, 1)
    size = 1
    while size < CHUNK_TOKENS:
        after, before = _neighbours(total, visible, size)
        # (B, G, R, N, 1 or 2, L / 2 size, size, K)
        right = rows.unflatten(-2, (-1, 2, size))[..., 1, :, :]
        right = right * after[..., None, :, :, :]
        left = k.unflatten(-2, (-1, 2, size))[..., 0, :, :] * before
        left = left[..., None, :, :, :]
        # two blocks on the diagonal become one: the left one does not see the right one
        first, second = scores.unflatten(-3, (-1, 2)).unbind(-3)
        upper = torch.cat((first, torch.zeros_like(first)), -1)
        lower = torch.cat((right @ left.mT, second), -1)
        scores = torch.cat((upper, lower), -2)
        size *= 2
    # a single block is left, of the size of the chunk
    found = scores.squeeze(-3).unbind(-3)
    if b is None:
        return found[0], None
    return found[0], found[1]


def _neighbours(total: Tensor, visible: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return two factors for each pair of neighbouring blocks of `size` tokens: the decay from the
    end of the left block to each token of the right one, and from each token of the left block to
    its end. total, visible: as in `_Decays`."""
    # (B, G, R, N, L / 2 size, size, K)
    left, right = total.unflatten(-2, (-1, 2, size)).unbind(-3)
    end = left[..., -1:, :]
    after = right - end
    before = end - left
    # without documents, `visible` is the same for all chunks: (L, L)
    if visible.dim() > 2:
        # A token that the boundary token does not see, or that does not see it, is of another
        # document: no pair may pass the boundary.
        starts = torch.arange(0, CHUNK_TOKENS, 2 * size, device=total.device)[:, None]
        ends = starts + size - 1
        left_tokens = starts + torch.arange(size, device=total.device)
        right_tokens = left_tokens + size
        sees_end = visible[..., right_tokens, ends, None]
        is_seen = visible[..., ends, left_tokens, None]
        after = after.masked_fill(~sees_end, -torch.inf)
        before = before.masked_fill(~is_seen, -torch.inf)
    return after.exp(), before.exp()


def _in_chunks(x: Tensor, groups: int) -> Tensor:
    """(B, T, H, .) -> (B, G, H / G, N, L, .) in fp32, padded with zeros."""
    # padding leaves the state as it is: a log decay of 0 keeps it, and zeros add nothing
    padded = F.pad(x.float(), (0, 0, 0, 0, 0, -x.size(1) % CHUNK_TOKENS))
    return (
        padded.transpose(1, 2).unflatten(2, (-1, CHUNK_TOKENS)).unflatten(1, (groups, -1))
    )


def _masked_exp(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return exp(x) of (B, G, R, N, L, .), 0 where the mask (B, 1, 1, N, L, 1) is False.

    The mask is applied first: exp may be infinite there, and the gradient of 0 times infinity is
    NaN.
    """
    if mask is None:
        return x.exp()
    return x.masked_fill(~mask, -torch.inf).exp()


def _document_masks(ids: Tensor, visible: Tensor) -> tuple[Tensor, ...]:
    """Return which tokens of a chunk see each other, the chunk's first state and its last, and
    which chunks pass it on."""
    # the padding belongs to the last document, so that it ends no document
    padding = -ids.size(1) % CHUNK_TOKENS
    padded = torch.cat((ids, ids[:, -1:].expand(-1, padding)), 1)
    ids = padded.unflatten(1, (-1, CHUNK_TOKENS))[:, None, None]  # (B, 1, 1, N, L)
    first = ids[..., :1, 0]
    last = ids[..., -1:]
    # the document of the token before each chunk; nothing enters the first chunk
    before = torch.cat((first - 1, last[..., :-1, 0]), -1)
    before = before[..., None]  # (B, 1, 1, N, 1)
    is_same = ids[..., :, None] == ids[..., None, :]
    enters = (ids == before)[..., None]
    leaves = (ids == last)[..., None]
    passes = last == before
    return visible & is_same, enters, leaves, passes
