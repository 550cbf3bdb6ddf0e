"""What several devices send each other in a step, and what share of their peak is left: closed forms, no measurement.

Groups of `size` devices hold all of the weights together; `replicas` groups hold the same. W is the bytes of all weights as
they are gathered, G four bytes a trained number (gradients are reduced in fp32), a the micro-batches of a step on a device.
A group gathers W forward and backward and scatters G, in each micro-batch; replicas add up G / size once a step. A ring over
n devices moves (n - 1) / n of what is gathered or scattered past each of them, twice that of what is added up (Patarasuk
and Yuan, 2009); what comes from other nodes comes once, through all ports of a node together.
"""

from dataclasses import dataclass

from litft.training.memory_plan import Plan

UTILIZATION = 0.4  # of a chip's peak that training reaches where all goes well, and nothing is waited for


@dataclass(frozen=True)
class Cluster:
    """Devices, and the bytes a second that each receives from those of its node, and from others."""

    devices: int  # of a node
    nodes: int
    size: int  # of a group that holds all of the weights
    near: float
    far: float


@dataclass(frozen=True)
class CommunicationVolume:
    """Bytes that each device receives in a step, from its node and from others, and seconds of its parts."""

    near: float
    far: float
    moving: float
    computing: float  # what the method needs
    step: float

    @property
    def share(self) -> float:
        """Of the chip's peak."""
        return UTILIZATION * self.computing / self.step

    def line(self, batches: int) -> str:
        """In words."""
        moved = f"each receives {self.near / 1e9:.3g} GB from its node and {self.far / 1e9:.3g} GB from others"
        return (
            f"a step of {batches} micro-batches on each: {self.step:.2g} s, {self.share:.0%} of the peak; {moved}, "
            f"which takes {self.moving:.2g} s beside the products"
        )


def communication_volume(
    plan: Plan, cluster: Cluster, batches: int, flops: float, slower: float, peak: float
) -> CommunicationVolume:
    """A step of so many micro-batches on each device, of so many FLOPs each, which take `slower` times as long.

    What moves is hidden behind what is computed, but for the first block's gathering and the last one's scattering.
    """
    local, spread = min(cluster.size, cluster.devices), max(1, cluster.size // cluster.devices)  # a group in and over nodes
    beside, across = max(1, cluster.devices // cluster.size), cluster.nodes // spread  # replicas in and over nodes
    gradients = 4.0 * plan.trained
    gathered = batches * (2 * plan.gathered + gradients)
    added = 2 * gradients / cluster.size
    near = gathered * (local - 1) / local + added * (beside - 1) / beside
    far = gathered * (spread - 1) / spread / local + added * (across - 1) / across / beside
    moving = max(near / cluster.near, far / cluster.far)
    computing = batches * flops * slower / (UTILIZATION * peak)
    shown = moving / (2 * plan.blocks) if cluster.size > 1 else 0.0
    useful = batches * flops / (UTILIZATION * peak)
    return CommunicationVolume(near, far, moving, useful, max(computing, moving) + shown)
