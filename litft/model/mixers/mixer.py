"""The protocol of recurrent mixers, their causal convolution, and the norm of their outputs.

A mixer is a module with `forward(x, documents, cache)`. It has a state of constant size, which
`cache` carries from call to call: a text is computed in pieces of any length. In training, state
and convolution start anew at each document. `mix`, between its Linears, is recomputed in the
backward pass: its intermediate values are much larger than its inputs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from litft.model.kv_cache import LayerCache
from litft.model.mixers import kernels
from litft.model.packed_sequences import PackedSequences

# B batch, T tokens, C channels, K width of the convolution


class Mixer(nn.Module):
    """Base class of recurrent mixers."""

    # of the recurrence in the forward pass, without Linears
    flops_per_token: float

    def forward(
        self, x: Tensor, documents: PackedSequences | None, cache: LayerCache | None
    ) -> Tensor:
        """Return the mixed x (B, T, C). Tokens of different documents do not affect each other."""
        raise NotImplementedError

    def mix(
        self,
        documents: PackedSequences | None,
        cache: LayerCache | None,
        *inputs: Tensor | None,
    ) -> Tensor:
        """Return what the mixer computes, (B, T, ...), from its projections (B, T, ...) and its
        parameters."""
        raise NotImplementedError

    def recompute_mix(
        self,
        documents: PackedSequences | None,
        cache: LayerCache | None,
        *inputs: Tensor | None,
    ) -> Tensor:
        """Return `mix`, (B, T, ...).

        inputs: all tensors that may need a gradient, in the shapes that `mix` takes.
        """
        if cache is not None or not torch.is_grad_enabled():
            return self.mix(documents, cache, *inputs)
        # `torch.compiler.disable` has no types
        return _mix_in_training(self, documents, inputs)  # pyright: ignore[reportCallIssue]


# a loop over chunks, whose number depends on the length
@torch.compiler.disable
def _mix_in_training(
    mixer: Mixer, documents: PackedSequences | None, inputs: Sequence[Tensor | None]
) -> Tensor:
    return SavingInputs.apply(partial(mixer.mix, documents, None), *inputs)


class SavingInputs(torch.autograd.Function):
    """A function of tensors that saves only its inputs, and is computed again in the backward
    pass."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Tensor], *inputs: Tensor | None
    ) -> Tensor:
        """Return function(*inputs), for inputs of any shape."""
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return None for the function, and the gradients of the inputs that need one, in the
        shapes of these; `gradient` has the shape of the result."""
        needed = ctx.needs_input_grad[1:]
        with torch.enable_grad():
            pairs = zip(ctx.saved_tensors, needed, strict=True)
            # Detached, so that the inner graph ends at the inputs; autograd continues from there.
            arguments = [
                x.detach().requires_grad_() if is_needed else x for x, is_needed in pairs
            ]
            leaves = []
            for x in arguments:
                if x is not None and x.requires_grad:
                    leaves.append(x)
            found = iter(torch.autograd.grad(ctx.function(*arguments), leaves, gradient))
        # the first argument of `forward` is the function, which has no gradient
        return None, *(next(found) if is_needed else None for is_needed in needed)


class CausalConv(nn.Module):
    """The parameters of a `causal_conv`."""

    def __init__(self, channels: int, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, width))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    documents: PackedSequences | None,
    cache: LayerCache | None,
    state: int = 0,
) -> Tensor:
    """Return the depthwise convolution of x (B, T, C) over the last K tokens of each document, in
    the same shape.

    weight: (C, K). bias: (C,). state: the number of its state in `cache`, which is the K - 1 inputs
    before a piece.
    """
    # compiled code fuses the plain form
    if cache is None and not torch.compiler.is_compiling() and kernels.can_run(x):
        return kernels.fused_conv(x, weight, bias, documents)

    width = weight.size(1)
    length = x.size(1)
    if cache is None:
        previous = x.new_zeros(x.size(0), width - 1, x.size(2))
    else:
        # the state is kept in fp32
        previous = cache.states[state].to(x.dtype)
    extended = torch.cat((previous, x), dim=1)  # (B, K - 1 + T, C)
    # the last K - 1 inputs are the state for the next piece
    if cache is not None:
        cache.store(state, extended[:, length:])

    # A tap of a token in an earlier document counts as
    # zero, as before the row's start, whose id is -1.
    if documents is None:
        ids = None
    else:
        ids = F.pad(documents.ids, (width - 1, 0), value=-1)

    def tap_product(tap: int) -> Tensor:
        shifted = extended[:, tap : tap + length]
        # the last tap is the token itself, and needs no mask
        if ids is not None and tap < width - 1:
            is_other = ids[:, tap : tap + length] != ids[:, width - 1 :]
            shifted = shifted.masked_fill(is_other[..., None], 0)
        return shifted.float() * weight[:, tap].float()

    # a sum of K shifted products, rounded once
    y = tap_product(0)
    for tap in range(1, width):
        y = y + tap_product(tap)
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


class GatedNorm(nn.Module):
    """RMSNorm over groups of channels, with a gate before or after it, computed in fp32."""

    def __init__(
        self, size: int, eps: float, gate: str, gate_first: bool, groups: int = 1
    ) -> None:
        super().__init__()
        self.eps = eps
        self.gate_first = gate_first
        self.groups = groups
        self.gate = {"silu": F.silu, "sigmoid": torch.sigmoid}[gate]
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalize x (..., C) and multiply it by the function of `gate` (..., C); return the same
        shape."""
        # compiled code saves no more than the inputs
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.compute(x, gate, self.weight)
        return SavingInputs.apply(self.compute, x, gate, self.weight)

    def compute(self, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """Return the normalized and gated x (..., C), for a gate (..., C) and a weight (C,)."""
        y = x.float()
        gate = self.gate(gate.float())
        if self.gate_first:
            y = y * gate
        # (..., groups, C / groups): each group has a root mean square of its own
        grouped = y.unflatten(-1, (self.groups, -1))
        y = (
            F.rms_norm(grouped, grouped.shape[-1:], None, self.eps).flatten(-2)
            * weight.float()
        )
        if not self.gate_first:
            y = y * gate
        return y.to(x.dtype)
