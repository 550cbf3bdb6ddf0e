"""Rotary position embedding: frequencies for every rope type, always in fp32, and the rotation of
queries and keys."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from litft.model.rope_config import RopeConfig

# B batch, T tokens, H heads, D head dim


def inverse_frequencies(rope: RopeConfig) -> tuple[Tensor, Tensor]:
    """Return the rotation frequencies, in radians per position, up to the original context length
    and beyond it.

    Both are fp32 tensors of shape (rope.dim / 2,). They differ only for longrope. Dynamic NTK
    depends on the sequence length and is computed by `RotaryEmbedding`. `RopeConfig` cites the
    papers; the formulas are tested against transformers.
    """
    # pair i of entries turns by theta^(-2 i / dim) a position
    frequencies = 1.0 / (
        rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    )
    if rope.rope_type in ("linear", "proportional"):
        # proportional: pairs beyond the share are not rotated
        frequencies = frequencies / rope.factor
        frequencies[int(rope.fraction * rope.dim // 2) :] = 0
    elif rope.rope_type == "llama3":
        frequencies = _llama3(frequencies, rope)
    elif rope.rope_type == "yarn":
        frequencies = _yarn(frequencies, rope)
    elif rope.rope_type == "longrope":
        short = frequencies / torch.tensor(rope.short_factor)
        long = frequencies / torch.tensor(rope.long_factor)
        return short, long
    return frequencies, frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and interpolate between them."""
    # full turns within the original context
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    # 0 for pairs with at most low_freq_factor turns, 1 from high_freq_factor turns on
    kept_share = (
        (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    ).clamp(0, 1)
    return frequencies * kept_share + frequencies / rope.factor * (1 - kept_share)


def _yarn(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Keep pairs that turn more than beta_fast times, divide those below beta_slow by the factor,
    interpolate in between."""

    def pair_index(turns: float) -> float:
        # solves turns = context * theta^(-2 i / dim) / (2 pi) for i
        return (
            rope.dim
            * math.log(rope.original_max_positions / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low = pair_index(rope.beta_fast)
    high = pair_index(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rope.dim - 1)
    # as in transformers: not 0; in a context so short that `high` is below `low`, negative
    width = (high - low) or 0.001
    slowed_share = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / width).clamp(
        0, 1
    )
    return frequencies * (1 - slowed_share) + frequencies / rope.factor * slowed_share


class CosSin(NamedTuple):
    """cos and sin for the queries and keys of a layer, (B, 1, T, rope.dim) each, and an optional
    scale of the queries."""

    # cos of every pair, repeated for the second half
    cos: Tensor
    # sin of every pair for the first half, -sin for the second
    sin: Tensor
    query_scale: Tensor | None  # (B, 1, T, 1)


class RotaryEmbedding(nn.Module):
    """Compute cos and sin for one `RopeConfig`; shared by the layers that use it."""

    def __init__(self, rope: RopeConfig) -> None:
        super().__init__()
        self.rope = rope
        self.register_buffer("short", torch.empty(0), persistent=False)
        self.register_buffer("long", torch.empty(0), persistent=False)
        self._compute(self.short.device)

    def _compute(self, device: torch.device) -> None:
        self.short, self.long = (f.to(device) for f in inverse_frequencies(self.rope))

    def _apply(self, fn, recurse: bool = True) -> "RotaryEmbedding":
        """Move the frequencies but keep them in fp32: in bf16, the angle at position 4,000 would be
        off by whole turns."""
        super()._apply(fn, recurse)
        # computed again rather than moved: `super()` may have rounded them
        if self.short.device.type != "meta":
            self._compute(self.short.device)
        return self

    def forward(
        self, positions: Tensor, max_length: Tensor | int, dtype: torch.dtype
    ) -> CosSin:
        """Return cos and sin for positions (B, T).

        max_length: where the frequencies depend on it (`RopeConfig.depends_on_length`), the length
        of each token's document (B, 1, T, 1) or of each row (B, 1, 1, 1); in generation the planned
        length. All tokens of a document use the same frequencies.
        """
        frequencies = self.short
        if self.rope.rope_type == "longrope":
            max_length = torch.as_tensor(max_length, device=positions.device)
            frequencies = torch.where(
                max_length > self.rope.original_max_positions, self.long, self.short
            )
        elif self.rope.rope_type == "dynamic":
            frequencies = self._dynamic(
                torch.as_tensor(max_length, device=positions.device)
            )

        # (B, 1, T, D / 2)
        angles = positions[:, None, :, None].float() * frequencies
        if self.rope.reversed:
            angles = -angles
        cos = angles.cos()
        sin = angles.sin()
        scale = self.rope.attention_factor
        # applied to both queries and keys: the scores change by its square
        if scale != 1:
            cos = cos * scale
            sin = sin * scale
        cos = cos.to(dtype)
        sin = sin.to(dtype)
        return CosSin(
            cos=torch.cat((cos, cos), -1),
            sin=torch.cat((sin, -sin), -1),
            query_scale=self._query_scale(positions, dtype),
        )

    def _query_scale(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        if not self.rope.query_beta:
            return None
        positions = positions[:, None, :, None] + self.rope.query_offset
        # 0 within the original context, where the scale is 1
        full_contexts = torch.floor(positions / self.rope.original_max_positions)
        return (1 + self.rope.query_beta * torch.log(1 + full_contexts)).to(dtype)

    def _dynamic(self, max_length: Tensor) -> Tensor:
        """Return NTK-aware frequencies: theta grows with the length, so that the lowest frequency
        covers that length."""
        rope = self.rope
        # 1 up to the original context, whose angles are left unchanged
        stretch = rope.factor * max_length.clamp(
            min=rope.original_max_positions
        ) / rope.original_max_positions - (rope.factor - 1)
        # the lowest frequency, theta^(-(dim - 2) / dim), is divided by `stretch`
        theta = rope.theta * stretch ** (rope.dim / (rope.dim - 2))
        return 1.0 / theta ** (
            torch.arange(0, rope.dim, 2, device=max_length.device, dtype=torch.float32)
            / rope.dim
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first entries of x (B, H, T, D) in the half-split layout: entry i pairs with entry
    i + dim / 2.

    cos and sin have the layout of `CosSin`.
    """
    if torch.compiler.is_compiling():
        return _rotate_compiled(x, cos, sin)
    if torch.is_grad_enabled():
        return _Rotation.apply(x, cos, sin)
    return _rotate_eager(x, cos, sin)


class _Rotation(torch.autograd.Function):
    """Rotation with its own backward, which rotates the gradient by the negative angles: a third of
    autograd's work.

    Rounds exactly like `_rotate_compiled`, in fewer and larger operations.
    """

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_eager(x, cos, sin)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # a rotation is orthogonal: its transpose is the rotation by the negative angle
        cos, sin = ctx.saved_tensors
        return _rotate_eager(grad, cos, -sin), None, None


def _rotate_eager(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate as `rotate` does. It writes into tensors, so callers keep it out of autograd."""
    width = cos.size(-1)
    half = width // 2
    # decode step: as few operations as possible
    if x.size(2) == 1 and x.size(-1) == width:
        # `roll` exchanges the halves of x * sin, as the two additions below do
        return (x * cos).add_((x * sin).roll(half, -1))

    # the entries beyond the rotated ones are copied
    y = torch.empty_like(x)
    y[..., width:] = x[..., width:]

    x = x[..., :width]
    rotated = y[..., :width]
    torch.mul(x, cos, out=rotated)
    # sin is negative in its second half: the halves become a cos - b sin and b cos + a sin
    sin_terms = x * sin
    rotated[..., :half].add_(sin_terms[..., half:])
    rotated[..., half:].add_(sin_terms[..., :half])
    return y


def _rotate_compiled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # computed as (B, T, H, D), so that neither the attention kernel's output nor the input of
    # o_proj is a copy
    x = x.transpose(1, 2)
    half = cos.size(-1) // 2
    cos = cos.transpose(1, 2)[..., :half]
    sin = sin.transpose(1, 2)[..., :half]
    first_half = x[..., :half]
    second_half = x[..., half : 2 * half]
    rest = x[..., 2 * half :]
    # the plane of entries i and i + half is turned by the angle
    turned_first = (first_half * cos).sub_(second_half * sin)
    turned_second = (second_half * cos).add_(first_half * sin)
    turned = torch.cat((turned_first, turned_second, rest), dim=-1)
    return turned.transpose(1, 2)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first entries of x (B, H, T, D) in the interleaved layout: entry 2 i pairs with
    entry 2 i + 1."""
    width = cos.size(-1)
    # in this layout each pair has its angle once
    cos = cos[..., : width // 2]
    sin = sin[..., : width // 2]
    rotated = x[..., :width]
    rest = x[..., width:]
    even = rotated[..., ::2]
    odd = rotated[..., 1::2]
    # the plane of entries 2 i and 2 i + 1 is turned by the angle
    turned_even = even * cos - odd * sin
    turned_odd = odd * cos + even * sin
    rotated = torch.stack((turned_even, turned_odd), dim=-1)
    return torch.cat((rotated.flatten(-2), rest), dim=-1)
