"""Supervised fine-tuning: the mean loss per target token."""

from collections.abc import Sequence

from torch import Tensor, nn

from litft.data.packing import MicroBatch
from litft.data.sample import Sample
from litft.training.objectives.objective import Objective, Totals


class Supervised(Objective):
    """The mean cross-entropy of the target tokens."""

    name = "sft"
    title = "supervised"
    is_cross_entropy = True

    def totals(self, samples: Sequence[Sample]) -> Totals:
        """Return the counts of a step's samples."""
        return Totals(len(samples), sum(sample.supervised for sample in samples))

    def weight(self, score: str, totals: Totals) -> float:
        """Return the number of target tokens."""
        return totals.tokens

    def __call__(self, model: nn.Module, batch: MicroBatch, totals: Totals) -> Tensor:
        """Return (1,): the summed loss, divided by the step's target tokens."""
        loss, _ = model(batch.tokens, **batch.inputs())
        return (loss / totals.tokens)[None]
