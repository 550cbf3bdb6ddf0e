"""Linear recurrences over a matrix-valued state, in chunks: gated linear attention and the gated delta rule.

With a query q, key k, value v, log decay g and, for the delta rule, a write strength b for each token and head:

    S <- exp(g) S                                  # (K, V)
    S <- S + k^T v                                 # linear attention, Mamba-2 (arXiv 2405.21060)
    S <- S + b k^T (v - k S)                       # delta rule (arXiv 2412.06464)
    y = q S

g is one number a head, or one for each row of the state (Kimi Delta Attention, arXiv 2510.26692). All in fp32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# B batch, T tokens, H heads, K key dim, V value dim, N chunks, L tokens of a chunk

CHUNK = 64  # tokens; with a decay for each row of the state, whose pairs need a tensor (L, L, K): ROW_DECAY_CHUNK
ROW_DECAY_CHUNK = 16


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor | None, ids: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return y (B, T, H, V) in fp32 and the state after the last token (B, H, K, V).

    q, k: (B, T, H, K). v: (B, T, H, V). g: (B, T, H), or (B, T, H, K) for a decay of each row. b: (B, T, H) for the delta
    rule. ids: (B, T), a number for each document of a row; the state starts anew with each. state: before the first token.
    """
    if v.size(1) == 1 and state is not None:
        return _step(*(x.float().squeeze(1) for x in (q, k, v, g)), None if b is None else b.float().squeeze(1), state)
    return _chunked(q, k, v, g, b, ids, state)


def _step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """Do the same for a single token, whose dimension T is missing in the arguments."""
    state = state * (g[..., None, None] if g.dim() == 2 else g[..., None]).exp()
    if b is not None:
        v = (v - (k[..., None, :] @ state).squeeze(-2)) * b[..., None]
    state = state + k[..., None] * v[..., None, :]
    return (q[..., None, :] @ state).transpose(1, 2), state


@torch.compiler.disable  # a loop over chunks, whose number depends on the length
def _chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor | None, ids: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    length, by_row = v.size(1), g.dim() == 4
    size = ROW_DECAY_CHUNK if by_row else CHUNK
    q, k, v, g = (_in_chunks(x, size) for x in (q, k, v, g if by_row else g[..., None]))  # (B, H, N, L, .)
    visible = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
    enters = leaves = passes = None
    if ids is not None:
        visible, enters, leaves, passes = _document_masks(ids, size, state is not None, visible)
    # log decay from the start of the chunk, or of the document in it, to each token: (B, H, N, L, K or 1)
    total = g.cumsum(-2) if ids is None else visible.to(g.dtype) @ g

    def pairs(queries: Tensor) -> Tensor:
        """Return the products with the keys, decayed between the two tokens: (B, H, N, L, L)."""
        between = (total[..., :, None, :] - total[..., None, :, :]).masked_fill(~visible[..., None], -torch.inf).exp()
        if by_row:
            return (queries[..., :, None, :] * k[..., None, :, :] * between).sum(-1)
        return queries @ k.mT * between.squeeze(-1)

    from_start = _masked(total.exp(), enters)  # what a token sees of the state at the start of its chunk
    to_end = _masked((total[..., -1:, :] - total).exp(), leaves)  # what the state at the end of the chunk has of a token
    carry = total[..., -1, :].exp()  # (B, H, N, K or 1)
    carry = carry if passes is None else carry * passes
    scores, q_start, k_end, k_start = pairs(q), q * from_start, k * to_end, None
    if b is not None:  # each value is what is left after subtracting the earlier ones: a triangular system for a chunk
        b = _in_chunks(b[..., None], size)
        system, k_start = pairs(k * b).tril(-1), k * b * from_start
        solved = torch.linalg.solve_triangular(system, torch.cat((v * b, k_start), -1), upper=False, unitriangular=True)
        v, k_start = solved.split((v.size(-1), k.size(-1)), dim=-1)
    state = v.new_zeros(*v.shape[:2], k.size(-1), v.size(-1)) if state is None else state
    outputs = []
    for n in range(v.size(2)):
        values = v[:, :, n] if b is None else v[:, :, n] - k_start[:, :, n] @ state
        outputs.append(scores[:, :, n] @ values + q_start[:, :, n] @ state)
        state = state * carry[:, :, n, :, None] + k_end[:, :, n].mT @ values
    return torch.stack(outputs, 2).flatten(2, 3)[:, :, :length].transpose(1, 2), state


def _in_chunks(x: Tensor, size: int) -> Tensor:
    """(B, T, H, .) -> (B, H, N, L, .) in fp32, padded with zeros."""
    padded = F.pad(x.float(), (0, 0, 0, 0, 0, -x.size(1) % size))
    return padded.transpose(1, 2).unflatten(2, (-1, size))


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x (B, H, N, L, .) with zeros where the mask (B, 1, N, L, 1) is False."""
    return x if mask is None else x.masked_fill(~mask, 0)


def _document_masks(ids: Tensor, size: int, has_state: bool, visible: Tensor) -> tuple[Tensor, ...]:
    """Return which tokens of a chunk see each other, the chunk's first state and its last, and which chunks pass it on."""
    padding = -ids.size(1) % size
    ids = torch.cat((ids, ids[:, -1:].expand(-1, padding)), 1).unflatten(1, (-1, size))[:, None]  # (B, 1, N, L)
    first, last = ids[..., :1, 0], ids[..., -1:]
    before = torch.cat((first if has_state else first - 1, last[..., :-1, 0]), -1)[..., None]  # (B, 1, N, 1)
    same = visible & (ids[..., :, None] == ids[..., None, :])
    return same, (ids == before)[..., None], (ids == last)[..., None], last == before
