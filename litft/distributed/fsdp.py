"""FSDP2 (arXiv 2304.11277): parameters, gradients and the optimizer's state are sharded over processes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from litft.model.norm import Norm
from litft.model.placement import placement
from litft.model.transformer import GPT


def shard(model: GPT, mesh: DeviceMesh, rounded: torch.dtype | None = None, on_host: bool = False) -> None:
    """Have each process of the mesh's last dimension hold its part of `model`; those of another hold the same.

    Blocks are gathered one at a time, forward and backward, an embedding with weights of its own too; the head, which the
    loss reads, with the network. Gradients are reduced in fp32. rounded: what matrices are gathered in, where they are kept
    in more. on_host: parts wait in the host's memory, and are stepped there.
    """
    width = mesh.size(mesh.ndim - 1)
    settings = {
        "mesh": mesh,
        "reshard_after_forward": True,  # the network's own too: else what was gathered may outlive a change of its part
        "shard_placement_fn": lambda parameter: placement(tuple(parameter.shape), width),
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if on_host else OffloadPolicy(),
    }
    as_kept = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    cast = MixedPrecisionPolicy(rounded, torch.float32, cast_forward_inputs=False)
    norms = [module for module in model.modules() if isinstance(module, Norm) and [*module.parameters()]]
    with _frozen_integers():
        for norm in norms if rounded is not None else ():  # they are used in fp32
            fully_shard(norm, mp_policy=as_kept, **settings)
        for unit in [*model.blocks, *([] if model.config.tied else [model.embed]), model]:
            fully_shard(unit, mp_policy=cast, **settings)


@contextmanager
def _frozen_integers() -> Iterator[None]:
    """Parameters of packed bits require no gradient: torch 2.11 asks for one before it reads their own flag, and fails."""
    made = nn.Parameter.__new__

    def frozen(cls: type, data: Tensor | None = None, requires_grad: bool = True) -> nn.Parameter:
        return made(cls, data, requires_grad and (data is None or data.is_floating_point()))

    nn.Parameter.__new__ = frozen
    try:
        yield
    finally:
        nn.Parameter.__new__ = made
