"""Copy sharded weights, train and compare, in three processes.

`run` starts this file once per process, which find each other as under torchrun.
"""

import sys

import torch
import torch.distributed as dist
from strategies import run_workers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from litft.model.placement import allocate, local, placement
from litft.training.frozen_copy import FrozenCopy

PROCESSES = 3
# a rank and a width that three processes do not divide
ROWS, WIDTH = 8, 4


def run(folder):
    """Return what the processes print; fail if one of them does."""
    return run_workers(__file__, [], PROCESSES, folder)


def main():
    """Copy, train and compare, as one of the processes."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (PROCESSES,))
    with torch.device("meta"):
        model = torch.nn.Linear(WIDTH, ROWS, bias=False)
    fully_shard(
        model,
        mesh=mesh,
        reshard_after_forward=True,
        shard_placement_fn=lambda weight: placement(tuple(weight.shape), PROCESSES),
    )
    allocate(model, "cpu")
    ones = torch.ones(1, WIDTH)
    with torch.no_grad():
        local(model.weight).fill_(1.0)
    copy = FrozenCopy(model)
    model(ones).sum().backward()  # the memory probe
    with torch.no_grad():
        local(model.weight).fill_(5.0)  # training

    with copy.in_place(), torch.no_grad():
        reference = model(ones)
    with torch.no_grad():
        trained = model(ones)
    assert reference.eq(WIDTH).all(), reference
    assert trained.eq(5 * WIDTH).all(), trained
    print("as before")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
