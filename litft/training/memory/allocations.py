"""Bytes that a module allocates forward and backward, counted on fake tensors."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from litft.training.optimizers.rounded import OptimizerInBackward

_FLASH_BACKWARD = torch.ops.aten._flash_attention_backward.default
_FLASH_BLOCK = 128  # rows of queries: FlashAttention rounds each document up to them


class AllocationTracker(TorchDispatchMode):
    """Counts the bytes of storages created in this context: the current bytes, and their peak since
    `reset_peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self.live_storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Adafactor reads its step, which fake tensors do not have
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        out = func(*args, **(kwargs or {}))
        # outputs may be views of these
        input_storages = set()
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor):
                input_storages.add(t.untyped_storage()._cdata)
        # views and in-place results share a storage that is counted already
        for tensor in tree_leaves(out):
            if (
                isinstance(tensor, Tensor)
                and (storage := tensor.untyped_storage())._cdata
                not in self.live_storages | input_storages
            ):
                self.live_storages.add(storage._cdata)
                self.current += storage.nbytes()
                weakref.finalize(storage, self.on_free, storage._cdata, storage.nbytes())
        workspace = _flash_workspace(args) if func is _FLASH_BACKWARD else 0
        self.peak = max(self.peak, self.current + workspace)
        return out

    def on_free(self, key: int, size: int) -> None:
        """Subtract a storage that has been freed."""
        self.live_storages.discard(key)
        self.current -= size

    def reset_peak(self) -> int:
        """Set the peak to the current bytes, and return them."""
        self.peak = self.current
        return self.current


def _flash_workspace(args: Any) -> int:
    """Return the bytes that FlashAttention's backward pass has in memory while it runs, for the
    arguments of its operator.

    Source: mha_varlen_bwd in ATen/native/transformers/cuda/flash_attn/flash_api.cpp of torch.
    """
    _, q, k, _, _, _, starts = args[:7]
    tokens, heads, head_dim = q.shape
    padded_tokens = tokens + _FLASH_BLOCK * (starts.numel() - 1)
    # the gradient of the queries, and a number for each of them, in fp32
    accumulated = 4 * padded_tokens * heads * (head_dim + -head_dim % 32 + 1)
    # the gradients of keys and values for each query head, before those that share one are added
    expanded = 0
    if k.size(1) != heads:
        expanded = 2 * k.size(0) * heads * head_dim * k.element_size()
    return accumulated + expanded


class Trace(NamedTuple):
    """Bytes of one module's forward and backward pass."""

    # peak of the forward pass, with its input and output
    forward: int
    # saved for the backward pass, with the input if that is saved
    saved: int
    gradients: int  # of its parameters
    # peak of the backward pass beyond `saved`, with the parameters' gradients
    backward: int
    has_grad: bool  # whether the output requires a gradient


class _Upstream(torch.autograd.Function):
    """Stands for the modules before: autograd would keep a leaf tensor alive, even if no operation
    saves it."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, example: Tensor) -> Tensor:
        """Return a tensor with the shape and dtype of `example`."""
        return torch.empty_like(example)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return an unused gradient of `leaf`."""
        return torch.empty(()), None


class _Downstream(torch.autograd.Function):
    """Stands for the modules after: only the backward pass refers to its gradient, so it may be
    overwritten."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        """Return a scalar."""
        ctx.output_type = y.shape, y.dtype
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return a gradient of y."""
        shape, dtype = ctx.output_type
        return torch.empty(shape, dtype=dtype)


def input_like(like: Tensor) -> Tensor:
    """Return a tensor like `like`, which requires a gradient if `like` does."""
    if like.requires_grad:
        return _Upstream.apply(torch.empty((), requires_grad=True), like)
    return torch.empty_like(like)


def trace_module(
    run: Callable[[Tensor], Tensor],
    example: Tensor,
    parameters: list[nn.Parameter],
    accumulated: bool,
    optimizer: OptimizerInBackward | None,
) -> Trace:
    """Trace `run` forward and backward on an input like `example`.

    accumulated: the parameters already have gradients. optimizer: steps the parameters in the
    backward pass.
    """
    # preparation that must not be counted
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    # the first step creates the optimizer's state
    if optimizer and not optimizer.state.keys() >= set(trained):
        with AllocationTracker(), optimizer.stepping():
            _Downstream.apply(run(input_like(example))).backward()
    if accumulated:
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
    with AllocationTracker() as tracker:
        x = input_like(example)
        y = run(x)
        # otherwise it would count even if autograd does not save it
        del x
        has_grad = y.requires_grad
        # what the forward pass leaves, but for its output: that is the input of the next module
        saved = tracker.current - y.untyped_storage().nbytes()
        forward = tracker.peak
        before = tracker.reset_peak()
        if has_grad:
            # a scalar to call backward on
            end = _Downstream.apply(y)
            with stepping_in_backward(optimizer):
                end.backward()
        backward = tracker.peak - before
    for parameter in trained:
        parameter.grad = None
    gradients = sum(parameter.nbytes for parameter in trained)
    if has_grad:
        return Trace(forward, saved, gradients, backward, has_grad)
    return Trace(forward, 0, gradients, 0, has_grad)


def stepping_in_backward(optimizer: OptimizerInBackward | None) -> AbstractContextManager:
    """Return a context in which an optimizer, if any, steps in the backward pass."""
    if optimizer:
        return optimizer.stepping()
    return nullcontext()
