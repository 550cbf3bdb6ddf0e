"""Positions other than rotary embeddings: sinusoids added to the embedding, and ALiBi."""

import math

import torch
from torch import Tensor

# B batch, T tokens, H query heads, K key/value heads, D head dim, C channels

# bf16 represents the whole numbers up to 256
ALIBI_BLOCK = 128


def sinusoids(positions: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return sine and cosine of positions (B, T) at dim / 2 frequencies (arXiv 1706.03762, section
    3.5): (B, T, dim)."""
    half = dim // 2
    exponents = torch.arange(half, device=positions.device, dtype=torch.float32) * (
        -math.log(10000) / (half - 1)
    )
    angles = positions[..., None].float() * exponents.exp()
    return torch.cat((angles.sin(), angles.cos()), dim=-1).to(dtype)


def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> tuple[float, ...]:
    """Return the slope of each head (arXiv 2108.12409, section 3): a geometric sequence that ends
    at 2^-max_bias.

    If the number of heads is no power of two, the remaining heads have every second slope of the
    next longer sequence.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-max_bias * (head + 1) / power) for head in range(power)]
    longer = [
        2 ** (-max_bias * (head + 1) / (2 * power)) for head in range(0, 2 * power, 2)
    ]
    return tuple(slopes + longer[: num_heads - power])


def add_alibi(
    q: Tensor, k: Tensor, positions: Tensor, slopes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Extend q (B, H, T, D) and k (B, K, T, D) by two entries whose product is slope * position of
    the key / scale.

    Softmax is invariant to a constant per query, so this equals -slope * distance in every
    attention kernel. A position is split into two whole numbers that bf16 represents. positions: (B
    or 1, T); slopes: (H,).
    """
    # (B, T, 2) -> (B, K, T, 2)
    features = _block_and_rest(positions)[:, None].to(k.dtype)
    features = features.expand(k.size(0), k.size(1), -1, -1)
    # divided by the scale, by which the attention kernel multiplies the whole score
    block_slopes = slopes * (ALIBI_BLOCK / scale)
    rest_slopes = slopes / scale
    # (H, 2) -> (B, H, T, 2)
    weights = torch.stack((block_slopes, rest_slopes), dim=-1)
    weights = weights[None, :, None].to(q.dtype)
    weights = weights.expand(q.size(0), -1, q.size(2), -1)
    return torch.cat((q, weights), -1), torch.cat((k, features), -1)


def _block_and_rest(positions: Tensor) -> Tensor:
    """Split positions (B, T) into block * 128 + rest, (B, T, 2): bf16 holds both numbers exactly
    for positions up to 32,768."""
    block = torch.div(positions, ALIBI_BLOCK, rounding_mode="floor")
    rest = positions - block * ALIBI_BLOCK
    return torch.stack((block, rest), dim=-1)
