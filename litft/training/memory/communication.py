"""Communication volume of a step on several devices, and the resulting utilization: closed forms,
not measurements.

The weights are sharded over groups of `size` devices; all groups are replicas of each other. W is
the bytes of all weights as they are gathered, G is 4 bytes per trained parameter (gradients are
reduced in fp32). In each micro-batch, a group all-gathers W in the forward and in the backward
pass, and reduce-scatters G. Once per step, replicas all-reduce G / size. In a ring of n devices,
each device receives (n - 1) / n of the bytes of an all-gather or reduce-scatter, and twice that of
an all-reduce (Patarasuk and Yuan, 2009). Data from other nodes arrives once per node, over all its
network ports together.
"""

from dataclasses import dataclass

from litft.training.memory.plan import Plan

# fraction of a chip's peak that training reaches when nothing waits for communication
UTILIZATION = 0.4


@dataclass(frozen=True)
class Cluster:
    """Devices and their bandwidths, in bytes per second that each device receives."""

    devices: int  # per node
    nodes: int
    # devices that share one copy of the weights
    size: int
    intra_node: float  # bandwidth within a node
    inter_node: float  # bandwidth between nodes


@dataclass(frozen=True)
class CommunicationVolume:
    """Bytes that each device receives in a step, and the step's times in seconds."""

    intra_node: float  # bytes from its own node
    inter_node: float  # bytes from other nodes
    transfer_time: float
    compute_time: float  # without recomputation
    step_time: float

    @property
    def share(self) -> float:
        """Return the utilization: the fraction of the chip's peak."""
        return UTILIZATION * self.compute_time / self.step_time

    def line(self, batches: int) -> str:
        """Describe the step in one line."""
        volume = (
            f"{self.intra_node / 1e9:.3g} GB from its own node and {self.inter_node / 1e9:.3g} GB "
            "from other nodes"
        )
        return (
            f"a step of {batches} micro-batches per device: {self.step_time:.2g} s, "
            f"{self.share:.0%} of the peak; each device receives {volume}, which takes "
            f"{self.transfer_time:.2g} s in parallel with computation"
        )


def communication_volume(
    plan: Plan, cluster: Cluster, batches: int, flops: float, slowdown: float, peak: float
) -> CommunicationVolume:
    """Return the volume and times of a step of `batches` micro-batches per device, of `flops` FLOPs
    each.

    slowdown: factor on the compute time. peak: FLOP/s of a device. Communication overlaps with
    computation, except for the all-gather of the first block and the reduce-scatter of the last
    one.
    """
    # a group's devices within a node, and the nodes of
    # a group; replicas within a node, and over nodes
    group_devices = min(cluster.size, cluster.devices)
    group_nodes = max(1, cluster.size // cluster.devices)
    node_replicas = max(1, cluster.devices // cluster.size)
    replica_nodes = cluster.nodes // group_nodes

    # the bytes of a step: gathers and reductions of each micro-batch, and one all-reduce
    gradients = 4.0 * plan.trained
    within_groups = batches * (2 * plan.gathered + gradients)
    between_replicas = 2 * gradients / cluster.size
    intra_bytes = (
        within_groups * (group_devices - 1) / group_devices
        + between_replicas * (node_replicas - 1) / node_replicas
    )
    inter_bytes = (
        within_groups * (group_nodes - 1) / group_nodes / group_devices
        + between_replicas * (replica_nodes - 1) / replica_nodes / node_replicas
    )

    # the times: both kinds of links work at once, and in parallel with computation
    transfer_time = max(intra_bytes / cluster.intra_node, inter_bytes / cluster.inter_node)
    busy_time = batches * flops * slowdown / (UTILIZATION * peak)
    if cluster.size > 1:
        exposed_time = transfer_time / (2 * plan.blocks)
    else:
        exposed_time = 0.0
    useful_time = batches * flops / (UTILIZATION * peak)
    return CommunicationVolume(
        intra_bytes,
        inter_bytes,
        transfer_time,
        useful_time,
        max(busy_time, transfer_time) + exposed_time,
    )
