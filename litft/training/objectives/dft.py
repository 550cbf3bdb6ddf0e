"""Dynamic fine-tuning (arXiv 2508.05629): a token that the model finds improbable counts less."""

from torch import Tensor, nn

from litft.data.packing import MicroBatch
from litft.training.objectives.objective import Totals
from litft.training.objectives.supervised import Supervised


class DFT(Supervised):
    """The cross-entropy of each target token times its probability, which has no gradient.

    The loss that is reported is the cross-entropy itself: the product is small for a token that the
    model is sure of, and for one that it is sure not to choose.
    """

    name = "dft"
    title = "DFT"
    paper = "2508.05629"
    needs_token_losses = True

    def __call__(self, model: nn.Module, batch: MicroBatch, totals: Totals) -> Tensor:
        """Return (1,): this micro-batch's share of the cross-entropy, with the gradient of DFT."""
        losses = model(batch.tokens, **batch.inputs(), reduction="none")  # (N,)
        probabilities = (-losses).exp().detach()
        weighted = (losses * probabilities).sum()
        reported = losses.detach().sum()
        loss = weighted + (reported - weighted.detach())
        return (loss / totals.tokens)[None]
