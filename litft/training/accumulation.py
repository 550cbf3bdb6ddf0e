"""The gradients of a step: of one micro-batch after the other."""

from collections.abc import Callable

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from litft.data.packing import MicroBatch
from litft.distributed.process_group import sum_over_processes, sync_gradients
from litft.training.objectives import Objective, Totals


def accumulate(
    fabric: Fabric,
    objective: Objective,
    model: nn.Module,
    batches: list[MicroBatch],
    totals: Totals,
    scale: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> Tensor:
    """Accumulate the gradients of the objective over all ranks, and return its loss and scores, (1
    + len(scores),).

    The sums of this rank's micro-batches are divided by `totals`, the counts over *all* ranks. DDP
    averages gradients over the ranks, hence the factor `world_size`. scale: multiplies the loss
    that gradients are computed of, in fp16.
    """
    # the loss and all scores, so that one all-reduce is enough
    total = torch.zeros(1 + len(objective.scores), device=fabric.device)
    for number, batch in enumerate(batches, 1):
        batch = batch.to(fabric.device)
        with sync_gradients(fabric, model, last=number == len(batches)):
            values = objective(model, batch, totals)
            fabric.backward(scale(values[0] * fabric.world_size))
        total += values.detach()
    return sum_over_processes(fabric, total)
