"""The loss and the scores of an objective over validation samples."""

from collections.abc import Callable, Sequence

import torch
from lightning_fabric import Fabric

from litft.data.packing import BatchLayout
from litft.data.sample import Sample
from litft.distributed.process_group import sum_over_processes
from litft.evaluation.scoring import SAMPLES_PER_PASS
from litft.model.transformer import GPT, eval_mode
from litft.training.objectives import Objective


@torch.no_grad()
def validation_scores(
    fabric: Fabric,
    objective: Objective,
    model: GPT,
    samples: Sequence[Sample],
    layout: BatchLayout,
    before_batch: Callable[[], None] = lambda: None,
) -> list[float]:
    """Return the objective's loss and scores over the samples of all ranks. before_batch: called
    before each micro-batch."""
    with eval_mode(model):
        # the divergence that KTO subtracts is over all of these samples
        objective.before_step(fabric, model, samples, layout, before_batch)
        totals = objective.totals(samples)
        values = torch.zeros(
            1 + len(objective.scores), dtype=torch.float64, device=fabric.device
        )
        for batch in layout.iter_batches(
            samples, SAMPLES_PER_PASS * fabric.world_size, fabric.global_rank
        ):
            before_batch()
            values += objective(model, batch.to(fabric.device), totals)
    return sum_over_processes(fabric, values).tolist()
