"""The part of each tensor that a process holds: FSDP2 (arXiv 2304.11277) shards every parameter
along one dimension.

Sharded tensors are filled and gathered by these functions. They also accept unsharded tensors, so
one process uses the same code.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from litft.model.config import Config
from litft.model.transformer import GPT


def placement(shape: tuple[int, ...], world_size: int) -> Shard:
    """Return the dimension to shard a parameter along: the first one that divides evenly, otherwise
    dimension 0."""
    for dim, size in enumerate(shape):
        if size % world_size == 0:
            return Shard(dim)
    return Shard(0)


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP has sharded the model."""
    return isinstance(model, FSDPModule)


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Return the slices of a tensor of any shape that this process holds, one for each dimension.

    As in torch.chunk, the last shard may be shorter or empty.
    """
    slices = [slice(0, size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return tuple(slices)
    for mesh_dim, sharding in enumerate(tensor.placements):
        if isinstance(sharding, Shard):
            size = tensor.shape[sharding.dim]
            shard_size = -(-size // tensor.device_mesh.size(mesh_dim))
            start = min(size, shard_size * tensor.device_mesh.get_local_rank(mesh_dim))
            # the size is rounded up, so the last processes may begin after the end
            slices[sharding.dim] = slice(start, min(size, start + shard_size))
    return tuple(slices)


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor of any shape, without a copy.

    The part is smaller along the sharded dimension; a tensor that is not sharded is returned as it
    is.
    """
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor, of any shape, on every process; a collective call."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


def shard_as(tensor: Tensor, local_part: Tensor) -> Tensor:
    """Return a tensor with the sharding and shape of `tensor`, of any shape, of which this process
    holds `local_part`, in the shape of `local(tensor)`."""
    if not isinstance(tensor, DTensor):
        return local_part
    return DTensor.from_local(
        local_part,
        tensor.device_mesh,
        tensor.placements,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


@torch.no_grad()
def copy_into_local(tensor: Tensor, read: Callable[[tuple[slice, ...]], Tensor]) -> None:
    """Fill this process's part of a tensor of any shape with `read(slices)`, for slices as from
    `local_slices`.

    The values have the shape of the slices, or fewer rows, as from a file that lacks those of new
    tokens.
    """
    local_part = local(tensor)
    if local_part.numel():
        values = read(local_slices(tensor))
        # fewer rows: the file lacks those of new tokens, which are initialized elsewhere
        local_part[tuple(slice(0, size) for size in values.shape)].copy_(values)


class WeightPlacement:
    """The part of each named tensor of a network that this process holds: here the part given by
    `local_slices`."""

    def build_network(self, config: Config) -> GPT:
        """Build the network that holds this process's part; config describes the whole network."""
        return GPT(config)

    def allocate(self, model: GPT, device: torch.device | str) -> None:
        """Allocate memory for the network; see the function `allocate`."""
        allocate(model, device)

    def copy_in(
        self, name: str, tensor: Tensor, read: Callable[[tuple[slice, ...]], Tensor]
    ) -> None:
        """Fill this process's part of a tensor of any shape; see `copy_into_local`."""
        copy_into_local(tensor, read)

    def partition(self, name: str) -> tuple[int, int, int] | None:
        """Return how a parameter is divided for quantization: the dimension, counted from the end,
        this process's part, and the number of parts. None: this process quantizes all of it."""
        return None

    def shard(self, name: str, tensor: Tensor) -> Tensor:
        """Return the part of a whole tensor, of any shape, to quantize for this process: here all
        of it."""
        return tensor

    def connect(self, model: GPT) -> GPT:
        """Connect a filled network, including a method's modules, so that it computes the output of
        the whole one."""
        return model


SINGLE_DEVICE = WeightPlacement()  # no sharding except FSDP's


@contextmanager
def summon_full(module: nn.Module, *excluded: str) -> Iterator[None]:
    """Within the context, the module's direct parameters, except `excluded`, are unsharded; changes
    are kept."""
    sharded = {}
    # parameters of submodules stay sharded: at most one module is whole at a time
    for n, p in module.named_parameters(recurse=False):
        if isinstance(p, DTensor) and n not in excluded:
            sharded[n] = p
    for name, parameter in sharded.items():
        setattr(
            module,
            name,
            nn.Parameter(parameter.detach().full_tensor(), requires_grad=False),
        )

    try:
        yield
        # only without an error: each process copies its part of what was changed
        for name, parameter in sharded.items():
            copy_into_local(parameter, getattr(module, name).__getitem__)
    finally:
        for name, parameter in sharded.items():
            setattr(module, name, parameter)


def allocate(model: nn.Module, device: torch.device | str) -> None:
    """Allocate memory for this process's part of a network on the meta device; tied parameters stay
    tied."""
    allocated: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in allocated and local(parameter).is_meta:
                storage = torch.empty_like(local(parameter), device=device)
                allocated[id(parameter)] = nn.Parameter(
                    shard_as(parameter, storage), requires_grad=parameter.requires_grad
                )
            # the same object under both names, so tied parameters stay one
            if id(parameter) in allocated:
                setattr(module, name, allocated[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            # values that were computed when the network was built, such as ALiBi's slopes
            if not buffer.is_meta:
                setattr(module, name, buffer.to(device))
