"""The kind of device that decides which kernels run; a memory plan decides for a device that is not
there."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MAX_FLASH_HEAD_DIM = 256

_planned: str | None = None


def device_type(tensor: Tensor) -> str:
    """Return cpu, cuda or meta: the device of a tensor of any shape, or the one that is planned
    for."""
    return _planned or tensor.device.type


def runs_flash_attention(tensor: Tensor, head_dim: int) -> bool:
    """Return whether FlashAttention computes with heads of this size in the dtype, and on the GPU,
    of a tensor of any shape."""
    in_half = tensor.dtype in (torch.bfloat16, torch.float16)
    if not in_half or head_dim > MAX_FLASH_HEAD_DIM:
        return False
    return not tensor.is_cuda or torch.cuda.get_device_capability(tensor.device) >= (8, 0)


def is_planned() -> bool:
    """Return whether a memory plan is being traced for a device that this process may not have."""
    return _planned is not None


@contextmanager
def planned_for(device: str) -> Iterator[None]:
    """Within the context, fake tensors on the CPU take the kernels of `device`."""
    global _planned
    _planned = device
    try:
        yield
    finally:
        _planned = None
