"""Which part of a tensor a process holds: FSDP2 (arXiv 2304.11277) cuts every parameter along one dimension.

What is filled, gathered and summed part by part. A plain tensor is held whole, so that the same code serves one process.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from litft.model.config import Config
from litft.model.transformer import GPT


def placement(shape: tuple[int, ...], width: int) -> Shard:
    """The dimension that a parameter is cut along: the first, or the first that leaves no process with less than others."""
    even = [dim for dim, size in enumerate(shape) if size % width == 0]
    return Shard(even[0] if even else 0)


def is_sharded(model: nn.Module) -> bool:
    """Whether this process holds a part of it only."""
    return isinstance(model, FSDPModule)


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Which part of a tensor this process holds; torch.chunk's, of which the last may be short or empty."""
    found = [slice(0, size) for size in tensor.shape]
    for dim, place in enumerate(tensor.placements if isinstance(tensor, DTensor) else ()):
        if isinstance(place, Shard):
            size = tensor.shape[place.dim]
            each = -(-size // tensor.device_mesh.size(dim))
            start = min(size, each * tensor.device_mesh.get_local_rank(dim))
            found[place.dim] = slice(start, min(size, start + each))
    return tuple(found)


def local(tensor: Tensor) -> Tensor:
    """This process's part, in the tensor's own memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole, on every process; all of them have to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, held: Tensor) -> Tensor:
    """What this process holds of something of the tensor's shape, as that."""
    if not isinstance(tensor, DTensor):
        return held
    return DTensor.from_local(held, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride())


@torch.no_grad()
def copy_into_local(tensor: Tensor, read: Callable[[tuple[slice, ...]], Tensor]) -> None:
    """Fill this process's part of a tensor; `read` gives that of what it is filled with, which may be shorter."""
    mine = local(tensor)
    if mine.numel():
        found = read(local_slices(tensor))
        mine[tuple(slice(0, size) for size in found.shape)].copy_(found)


class WeightPlacement:
    """What this process holds of the tensors of a network, by their names: here what `local_slices` says."""

    def network(self, config: Config) -> GPT:
        """A network to hold it, of the architecture that the whole one has."""
        return GPT(config)

    def allocate(self, model: GPT, device: torch.device | str) -> None:
        """As the function."""
        allocate(model, device)

    def copy_in(self, name: str, tensor: Tensor, read: Callable[[tuple[slice, ...]], Tensor]) -> None:
        """As the function."""
        copy_into_local(tensor, read)

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """What is held of a whole tensor, before it is packed."""
        return tensor

    def connect(self, model: GPT) -> GPT:
        """Have a filled network, with what a method has added, compute what the whole one would."""
        return model


UNSHARDED = WeightPlacement()  # and each parameter as it is, where none is cut


@contextmanager
def summon_full(module: nn.Module, *but: str) -> Iterator[None]:
    """Inside, the module's own parameters, `but` some, are plain and complete; what becomes of them is kept."""
    cut = {n: p for n, p in module.named_parameters(recurse=False) if isinstance(p, DTensor) and n not in but}
    for name, parameter in cut.items():
        setattr(module, name, nn.Parameter(parameter.detach().full_tensor(), requires_grad=False))
    try:
        yield
        for name, parameter in cut.items():
            copy_into_local(parameter, getattr(module, name).__getitem__)
    finally:
        for name, parameter in cut.items():
            setattr(module, name, parameter)


def allocate(model: nn.Module, device: torch.device | str) -> None:
    """Give a network on the meta device memory for what this process holds of it; what is tied stays so."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in made or local(parameter).is_meta:
                held = torch.empty_like(local(parameter), device=device)
                made.setdefault(id(parameter), nn.Parameter(like(parameter, held), requires_grad=parameter.requires_grad))
                setattr(module, name, made[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta:
                setattr(module, name, buffer.to(device))
