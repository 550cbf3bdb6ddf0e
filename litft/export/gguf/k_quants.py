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
    scales = _symmetric_scales(weights.permute(2, 0, 1).reshape(16, -1)).view(-1, 16)
    # the scale of largest size becomes -128
    largest = scales.gather(1, scales.abs().argmax(dim=1, keepdim=True))
    is_zero = largest.abs() < SMALLEST
    inverse = -128.0 / torch.where(is_zero, torch.ones_like(largest), largest)
    block_scale = torch.where(is_zero, torch.zeros_like(largest), 1 / inverse).half()
    small_scales = (inverse * scales).round().clamp(max=127)
    small_scales = torch.where(is_zero, torch.zeros_like(scales), small_scales)
    unit = (block_scale.float() * small_scales)[..., None]
    levels = (weights / unit).round().clamp(-32, 31) + 32
    # the values are zero, whatever the levels are
    levels = torch.where(unit == 0, torch.zeros_like(levels), levels).to(torch.uint8)
    # two halves of 128 weights, each of four rows of 32
    rows = levels.view(-1, 2, 4, 32)
    low = rows & 15
    low = torch.cat((low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4), dim=2)
    two_bits = (rows >> 4) << torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = two_bits.sum(dim=2, dtype=torch.uint8)
    parts = (
        low.flatten(1),
        high.flatten(1),
        small_scales.to(torch.int8).view(torch.uint8),
        block_scale.view(torch.uint8),
    )
    return torch.cat(parts, dim=1)


def _symmetric_scales(weights: Tensor) -> Tensor:
    """Return the best scales (S,) of sub-blocks (W, S) for levels from -32 to 31; errors count by
    the square of the weight."""
    largest = weights.gather(0, weights.abs().argmax(dim=0, keepdim=True))[0]
    is_zero = largest.abs() < SMALLEST
    largest = torch.where(is_zero, torch.ones_like(largest), largest)
    squares = weights * weights
    cubes = squares * weights
    levels = torch.empty_like(weights)
    product = torch.empty_like(weights)
    scale = torch.zeros_like(largest)
    best = torch.zeros_like(largest)
    # ggml begins with the range itself
    for offset in (0, *range(-9, 0), *range(1, 10)):
        span = torch.tensor(32.0) + torch.tensor(0.1) * offset
        torch.mul(weights, -span / largest, out=levels).round_().clamp_(-32, 31)
        with_weights = _total(torch.mul(cubes, levels, out=product))
        with_levels = _total(torch.mul(squares, levels, out=product).mul_(levels))
        if offset == 0:
            scale = torch.where(with_levels > 0, with_weights / with_levels, scale)
            best = scale * with_weights
            continue
        is_better = (with_levels > 0) & (with_weights * with_weights > best * with_levels)
        scale = torch.where(is_better, with_weights / with_levels, scale)
        best = torch.where(is_better, scale * with_weights, best)
    return torch.where(is_zero, torch.zeros_like(scale), scale)


def _levels_with_minimum(blocks: Tensor, candidates: _Candidates) -> tuple[Tensor, Tensor]:
    """Return the levels (N, 8, 32) of blocks, and the first 16 bytes of the blocks: two scales and
    the packed small scales."""
    # (N, 8 sub-blocks, 32 weights)
    weights = blocks.view(-1, 8, 32)
    scales, minima = _scales_and_minima(weights.permute(2, 0, 1).reshape(32, -1), candidates)
    block_scale, small_scales = _small_integers(scales.view(-1, 8))
    block_minimum, small_minima = _small_integers(minima.view(-1, 8))
    unit = (block_scale.float() * small_scales)[..., None]
    shift = (block_minimum.float() * small_minima)[..., None]
    levels = ((weights + shift) / unit).round().clamp(0, candidates.levels)
    # the values are the minimum, whatever the levels are
    levels = torch.where(unit == 0, torch.zeros_like(levels), levels).to(torch.uint8)
    parts = (
        block_scale.view(torch.uint8),
        block_minimum.view(torch.uint8),
        _packed(small_scales.to(torch.uint8), small_minima.to(torch.uint8)),
    )
    return levels, torch.cat(parts, dim=1)


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


def _scales_and_minima(weights: Tensor, candidates: _Candidates) -> tuple[Tensor, Tensor]:
    """Return scales (S,) and negated minima (S,) of sub-blocks (W, S): a weight is
    scale * level - minimum.

    Errors count by the size of the weight and the root mean square of its sub-block.
    """
    mean_square = _total(weights.square()) / weights.size(0)
    # in double precision, since torch's root in fp32 is not always rounded to the nearest
    importance = mean_square.double().sqrt().float() + weights.abs()
    highest = weights.amax(dim=0)
    minimum = weights.amin(dim=0).clamp(max=0)
    is_flat = highest == minimum
    sum_importance = _total(importance)
    sum_weighted = _total(importance * weights)
    levels = torch.empty_like(weights)
    product = torch.empty_like(weights)
    weighted_levels = torch.empty_like(weights)

    def choose_levels(inverse: Tensor) -> None:
        torch.sub(weights, minimum, out=levels).mul_(inverse)
        levels.round_().clamp_(0, candidates.levels)

    def error(scale: Tensor, minimum: Tensor) -> Tensor:
        difference = torch.mul(levels, scale, out=product).add_(minimum).sub_(weights)
        return _total(difference.square_().mul_(importance))

    inverse = torch.tensor(float(candidates.levels)) / (highest - minimum)
    choose_levels(inverse)
    scale = 1 / inverse
    best = error(scale, minimum)
    for number in range(candidates.count):
        # as in ggml, a better minimum counts for the levels of the next candidates, too
        offset = torch.tensor(candidates.first) + torch.tensor(candidates.step) * number
        choose_levels((offset + candidates.levels) / (highest - minimum))
        torch.mul(importance, levels, out=product)
        sum_levels = _total(product)
        with_weights = _total(torch.mul(product, weights, out=weighted_levels))
        sum_squares = _total(product.mul_(levels))
        determinant = sum_importance * sum_squares - sum_levels * sum_levels
        # the least squares solution; without a minimum where that would be above zero
        new_scale = (sum_importance * with_weights - sum_weighted * sum_levels) / determinant
        new_minimum = (sum_squares * sum_weighted - sum_levels * with_weights) / determinant
        is_above = new_minimum > 0
        new_scale = torch.where(is_above, with_weights / sum_squares, new_scale)
        new_minimum = new_minimum.clamp(max=0)
        new_error = error(new_scale, new_minimum)
        is_better = (determinant > 0) & (new_error < best)
        best = torch.where(is_better, new_error, best)
        scale = torch.where(is_better, new_scale, scale)
        minimum = torch.where(is_better, new_minimum, minimum)
    return torch.where(is_flat, torch.zeros_like(scale), scale), -minimum


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
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        encoded = list(pool.map(encode, tiles))
    return torch.cat(encoded).view(*weights.shape[:-1], -1)
