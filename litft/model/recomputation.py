"""Tensors that a block need not save, since few operations compute them again: the outputs of norms
and gates, and weights that are rounded for a product."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Recomputation:
    """How to compute a tensor again in the backward pass, once for all operations that need it."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        inputs: tuple[Tensor, ...],
        copied: tuple[Tensor | None, ...],
    ) -> None:
        self.function = function
        # autograd has saved the inputs already
        self.inputs: list[Tensor | None] = [tensor.detach() for tensor in inputs]
        for tensor in copied:
            self.inputs.append(None if tensor is None else tensor.detach().clone())
        self.uses = 0  # operations that will ask for the tensor
        self.tensor: Tensor | None = None

    def compute(self) -> Tensor:
        """Return the tensor; it is kept until the last operation has asked for it."""
        if self.tensor is None:
            with torch.no_grad():
                self.tensor = self.function(*self.inputs)
        tensor = self.tensor
        self.uses -= 1
        if self.uses == 0:
            self.tensor = None
        return tensor


class Packed(NamedTuple):
    """What is saved instead of a tensor: a view of what is computed again."""

    recomputation: Recomputation
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any  # an int, symbolic under fake tensors


class Recomputations:
    """The recomputations of one forward pass of a block."""

    def __init__(self) -> None:
        # By storage: an operation may save a view. The tensors stay alive until `clear`, so that
        # none of them is mistaken for another.
        self._by_storage: dict[int, tuple[Recomputation, Tensor, int]] = {}

    def add(self, tensor: Tensor, recomputation: Recomputation) -> None:
        """Remember how a tensor was computed."""
        key = tensor.untyped_storage()._cdata
        self._by_storage[key] = recomputation, tensor, tensor._version

    def clear(self) -> None:
        """Forget all recomputations, and free the tensors that nothing else needs."""
        self._by_storage.clear()

    def pack(self, tensor: Tensor) -> Tensor | Packed:
        """Return what autograd is to save for a tensor."""
        found = self._by_storage.get(tensor.untyped_storage()._cdata)
        if found is None:
            return tensor
        recomputation, original, version = found
        # a tensor that was changed since is no longer what would be computed
        if original._version != version or tensor.dtype != original.dtype:
            return tensor
        recomputation.uses += 1
        return Packed(
            recomputation, tensor.size(), tensor.stride(), tensor.storage_offset()
        )


def _unpack(saved: Tensor | Packed) -> Tensor:
    """Return the tensor that was saved, or compute it again."""
    if isinstance(saved, Tensor):
        return saved
    return saved.recomputation.compute().as_strided(saved.size, saved.stride, saved.offset)


_current: Recomputations | None = None


def recomputable(
    function: Callable[..., Tensor], *inputs: Tensor, copied: tuple[Tensor | None, ...] = ()
) -> Tensor:
    """Return function(*inputs, *copied): a new tensor, of any shape.

    Within `saving_recomputations`, it is not saved for the backward pass but computed again;
    autograd must save the inputs for the function.
    copied: further small inputs, of which copies are kept. FSDP frees the gathered weight of a norm
    before the backward pass of the products after it.
    """
    y = function(*inputs, *copied)
    # compiled code decides itself what it saves; without a gradient, the inputs are not saved
    if not torch.compiler.is_compiling() and _current is not None and y.requires_grad:
        _current.add(y, Recomputation(function, inputs, copied))
    return y


@contextmanager
def saving_recomputations() -> Iterator[None]:
    """Within the context, what `recomputable` returns is not saved for the backward pass."""
    global _current
    previous = _current
    current = Recomputations()
    _current = current
    hooks: Any = saved_tensors_hooks(current.pack, _unpack)
    try:
        with hooks:
            yield
    finally:
        _current = previous
        # autograd keeps the hooks
        current.clear()
