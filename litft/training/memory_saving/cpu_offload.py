"""Offload to host memory: activations until the backward pass needs them, or the blocks' frozen
weights.

Results and parameter names do not change.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from litft.methods.mixins import subclass_with
from litft.model.transformer import GPT

MIN_OFFLOAD_BYTES = 2**20  # smaller tensors stay on the device


class HostCopies:
    """Copies to host memory and back on a separate CUDA stream, while the GPU continues to
    compute.

    All memory of the device belongs to the compute stream, and a tensor is held here until that
    stream waits for its copy. So the allocator can use the memory again at once. With
    `Tensor.record_stream` it would have to see first that the copy has ended, and the host, which
    is far ahead of the GPU, would allocate more in the meantime.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.block = 0  # of the forward pass; counts up from one pass to the next
        # None: there is no GPU
        self.stream = torch.cuda.Stream(device) if self.on_gpu else None
        # what is being copied to the host in this block and in the one before
        self.leaving: list[Tensor] = []
        self.left_before: list[Tensor] = []
        # after the copies of `left_before`
        self.end_of_block: torch.Event | None = None
        self.arriving: list[Tensor] = []  # what is being copied to the device

    def copy_context(self) -> AbstractContextManager:
        """Return the context for copies: the copy stream, after everything queued so far."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy to pinned host memory; complete after `wait`."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=self.on_gpu)
        with self.copy_context():
            host.copy_(tensor, non_blocking=True)
        self.leaving.append(tensor)
        return host

    def to_device(self, host: Tensor) -> Tensor:
        """Copy to the device; complete after `wait`."""
        # the copy stream waits for what the compute stream did with this memory before
        tensor = torch.empty_like(host, device=self.device)
        with self.copy_context():
            tensor.copy_(host, non_blocking=True)
        self.arriving.append(tensor)
        return tensor

    def begin_block(self) -> None:
        """Make the compute stream wait for the copies to the host that began before the last block,
        so that at most two blocks' tensors are on the device."""
        self.block += 1
        if self.stream is not None:
            if self.end_of_block is not None:
                torch.cuda.current_stream(self.device).wait_event(self.end_of_block)
            self.end_of_block = self.stream.record_event()
        self.left_before = self.leaving
        self.leaving = []

    def wait(self) -> None:
        """Make the compute stream wait for all copies."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self.leaving = []
        self.left_before = []
        self.arriving = []


@dataclass
class HostTensor:
    """A saved tensor in host memory."""

    host: Tensor
    block: int  # the last block that has saved it, or that has used it in the backward pass
    uses: int = 0  # how often the backward pass still needs it


class SavedTensorOffload(saved_tensors_hooks):
    """Offloads the tensors that autograd saves in this context; the backward pass of a block
    prefetches those of the block before.

    Weights, whose storages are in `weight_storages`, and small tensors stay on the device. A tensor
    that several operations save is copied once.
    """

    def __init__(self, copies: HostCopies, weight_storages: set[int]) -> None:
        self.copies = copies
        self.weight_storages = weight_storages
        self.saved: list[HostTensor] = []
        # storage -> view of it -> index in `saved`
        self.indices = WeakIdKeyDictionary()
        self.fetched: dict[int, Tensor] = {}
        # the block that the backward pass has reached; None: it has not begun
        self.block: int | None = None
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Tensor | int:
        """Start the copy to the host, and return its index; return the tensor itself if it stays on
        the device."""
        storage = tensor.untyped_storage()
        is_elsewhere = tensor.device.type != self.copies.device.type
        # a copy has no gaps, but compiled code expects them where the tensor had some: a slice,
        # such as the cosines of rotary embeddings, which all blocks share
        has_gaps = torch.empty_like(tensor, device="meta").stride() != tensor.stride()
        if (
            storage.data_ptr() in self.weight_storages
            or tensor.nbytes < MIN_OFFLOAD_BYTES
            or is_elsewhere
            or has_gaps
        ):
            return tensor

        # several operations may save the same tensor, or other views of its storage
        if storage not in self.indices:
            self.indices[storage] = {}
        indices = self.indices[storage]
        view = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if view not in indices:
            self.saved.append(HostTensor(self.copies.to_host(tensor), self.copies.block))
            indices[view] = len(self.saved) - 1
        index = indices[view]
        self.saved[index].block = self.copies.block
        self.saved[index].uses += 1
        return index

    def unpack(self, packed: Tensor | int) -> Tensor:
        """Return the tensor. The first one of a block begins the copies of the block before, which
        the backward pass needs next."""
        if isinstance(packed, Tensor):
            return packed
        saved = self.saved[packed]
        if self.block is None or saved.block < self.block:
            self._begin_block(saved.block)
        assert self.block is not None  # it has begun
        if packed not in self.fetched:
            # used more often than it was saved
            self.fetched[packed] = self.copies.to_device(saved.host)
            self.copies.wait()
        tensor = self.fetched[packed]
        saved.block = self.block
        saved.uses -= 1
        if saved.uses <= 0:
            del self.fetched[packed]
        return tensor

    def _begin_block(self, block: int) -> None:
        """Wait for the tensors of a block, and begin the copies of the block before."""
        self.block = block
        self._fetch(block)
        # before the next copies are queued, so that the compute stream does not wait for those too
        self.copies.wait()
        # what neither this block nor the one after it has used is not needed again
        for index in list(self.fetched):
            if self.saved[index].block > block + 1:
                del self.fetched[index]
        self._fetch(block - 1)

    def _fetch(self, block: int) -> None:
        """Begin the copies of a block's tensors to the device."""
        for index, saved in enumerate(self.saved):
            if saved.block == block and index not in self.fetched:
                self.fetched[index] = self.copies.to_device(saved.host)


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


class OffloadedBlock(nn.Module):
    """A block that begins when at most the activations of the block before are on the device."""

    copies: HostCopies

    # not in `forward`, which may be compiled, and runs again in the backward pass
    def __call__(self, *inputs: Any) -> Any:
        if torch.is_grad_enabled():
            self.copies.begin_block()
        return super().__call__(*inputs)


def offload_activations(model: GPT, device: torch.device) -> None:
    """Make `model` keep its activations in host memory between forward and backward."""
    model.__class__ = subclass_with(ActivationOffload, type(model))
    assert isinstance(model, ActivationOffload)
    model.copies = HostCopies(device)
    for block in model.blocks:
        block.__class__ = subclass_with(OffloadedBlock, type(block))
        assert isinstance(block, OffloadedBlock)
        block.copies = model.copies


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
        self.copies.wait()

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
