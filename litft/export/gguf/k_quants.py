"""Encode weights as llama.cpp's K-quants: Q4_K, Q5_K and Q6_K, without an importance matrix.

Every block of 256 weights has sub-blocks, whose scales (and minima) are small integers times a
scale of the block. As in ggml-quants.c, the scale of a sub-block is the best of some twenty
candidates, by a weighted squared error; here all sub-blocks are searched at once.
Dimensions: N blocks, S sub-blocks, W weights of a sub-block.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256
# blocks that are encoded together: what is computed on them stays in the processor's cache
TILE = 1024
# below this, all weights of a sub-block count as zero
SMALLEST = 1e-15


@dataclass(frozen=True)
class _Candidates:
    """The scales that are tried for a sub-block with a minimum: (levels + offset) / range, for so
    many offsets."""

    levels: int
    first: float
    step: float
    count: int


_Q4_K = _Candidates(levels=15, first=-1.0, step=0.1, count=21)
_Q5_K = _Candidates(levels=31, first=-0.5, step=0.1, count=16)


def quantize_q4_k(blocks: Tensor) -> Tensor:
    """Return blocks (N, 256) in fp32 as bytes (N, 144)."""
    levels, head = _levels_with_minimum(blocks, _Q4_K)
    return torch.cat((head, _nibbles(levels)), dim=1)


def quantize_q5_k(blocks: Tensor) -> Tensor:
    """Return blocks (N, 256) in fp32 as bytes (N, 176)."""
    levels, head = _levels_with_minimum(blocks, _Q5_K)
    # the fifth bit of the eight sub-blocks: bit i of a byte is that of sub-block i
    fifth = (levels >> 4) << torch.arange(8, dtype=torch.uint8)[:, None]
    high = fifth.sum(dim=1, dtype=torch.uint8)
    return torch.cat((head, high, _nibbles(levels & 15)), dim=1)


def quantize_q6_k(blocks: Tensor) -> Tensor:
    """Return blocks (N, 256) in fp32 as bytes (N, 210)."""
    # (N, 16 sub-blocks, 16 weights)
    weights = blocks.view(-1, 16, 16)
    transposed = weights.permute(2, 0, 1).reshape(16, -1)
    scales = _symmetric_scales(transposed).view(-1, 16)

    # the scale of largest size becomes -128
    largest = scales.gather(1, scales.abs().argmax(dim=1, keepdim=True))
    is_zero = largest.abs() < SMALLEST
    inverse = -128.0 / largest.masked_fill(is_zero, 1.0)
    block_scale = (1 / inverse).masked_fill(is_zero, 0.0).half()
    small_scales = (inverse * scales).round()
    small_scales = small_scales.clamp(max=127).masked_fill(is_zero, 0.0)

    # with a scale of zero all values are zero, so the levels do not matter
    unit = (block_scale.float() * small_scales)[..., None]
    levels = (weights / unit).round()
    levels = levels.clamp(-32, 31) + 32
    levels = levels.masked_fill(unit == 0, 0.0)
    parts = (
        _six_bits(levels.to(torch.uint8)),
        small_scales.to(torch.int8).view(torch.uint8),
        block_scale.view(torch.uint8),
    )
    return torch.cat(parts, dim=1)


def _six_bits(levels: Tensor) -> Tensor:
    """Return levels (N, 16, 16) of 6 bits as bytes (N, 192): first the lower four bits of all, then
    the upper two."""
    # two halves of 128 weights, each of four rows of 32
    rows = levels.view(-1, 2, 4, 32)
    lower = rows & 15
    # a byte has the bits of two rows that are two apart
    low, high = lower.chunk(2, dim=2)
    lower = low | high << 4
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    upper = rows >> 4
    upper = upper << shifts[:, None]
    upper = upper.sum(dim=2, dtype=torch.uint8)
    parts = (lower.flatten(2), upper)
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def _symmetric_scales(weights: Tensor) -> Tensor:
    """Return the best scales (S,) of sub-blocks (W, S) for levels from -32 to 31; errors count by
    the square of the weight."""
    position = weights.abs().argmax(dim=0, keepdim=True)
    largest = weights.gather(0, position)[0]
    is_zero = largest.abs() < SMALLEST
    largest = largest.masked_fill(is_zero, 1.0)
    squares = weights * weights
    cubes = squares * weights
    scale = torch.zeros_like(largest)
    best = torch.zeros_like(largest)
    # ggml begins with the range itself
    for offset in (0, *range(-9, 0), *range(1, 10)):
        span = torch.tensor(32.0) + torch.tensor(0.1) * offset
        levels = weights * (-span / largest)
        levels.round_().clamp_(-32, 31)
        with_weights = _total(cubes * levels)
        with_levels = _total((squares * levels).mul_(levels))
        is_valid = with_levels > 0
        new_scale = with_weights / with_levels
        if offset == 0:
            scale = torch.where(is_valid, new_scale, scale)
            best = scale * with_weights
            continue
        is_better = with_weights * with_weights > best * with_levels
        is_better &= is_valid
        scale = torch.where(is_better, new_scale, scale)
        best = torch.where(is_better, scale * with_weights, best)
    return scale.masked_fill(is_zero, 0.0)


def _levels_with_minimum(blocks: Tensor, candidates: _Candidates) -> tuple[Tensor, Tensor]:
    """Return the levels (N, 8, 32) of blocks, and the first 16 bytes of the blocks: two scales and
    the packed small scales."""
    # (N, 8 sub-blocks, 32 weights)
    weights = blocks.view(-1, 8, 32)
    search = _Search(weights.permute(2, 0, 1).reshape(32, -1), candidates)
    search.run()
    block_scale, small_scales = _small_integers(search.scale.view(-1, 8))
    block_minimum, small_minima = _small_integers(-search.minimum.view(-1, 8))

    # with a scale of zero all values are the minimum, so the levels do not matter
    unit = (block_scale.float() * small_scales)[..., None]
    shift = (block_minimum.float() * small_minima)[..., None]
    levels = ((weights + shift) / unit).round()
    levels = levels.clamp(0, candidates.levels)
    levels = levels.masked_fill(unit == 0, 0.0)
    parts = (
        block_scale.view(torch.uint8),
        block_minimum.view(torch.uint8),
        _packed(small_scales.to(torch.uint8), small_minima.to(torch.uint8)),
    )
    return levels.to(torch.uint8), torch.cat(parts, dim=1)


def _small_integers(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return values (N, 8) of at least 0 as a fp16 scale (N, 1) times integers from 0 to 63, in
    fp32."""
    # adding zero makes -0 a positive one
    largest = values.amax(dim=1, keepdim=True).clamp(min=0) + 0.0
    # torch multiplies by a reciprocal instead of dividing by or into a number
    most = torch.full_like(largest, 63.0)
    inverse = torch.where(largest > 0, most / largest, torch.zeros_like(largest))
    return (largest / most).half(), (inverse * values).round().clamp(0, 63)


def _packed(scales: Tensor, minima: Tensor) -> Tensor:
    """Return eight scales and eight minima (N, 8) of 6 bits each as 12 bytes (N, 12)."""
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    third = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    return torch.cat((first, second, third), dim=1)


def _nibbles(levels: Tensor) -> Tensor:
    """Return levels (N, 8, 32) of 4 bits as bytes (N, 128): each has one of two sub-blocks that
    follow each other."""
    pairs = levels.view(-1, 4, 2, 32)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)


class _Search:
    """The search for scales (S,) and minima (S,) of sub-blocks (W, S): a weight is
    scale * level + minimum.

    Errors count by the size of the weight and the root mean square of its sub-block.
    """

    def __init__(self, weights: Tensor, candidates: _Candidates) -> None:
        self.weights = weights
        self.candidates = candidates
        mean_square = _total(weights.square()) / weights.size(0)
        # in double precision, since torch's root in fp32 is not always rounded to the nearest
        root = mean_square.double().sqrt().float()
        self.importance = root + weights.abs()
        self.total = _total(self.importance)
        self.total_of_weights = _total(self.importance * weights)
        self.highest = weights.amax(dim=0)
        self.minimum = weights.amin(dim=0).clamp(max=0)
        self.scale = torch.zeros_like(self.minimum)
        self.levels = torch.empty_like(weights)
        self.scratch = torch.empty_like(weights)

    def run(self) -> None:
        """Find `scale` and `minimum`."""
        most = torch.tensor(float(self.candidates.levels))
        is_flat = self.highest == self.minimum
        inverse = most / (self.highest - self.minimum)
        self._choose_levels(inverse)
        self.scale = 1 / inverse
        best = self._error(self.scale, self.minimum)
        for number in range(self.candidates.count):
            # as in ggml, a better minimum counts for the levels of the next candidates, too
            offset = torch.tensor(self.candidates.first)
            offset = offset + torch.tensor(self.candidates.step) * number
            self._choose_levels((offset + most) / (self.highest - self.minimum))
            scale, minimum, is_solution = self._solution()
            error = self._error(scale, minimum)
            is_better = is_solution & (error < best)
            best = torch.where(is_better, error, best)
            self.scale = torch.where(is_better, scale, self.scale)
            self.minimum = torch.where(is_better, minimum, self.minimum)
        self.scale = self.scale.masked_fill(is_flat, 0.0)

    def _choose_levels(self, inverse: Tensor) -> None:
        """Set `levels` to the nearest ones for a scale of 1 / inverse."""
        torch.sub(self.weights, self.minimum, out=self.levels)
        self.levels.mul_(inverse).round_()
        self.levels.clamp_(0, self.candidates.levels)

    def _solution(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scale and the minimum of least error for the levels, and where they exist."""
        torch.mul(self.importance, self.levels, out=self.scratch)
        of_levels = _total(self.scratch)
        of_products = _total(self.scratch * self.weights)
        of_squares = _total(self.scratch.mul_(self.levels))
        # of two linear equations
        determinant = self.total * of_squares
        determinant -= of_levels * of_levels
        scale = self.total * of_products
        scale -= self.total_of_weights * of_levels
        scale /= determinant
        minimum = self.total_of_weights * of_squares
        minimum -= of_levels * of_products
        minimum /= determinant
        # a minimum is never above zero
        scale = torch.where(minimum > 0, of_products / of_squares, scale)
        return scale, minimum.clamp(max=0), determinant > 0

    def _error(self, scale: Tensor, minimum: Tensor) -> Tensor:
        """Return the weighted squared error (S,) of the levels."""
        torch.mul(self.levels, scale, out=self.scratch)
        self.scratch.add_(minimum).sub_(self.weights)
        self.scratch.square_().mul_(self.importance)
        return _total(self.scratch)


def _total(values: Tensor) -> Tensor:
    """Return the sums (S,) over the first dimension of (W, S), added one after the other.

    Rounding decides between candidates of nearly the same error, so this order makes the bytes
    those of ggml.
    """
    first, *others = values.unbind()
    total = first.clone()
    for row in others:
        total += row
    return total


def in_tiles(encode: Callable[[Tensor], Tensor], weights: Tensor) -> Tensor:
    """Return a tensor (..., C) encoded, as bytes (..., B): C is a multiple of 256."""
    tiles = weights.reshape(-1, BLOCK).float().split(TILE)
    workers = torch.get_num_threads()
    # each thread has a tile of its own, which is too small to be shared
    with ThreadPoolExecutor(
        workers, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        encoded = list(pool.map(encode, tiles))
    return torch.cat(encoded).view(*weights.shape[:-1], -1)
