"""The kind of device that decides which kernels run; a memory plan decides for a device that is not
there."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_planned: str | None = None


def device_type(tensor: Tensor) -> str:
    """Return cpu, cuda or meta: the device of a tensor of any shape, or the one that is planned
    for."""
    return _planned or tensor.device.type


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
