"""RMSNorm and LayerNorm, in fp32 within, and the norms of queries and keys."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litft.model.config import Config, NormConfig


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last `over` of `shape`'s dimensions, in fp32; the weight is stored flat.

    A shape of more dimensions than `over` gives each head a weight of its own.
    """

    def __init__(self, norm: NormConfig, *shape: int, over: int = 1) -> None:
        super().__init__()
        self.norm, self.shape, self.over = norm, shape, shape[-over:]
        stored = shape if over == 1 else (math.prod(shape),)
        self.weight = nn.Parameter(torch.ones(stored)) if norm.weight else None
        self.bias = nn.Parameter(torch.zeros(stored)) if norm.bias else None
        plain = norm.kind == "rms" and norm.weight and not (norm.bias or norm.offset) and over == len(shape) == 1
        self.size = shape[0] if plain else 0  # of what torch's own function normalises alike

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == self.size and not torch.is_grad_enabled() and (weight := self.weight).dtype == x.dtype:
            return rms_norm_of_one(x, weight, self.norm.eps)
        weight, bias = (p if p is None else p.float().view(self.shape) for p in (self.weight, self.bias))
        if self.norm.offset:
            weight = weight + self.norm.offset
        if self.norm.kind == "rms" and bias is None and not torch.compiler.is_compiling():  # which keeps as little by itself
            return _RMSNorm.apply(x, weight, self.norm.eps, len(self.over))
        if self.shape == self.over:
            return self.normalized(x.float(), weight, bias).to(x.dtype)
        y = self.normalized(x.float(), None, None) * weight
        return (y if bias is None else y + bias).to(x.dtype)

    def normalized(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Of fp32 numbers."""
        if self.norm.kind == "layer":
            return F.layer_norm(x, self.over, weight, bias, self.norm.eps)
        y = F.rms_norm(x, self.over, weight, self.norm.eps)
        return y if bias is None else y + bias


def apply_norm(norm: Norm | None, x: Tensor) -> Tensor:
    """x through a norm, where the architecture has one there."""
    return x if norm is None else norm(x)


def make_qk_norm(config: Config, heads: int) -> Norm | None:
    """What normalises queries or keys of shape (B, T, heads, D) before they are rotated."""
    if config.qk_norm is None:
        return None
    if config.qk_norm_over == "head":
        return Norm(config.qk_norm, config.head_dim)
    return Norm(config.qk_norm, heads, config.head_dim, over=2 if config.qk_norm_over == "all" else 1)


def rms_norm_of_one(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of a single token (1, 1, C) in decoding, in fp32 within: in the fewest operations."""
    if not x.is_cpu or torch.compiler.is_compiling():
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()  # torch's own makes twice as many operations of it on a CPU
    mean = torch.linalg.vector_norm(wide).item() ** 2 / x.numel() + eps
    return torch.mul(wide, mean**-0.5 if mean else math.inf).mul_(weight).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm (arXiv 1910.07467) that keeps x as it came, and a number a row: no fp32 copy outlives the call."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, eps: float, over: int) -> Tensor:
        ctx.dims, ctx.count = tuple(range(-over, 0)), math.prod(x.shape[-over:])
        # one pass, without the squares
        wide = torch.promote_types(x.dtype, torch.float32)
        length = torch.linalg.vector_norm(x, dim=ctx.dims, keepdim=True, dtype=wide)
        inverse = torch.rsqrt(length.square_().div_(ctx.count).add_(eps))
        ctx.save_for_backward(x, weight, inverse)
        y = x.to(wide, copy=True).mul_(inverse)
        return (y if weight is None else y.mul_(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, inverse = ctx.saved_tensors
        wide, d_x = x.to(inverse.dtype), grad.to(inverse.dtype, copy=True)
        d_weight = (d_x * wide).mul_(inverse).flatten(0, -weight.dim() - 1).sum(0) if ctx.needs_input_grad[1] else None
        if weight is not None:
            d_x.mul_(weight)
        along = (d_x * wide).sum(ctx.dims, keepdim=True).mul_(inverse.square()).div_(-ctx.count)
        return d_x.addcmul_(wide, along).mul_(inverse).to(x.dtype), d_weight, None, None
