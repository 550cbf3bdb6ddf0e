"""FSDP2 (arXiv 2304.11277): parameters, gradients and the optimizer's state are sharded over
processes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from litft.model.norm import Norm
from litft.model.placement import placement
from litft.model.transformer import GPT


def shard(
    model: GPT,
    mesh: DeviceMesh,
    gather_dtype: torch.dtype | None = None,
    offload_to_cpu: bool = False,
) -> None:
    """Shard `model` in place over the mesh's last dimension; a first dimension, if any, holds
    replicas.

    Blocks are all-gathered one at a time in forward and backward, and so is an untied embedding;
    the head, which the loss reads, is gathered with the root module. Gradients are reduce-scattered
    in fp32. gather_dtype: dtype to all-gather matrices in, if lower than the dtype of the shards.
    offload_to_cpu: keep shards, and run the optimizer step, on the CPU.
    """
    width = mesh.size(mesh.ndim - 1)
    if offload_to_cpu:
        offload_policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    else:
        offload_policy = OffloadPolicy()
    settings = {
        "mesh": mesh,
        # for the root too: else gathered weights may survive an update of their shards
        "reshard_after_forward": True,
        "shard_placement_fn": lambda parameter: placement(tuple(parameter.shape), width),
        "offload_policy": offload_policy,
    }
    stored_dtype = MixedPrecisionPolicy(
        reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    cast = MixedPrecisionPolicy(gather_dtype, torch.float32, cast_forward_inputs=False)
    # norms compute in fp32
    norms = []
    for module in model.modules():
        if gather_dtype is not None and isinstance(module, Norm) and [*module.parameters()]:
            norms.append(module)
    units = list(model.blocks)
    if not model.config.tied:
        units.append(model.embed)
    units.append(model)
    # inner units first, the root last: a unit takes the parameters that no inner one has
    with _frozen_integers():
        for norm in norms:
            fully_shard(norm, mp_policy=stored_dtype, **settings)
        for unit in units:
            fully_shard(unit, mp_policy=cast, **settings)


@contextmanager
def _frozen_integers() -> Iterator[None]:
    """Within the context, integer parameters (packed bits) are created without gradients.

    fully_shard of torch 2.11 first creates each parameter with requires_grad=True, which fails for
    integers.
    """
    original_new = nn.Parameter.__new__

    def new_frozen(
        cls: type, data: Tensor | None = None, requires_grad: bool = True
    ) -> nn.Parameter:
        return original_new(
            cls, data, requires_grad and (data is None or data.is_floating_point())
        )

    nn.Parameter.__new__ = new_frozen
    try:
        yield
    finally:
        nn.Parameter.__new__ = original_new
