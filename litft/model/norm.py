"""RMSNorm and LayerNorm, computed in fp32, the norms of queries and keys, and constant scales."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litft.model.config import Config, NormConfig
from litft.model.recomputation import recomputable


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last `num_dims` dimensions of `shape`, computed in fp32.

    If `shape` has more dimensions than `num_dims`, each head has its own weight. With `num_dims`
    above 1 the weight is stored flat.
    """

    def __init__(self, norm: NormConfig, *shape: int, num_dims: int = 1) -> None:
        super().__init__()
        self.norm = norm
        self.shape = shape
        self.normalized_shape = shape[-num_dims:]
        weight_shape = shape if num_dims == 1 else (math.prod(shape),)
        if norm.weight:
            self.weight = nn.Parameter(torch.ones(weight_shape))
        else:
            self.weight = None
        if norm.bias:
            self.bias = nn.Parameter(torch.zeros(weight_shape))
        else:
            self.bias = None
        is_plain_rms = (
            norm.kind == "rms"
            and norm.weight
            and not (norm.bias or norm.offset)
            and num_dims == len(shape) == 1
        )
        # the size of one token if this is a plain RMSNorm, for which decoding uses a fused kernel;
        # otherwise 0
        self.size = shape[0] if is_plain_rms else 0

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized x (..., *shape) in its dtype."""
        stored = self.weight
        # one token without gradients: the common case of
        # a decode step, in as few operations as possible
        if (
            x.numel() == self.size
            and not torch.is_grad_enabled()
            and stored is not None
            and stored.dtype == x.dtype
        ):
            return rms_norm_single_token(x, stored, self.norm.eps)

        weight = self.in_fp32(stored)
        bias = self.in_fp32(self.bias)
        # the checkpoint stores the difference from the offset
        if self.norm.offset and weight is not None:
            weight = weight + self.norm.offset
        # compiled: no fp32 copy either
        if self.norm.kind == "rms" and bias is None and not torch.compiler.is_compiling():
            num_dims = len(self.normalized_shape)
            eps = self.norm.eps
            return recomputable(
                lambda x, weight: _RMSNorm.apply(x, weight, eps, num_dims),
                x,
                copied=(weight,),
            )
        if self.shape == self.normalized_shape:
            return self.normalize(x.float(), weight, bias).to(x.dtype)
        # F's norms take a weight of the normalized dimensions, not one for each head
        y = self.normalize(x.float(), None, None)
        if weight is not None:
            y = y * weight
        if bias is not None:
            y = y + bias
        return y.to(x.dtype)

    def in_fp32(self, parameter: Tensor | None) -> Tensor | None:
        """Return the weight or the bias, stored flat or not, as (*shape) in fp32."""
        if parameter is None:
            return None
        return parameter.float().view(self.shape)

    def normalize(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Normalize fp32 x (..., *normalized_shape) and return the same shape.

        weight, bias: (*normalized_shape), or None.
        """
        if self.norm.kind == "layer":
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.norm.eps)
        y = F.rms_norm(x, self.normalized_shape, weight, self.norm.eps)
        if bias is None:
            return y
        return y + bias


def apply_norm(norm: Norm | None, x: Tensor) -> Tensor:
    """Apply a norm to x (..., *norm.shape), if the architecture has one here; otherwise return
    x."""
    if norm is None:
        return x
    return norm(x)


def scaled(x: Tensor, scale: float) -> Tensor:
    """Return x * scale, or x itself if scale is 1, for x of any shape."""
    if scale == 1:
        return x
    return x * scale


def make_qk_norm(config: Config, heads: int, head_dim: int) -> Norm | None:
    """Return the norm of queries or keys (B, T, heads, D), or None."""
    if config.qk_norm is None:
        return None
    if config.qk_norm_over == "head":
        return Norm(config.qk_norm, head_dim)
    # over all heads of a token, or over one head with a weight for each
    num_dims = 2 if config.qk_norm_over == "all" else 1
    return Norm(config.qk_norm, heads, head_dim, num_dims=num_dims)


def rms_norm_single_token(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute RMSNorm of a single token (1, 1, C) in fp32, with as few operations as possible, for
    decode steps."""
    if not x.is_cpu or torch.compiler.is_compiling():
        return F.rms_norm(x, weight.shape, weight, eps)
    # F.rms_norm runs twice as many operations on a CPU
    x_fp32 = x.float()
    mean_square = torch.linalg.vector_norm(x_fp32).item() ** 2 / x.numel() + eps
    inverse_rms = mean_square**-0.5 if mean_square else math.inf
    return torch.mul(x_fp32, inverse_rms).mul_(weight).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm (arXiv 1910.07467) that saves x in its own dtype and one value per row, but no fp32
    copy of x."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, eps: float, num_dims: int) -> Tensor:
        ctx.dims = tuple(range(-num_dims, 0))
        ctx.count = math.prod(x.shape[-num_dims:])
        # vector_norm reads x once and stores no squares
        compute_dtype = torch.promote_types(x.dtype, torch.float32)
        row_norm = torch.linalg.vector_norm(
            x, dim=ctx.dims, keepdim=True, dtype=compute_dtype
        )
        mean_square = row_norm.square_().div_(ctx.count)
        inverse_rms = torch.rsqrt(mean_square.add_(eps))
        ctx.save_for_backward(x, weight, inverse_rms)
        y = x.to(compute_dtype, copy=True).mul_(inverse_rms)
        if weight is not None:
            y.mul_(weight)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, inverse_rms = ctx.saved_tensors
        x_fp32 = x.to(inverse_rms.dtype)
        d_x = grad.to(inverse_rms.dtype, copy=True)
        if ctx.needs_input_grad[1]:
            # the product of gradient and normalized x, summed over all rows
            d_weight = (d_x * x_fp32).mul_(inverse_rms).flatten(0, -weight.dim() - 1).sum(0)
        else:
            d_weight = None
        if weight is not None:
            d_x.mul_(weight)

        # With n = x / rms and h = grad * weight, d_x = (h - n mean(h n)) / rms. `radial` is -mean(h
        # n) / rms, the factor of x.
        radial = (
            (d_x * x_fp32)
            .sum(ctx.dims, keepdim=True)
            .mul_(inverse_rms.square())
            .div_(-ctx.count)
        )
        return (
            d_x.addcmul_(x_fp32, radial).mul_(inverse_rms).to(x.dtype),
            d_weight,
            None,
            None,
        )
