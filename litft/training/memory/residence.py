"""What --train.cpu_offload and the optimizer leave on the device, and what is in host memory.

Used by the memory plan, and by the probe of the largest micro-batch before the first step.
"""

from typing import NamedTuple


class MemoryPlacement(NamedTuple):
    """What is stored on the device; the rest is in host memory."""

    # with their gradients; of a sharded network only
    weights: bool
    state: bool  # the optimizer's state
    # saved by the blocks for their backward pass
    activations: bool


def residence(
    optimizer: str, cpu_offload: str, sharded: bool, device: str
) -> MemoryPlacement:
    """Return the residence for a run's flags and device type (cpu or cuda)."""
    # FSDP2's offload policy covers all sharded tensors
    offloaded = sharded and cpu_offload == "parameters"
    # CUDA moves it to the host when memory is short
    paged = optimizer.startswith("paged") and device == "cuda"
    return MemoryPlacement(
        not offloaded, not offloaded and not paged, cpu_offload != "activations"
    )
