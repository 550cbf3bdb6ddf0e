"""Rotary position embedding: frequencies of every scaling, always in fp32, and the rotation itself."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from litft.model.config import RopeConfig

# B batch, T tokens, H heads, D head dim


def inverse_frequencies(rope: RopeConfig) -> tuple[Tensor, Tensor]:
    """The angle per position of each pair, for documents within the original context and for longer ones.

    Returns two fp32 tensors of shape (rope.dim / 2,). They differ for longrope only; dynamic NTK depends on the length
    itself and is computed by `RotaryEmbedding`. `RopeConfig` cites the papers; the formulas are tested against transformers.
    """
    plain = 1.0 / (rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim))
    if rope.rope_type == "linear":
        plain = plain / rope.factor
    elif rope.rope_type == "llama3":
        plain = _llama3(plain, rope)
    elif rope.rope_type == "yarn":
        plain = _yarn(plain, rope)
    elif rope.rope_type == "longrope":
        return plain / torch.tensor(rope.short_factor), plain / torch.tensor(rope.long_factor)
    return plain, plain


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are slowed by the factor, short ones kept, those between blended."""
    turns = rope.original_max_positions * plain / (2 * math.pi)  # over the original context
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return plain * keep + plain / rope.factor * (1 - keep)


def _yarn(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Dimensions that turn more than beta_fast times are kept, fewer than beta_slow slowed, a ramp between."""

    def dimension(turns: float) -> float:
        return rope.dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    slowed = ramp.clamp(0, 1)
    return plain * (1 - slowed) + plain / rope.factor * slowed


class CosSin(NamedTuple):
    """What rotates queries and keys of a layer, (B, 1, T, rope.dim) each, and what scales its queries, (B, 1, T, 1)."""

    cos: Tensor  # of each pair, twice
    sin: Tensor  # of each pair, and its negative: what the first of a pair is multiplied with, and what the second
    query_scale: Tensor | None


class RotaryEmbedding(nn.Module):
    """cos and sin of one `RopeConfig`, shared by the layers that use it."""

    def __init__(self, rope: RopeConfig) -> None:
        super().__init__()
        self.rope = rope
        self.register_buffer("short", torch.empty(0), persistent=False)
        self.register_buffer("long", torch.empty(0), persistent=False)
        self._compute(self.short.device)

    def _compute(self, device: torch.device) -> None:
        self.short, self.long = (f.to(device) for f in inverse_frequencies(self.rope))

    def _apply(self, fn, recurse: bool = True) -> "RotaryEmbedding":
        """Follow the model to its device, but stay exact: a cast to bf16 would move position 4,000 by whole turns."""
        super()._apply(fn, recurse)
        if self.short.device.type != "meta":
            self._compute(self.short.device)
        return self

    def forward(self, positions: Tensor, longest: Tensor | int, dtype: torch.dtype) -> CosSin:
        """The angles of positions (B, T).

        `longest` is the length of the longest document (in generation: the planned length, of each row as (B, 1, 1, 1)).
        dynamic and longrope choose their factors by it, once a call, so every token of a row sees the same frequencies.
        """
        frequencies = self.short
        if self.rope.rope_type == "longrope":
            longest = torch.as_tensor(longest, device=positions.device)
            frequencies = torch.where(longest > self.rope.original_max_positions, self.long, self.short)
        elif self.rope.rope_type == "dynamic":
            frequencies = self._dynamic(torch.as_tensor(longest, device=positions.device))
        angles = positions[:, None, :, None].float() * frequencies  # (B, 1, T, D / 2)
        scale = self.rope.attention_factor
        cos, sin = (x.to(dtype) if scale == 1 else (x * scale).to(dtype) for x in (angles.cos(), angles.sin()))
        return CosSin(torch.cat((cos, cos), -1), torch.cat((sin, -sin), -1), self._query_scale(positions, dtype))

    def _query_scale(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        if not self.rope.query_beta:
            return None
        turns = torch.floor(positions[:, None, :, None] / self.rope.original_max_positions)
        return (1 + self.rope.query_beta * torch.log(1 + turns)).to(dtype)

    def _dynamic(self, longest: Tensor) -> Tensor:
        """NTK-aware frequencies: the base grows with the length, so that the slowest pair spans just that length."""
        rope = self.rope
        stretch = rope.factor * longest.clamp(min=rope.original_max_positions) / rope.original_max_positions - (
            rope.factor - 1
        )
        base = rope.theta * stretch ** (rope.dim / (rope.dim - 2))
        return 1.0 / base ** (torch.arange(0, rope.dim, 2, device=longest.device, dtype=torch.float32) / rope.dim)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first entries of x (B, H, T, D) in the half-split layout: entry i pairs with entry i + dim / 2.

    cos and sin are as `CosSin` has them.
    """
    if torch.compiler.is_compiling():
        return _rotated(x, cos, sin)
    return _Rotation.apply(x, cos, sin) if torch.is_grad_enabled() else _turned(x, cos, sin)


class _Rotation(torch.autograd.Function):
    """Its gradient is turned back by the same angles: a third of the work of differentiating each product.

    Rounded as `_rotated` rounds, in fewer and larger operations.
    """

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, -sin), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.size(-1)
    half = width // 2
    if x.size(2) == 1 and x.size(-1) == width:  # decoding: the fewest operations
        return (x * cos).add_((x * sin).roll(half, -1))
    y = torch.empty_like(x)
    y[..., width:] = x[..., width:]
    x, turned = x[..., :width], y[..., :width]
    torch.mul(x, cos, out=turned)
    crossed = x * sin
    turned[..., :half].add_(crossed[..., half:])
    turned[..., half:].add_(crossed[..., :half])
    return y


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.size(-1) // 2
    cos, sin = cos[..., :half], sin[..., :half]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat(((first * cos).sub_(second * sin), (second * cos).add_(first * sin), rest), dim=-1)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first entries of x (B, H, T, D) in the interleaved layout: entry 2 i pairs with entry 2 i + 1."""
    width = cos.size(-1)
    cos, sin, turned, rest = cos[..., : width // 2], sin[..., : width // 2], x[..., :width], x[..., width:]
    even, odd = turned[..., ::2], turned[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((turned, rest), dim=-1)
