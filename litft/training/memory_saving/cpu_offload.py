"""Offload to host memory: activations until the backward pass needs them, or the blocks' frozen
weights.

Results and parameter names do not change.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from litft.methods.mixins import subclass_with
from litft.model.transformer import GPT

MIN_OFFLOAD_BYTES = 2**20  # smaller tensors stay on the device
# tensors that stay fetched after their first use: several operations may have saved the same one
FETCHED_TO_KEEP = 4


class HostCopies:
    """Copies to host memory and back on a separate CUDA stream, while the GPU continues to
    compute."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        # None: there is no GPU
        self.stream = torch.cuda.Stream(device) if self.on_gpu else None

    def copy_context(self) -> AbstractContextManager:
        """Return the context for copies: the copy stream, after everything queued so far."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy to pinned host memory; complete after `wait`."""
        with self.copy_context():
            host = torch.empty_like(tensor, device="cpu", pin_memory=self.on_gpu).copy_(
                tensor, non_blocking=True
            )
        if self.stream is not None:
            # its memory is not reused before the copy is complete
            tensor.record_stream(self.stream)
        return host

    def to_device(self, host: Tensor) -> Tensor:
        """Copy to the device; complete after `wait`."""
        with self.copy_context():
            return host.to(self.device, non_blocking=True, copy=True)

    def wait(self, *tensors: Tensor) -> None:
        """Make the compute stream wait for the copies; `tensors` are the copies that it will
        use."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
            # allocated on the copy stream: the allocator must know that this stream uses them too
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream(self.device))


class SavedTensorOffload(saved_tensors_hooks):
    """Offloads the tensors that autograd saves in this context; the next one is prefetched while
    one is used.

    Weights, whose storages are in `weight_storages`, and small tensors stay on the device. A tensor
    that several operations save is copied once.
    """

    def __init__(self, copies: HostCopies, weight_storages: set[int]) -> None:
        self.copies = copies
        self.weight_storages = weight_storages
        self.host_tensors: list[Tensor] = []
        # storage -> view of it -> index in host_tensors
        self.indices = WeakIdKeyDictionary()
        self.fetched: dict[int, Tensor] = {}
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Tensor | int:
        """Start the copy to the host, and return its index; return the tensor itself if it stays on
        the device."""
        storage = tensor.untyped_storage()
        is_elsewhere = tensor.device.type != self.copies.device.type
        if (
            storage.data_ptr() in self.weight_storages
            or tensor.nbytes < MIN_OFFLOAD_BYTES
            or is_elsewhere
        ):
            return tensor

        # several operations may save the same tensor, or other views of its storage
        if storage not in self.indices:
            self.indices[storage] = {}
        indices = self.indices[storage]
        view = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if view not in indices:
            self.host_tensors.append(self.copies.to_host(tensor))
            indices[view] = len(self.host_tensors) - 1
        return indices[view]

    def unpack(self, packed: Tensor | int) -> Tensor:
        """Return the tensor, and prefetch the one saved before it, which the backward pass needs
        next."""
        if isinstance(packed, Tensor):
            return packed
        # waits before the prefetch is queued, so that the compute stream does not wait for that too
        for index in (packed, packed - 1):
            if index >= 0 and index not in self.fetched:
                self.fetched[index] = self.copies.to_device(self.host_tensors[index])
            if index == packed:
                self.copies.wait(self.fetched[packed])
        # the backward pass goes down: what was saved much later is not needed again
        for index in list(self.fetched):
            if index > packed + FETCHED_TO_KEEP:
                del self.fetched[index]
        return self.fetched[packed]


class ActivationOffload(nn.Module):
    """A network whose activations are in host memory between forward and backward."""

    copies: HostCopies

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*inputs, **kwargs)
        # autograd saves weights as well, which are on the device anyway
        weight_storages = set()
        for parameter in self.parameters():
            weight_storages.add(parameter.untyped_storage().data_ptr())
        with SavedTensorOffload(self.copies, weight_storages):
            return super().forward(*inputs, **kwargs)


def offload_activations(model: GPT, device: torch.device) -> None:
    """Make `model` keep its activations in host memory between forward and backward."""
    model.__class__ = subclass_with(ActivationOffload, type(model))
    assert isinstance(model, ActivationOffload)
    model.copies = HostCopies(device)


# ---- frozen weights
# -------------------------------------------------------------------------------------------------


def is_offloadable(parameter: nn.Parameter) -> bool:
    """Return whether a block's parameter can be offloaded: it is frozen and large enough."""
    return not parameter.requires_grad and parameter.nbytes >= MIN_OFFLOAD_BYTES


class HostWeight(NamedTuple):
    """A frozen weight, and its values in host memory."""

    parameter: nn.Parameter
    host: Tensor


class BlockWeights:
    """The blocks' frozen weights in pinned host memory; those of at most two blocks are on the
    device."""

    def __init__(self, copies: HostCopies, blocks: nn.ModuleList) -> None:
        self.copies = copies
        self.by_block = list(map(self._host_weights, blocks))
        self.fetched: dict[int, list[Tensor]] = {}
        self.last = -1

    def _host_weights(self, block: nn.Module) -> list[HostWeight]:
        weights = []
        for parameter in block.parameters():
            if is_offloadable(parameter):
                weights.append(HostWeight(parameter, self._pinned(parameter.data)))
        return weights

    def _pinned(self, tensor: Tensor) -> Tensor:
        tensor = tensor.cpu()
        if self.copies.on_gpu:
            return tensor.pin_memory()
        return tensor

    @contextmanager
    def on_device(self, number: int) -> Iterator[None]:
        """Within the context, the weights of block `number` are on the device, and the next block's
        are prefetched."""
        # the backward pass goes down
        if 0 < number <= self.last:
            next_number = number - 1
        else:
            next_number = number + 1
        self.last = number
        self._fetch(number)
        self.copies.wait(*self.fetched[number])

        # other blocks' weights are freed before the next block's are allocated
        for index in list(self.fetched):
            if index not in (number, next_number):
                del self.fetched[index]
        if next_number < len(self.by_block):
            self._fetch(next_number)

        # the parameter points to the copy only while the block runs
        try:
            for (parameter, _), tensor in zip(
                self.by_block[number], self.fetched[number], strict=True
            ):
                parameter.data = tensor
            yield
        finally:
            for parameter, host in self.by_block[number]:
                parameter.data = host
            self.fetched.pop(number, None)

    def _fetch(self, number: int) -> None:
        if number not in self.fetched:
            tensors = []
            for _, host in self.by_block[number]:
                tensors.append(self.copies.to_device(host))
            self.fetched[number] = tensors


class FetchedBlock(nn.Module):
    """A block whose weights are on the device while it runs.

    It must be recomputed, or autograd would keep them alive.
    """

    weights: BlockWeights
    number: int  # of the block

    def forward(self, *inputs: Any) -> Tensor:
        with self.weights.on_device(self.number):
            return super().forward(*inputs)


def offload_parameters(model: GPT, device: torch.device) -> None:
    """Keep the blocks' frozen weights in host memory, and move all other tensors to the device.

    The blocks must then be recomputed: call `recompute` with "full".
    """
    weights = BlockWeights(HostCopies(device), model.blocks)
    offloaded = set()
    for host_weights in weights.by_block:
        for parameter, host in host_weights:
            parameter.data = host
            offloaded.add(id(parameter))
    tensors = [*model.parameters(), *model.buffers()]
    # base parameters that a trained copy replaces
    for module in model.modules():
        tensors.extend(module.__dict__.get("inactive", {}).values())
    for tensor in tensors:
        if id(tensor) not in offloaded:
            tensor.data = tensor.data.to(device)
    for number, block in enumerate(model.blocks):
        block.__class__ = subclass_with(FetchedBlock, type(block))
        assert isinstance(block, FetchedBlock)
        block.weights = weights
        block.number = number
