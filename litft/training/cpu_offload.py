"""What waits in the host's memory while a GPU works: activations until their gradients are asked for, or frozen weights.

None of it changes what is computed, or any parameter's name.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from litft.methods.mixins import mixed
from litft.model.transformer import GPT

SMALLEST = 2**20  # bytes of a tensor that is worth a copy to the host
NEARBY = 4  # tensors behind that stay fetched, since what several products keep is asked for again


class Copies:
    """Copies to the host and back on a stream of their own, beside which a GPU goes on computing."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.on_gpu else None

    def begin(self) -> Any:
        """The context in which copies are made: after all that is queued by now."""
        if not self.on_gpu:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in pinned memory, complete when `done` has been called."""
        with self.begin():
            host = torch.empty_like(tensor, device="cpu", pin_memory=self.on_gpu).copy_(tensor, non_blocking=True)
        if self.on_gpu:
            tensor.record_stream(self.stream)  # its memory is not given away before it is copied
        return host

    def to_device(self, host: Tensor) -> Tensor:
        """A copy on the device, complete when `done` has been called."""
        with self.begin():
            return host.to(self.device, non_blocking=True, copy=True)

    def done(self, *tensors: Tensor) -> None:
        """What is computed from now on sees the copies; `tensors` are those that it uses."""
        if self.on_gpu:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream(self.device))


class Kept(saved_tensors_hooks):
    """What autograd keeps within this context waits in the host's memory; each is fetched while the one after it is used.

    Weights, whose storages are `staying`, and small tensors stay where they are. What several products keep is copied once.
    """

    def __init__(self, copies: Copies, staying: set[int]) -> None:
        self.copies, self.staying = copies, staying
        self.hosts: list[Tensor] = []
        self.numbers = WeakIdKeyDictionary()  # by storage, then by what of it is kept
        self.fetched: dict[int, Tensor] = {}
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Tensor | int:
        """Its number, once it is on its way."""
        storage, elsewhere = tensor.untyped_storage(), tensor.device.type != self.copies.device.type
        if storage.data_ptr() in self.staying or tensor.nbytes < SMALLEST or elsewhere:
            return tensor
        known = self.numbers.setdefault(storage, {})
        view = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if view not in known:
            self.hosts.append(self.copies.to_host(tensor))
            known[view] = len(self.hosts) - 1
        return known[view]

    def unpack(self, kept: Tensor | int) -> Tensor:
        """The tensor; the one that was kept before it is asked for next."""
        if isinstance(kept, Tensor):
            return kept
        for number in (kept, kept - 1):
            if number >= 0 and number not in self.fetched:
                self.fetched[number] = self.copies.to_device(self.hosts[number])
            if number == kept:
                self.copies.done(self.fetched[kept])
        for number in [number for number in self.fetched if number > kept + NEARBY]:
            del self.fetched[number]
        return self.fetched[kept]


class Offloaded(nn.Module):
    """A network that keeps nothing on the device for its backward but weights and what is small."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*inputs, **named)
        staying = {parameter.untyped_storage().data_ptr() for parameter in self.parameters()}
        with Kept(self.copies, staying):
            return super().forward(*inputs, **named)


def offload_activations(model: GPT, device: torch.device) -> None:
    """Let `model` keep its activations in the host's memory between forward and backward."""
    model.__class__ = mixed(Offloaded, type(model))
    model.copies = Copies(device)


# ---- frozen weights -------------------------------------------------------------------------------------------------


def waits(parameter: nn.Parameter) -> bool:
    """Whether a block's parameter may wait on the host: it is not trained, and worth a copy."""
    return not parameter.requires_grad and parameter.nbytes >= SMALLEST


class Waiting(NamedTuple):
    """A frozen weight, and what it holds in the host's memory."""

    parameter: nn.Parameter
    host: Tensor


class Weights:
    """The blocks' frozen weights, in pinned memory; those of two blocks at most are on the device."""

    def __init__(self, copies: Copies, blocks: nn.ModuleList) -> None:
        self.copies = copies
        self.waiting = [[Waiting(p, self._pinned(p.data)) for p in block.parameters() if waits(p)] for block in blocks]
        self.fetched: dict[int, list[Tensor]] = {}
        self.last = -1

    def _pinned(self, tensor: Tensor) -> Tensor:
        tensor = tensor.cpu()
        return tensor.pin_memory() if self.copies.on_gpu else tensor

    @contextmanager
    def there(self, number: int) -> Iterator[None]:
        """Inside, the weights of this block are on the device, and those of the block after it are on their way."""
        ahead = number - 1 if 0 < number <= self.last else number + 1  # the backward pass goes down
        self.last = number
        self._fetch(number)
        self.copies.done(*self.fetched[number])
        self.fetched = {each: tensors for each, tensors in self.fetched.items() if each in (number, ahead)}
        if ahead < len(self.waiting):
            self._fetch(ahead)
        try:
            for (parameter, _), tensor in zip(self.waiting[number], self.fetched[number], strict=True):
                parameter.data = tensor
            yield
        finally:
            for parameter, host in self.waiting[number]:
                parameter.data = host
            self.fetched.pop(number, None)

    def _fetch(self, number: int) -> None:
        if number not in self.fetched:
            self.fetched[number] = [self.copies.to_device(host) for _, host in self.waiting[number]]


class FetchedBlock(nn.Module):
    """A block whose weights are there while it runs. What autograd keeps of them stays: so it has to be recomputed."""

    def forward(self, *inputs: Any) -> Tensor:
        with self.weights.there(self.number):
            return super().forward(*inputs)


def offload_parameters(model: GPT, device: torch.device) -> None:
    """Let the blocks' frozen weights wait on the host, and move all else to the device; `recompute` "full" next."""
    weights = Weights(Copies(device), model.blocks)
    for waiting in weights.waiting:
        for parameter, host in waiting:
            parameter.data = host
    aside = {id(parameter) for waiting in weights.waiting for parameter, _ in waiting}
    others = (tensor for module in model.modules() for tensor in module.__dict__.get("others", {}).values())
    for tensor in (*model.parameters(), *model.buffers(), *others):
        if id(tensor) not in aside:
            tensor.data = tensor.data.to(device)
    for number, block in enumerate(model.blocks):
        block.__class__ = mixed(FetchedBlock, type(block))
        block.weights, block.number = weights, number
