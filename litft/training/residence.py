"""Where what a training step needs lies: on the device, or in the host's memory.

The plan counts by it, and so does the trial of the largest micro-batch before the first step.
"""

from typing import NamedTuple


class Residence(NamedTuple):
    """What lies on the device; the rest is in the host's memory."""

    weights: bool  # those of a sharded network, and their gradients
    state: bool  # what the optimizer keeps
    activations: bool  # what the blocks keep for their backward pass


def residence(optimizer: str, cpu_offload: str, sharded: bool, device: str) -> Residence:
    """Of a run's flags, and the kind of its device: cpu or cuda."""
    waits = sharded and cpu_offload == "parameters"  # FSDP2's offload policy: all that is sharded
    paged = optimizer.startswith("paged") and device == "cuda"  # CUDA moves such state to the host where it has no room
    return Residence(not waits, not waits and not paged, cpu_offload != "activations")
