"""Direct preference optimization (arXiv 2305.18290), with the conservative form for noisy
labels."""

import torch.nn.functional as F
from torch import Tensor

from litft.training.objectives.pairs import PairObjective, Side


class DPO(PairObjective):
    """-log sigmoid(beta (r_chosen - r_rejected)), where r is the log-probability relative to the
    reference.

    With label smoothing e, the loss of the pair as it is has the weight 1 - e, and that of the
    exchanged pair e (https://ericmitchell.ai/cdpo.pdf). Learning rate: 7B models were trained in
    full with 5e-7 (Zephyr, arXiv 2310.16944; Tulu 2, arXiv 2311.10702); smaller models and shorter
    runs take more.
    """

    name = "dpo"
    title = "DPO"
    paper = "2305.18290"
    needs_reference = True
    default_beta = 0.1
    full_learning_rate = 5e-6

    def losses(self, chosen: Side, rejected: Side) -> Tensor:
        """Return the loss of each pair, (P,)."""
        margin = self.reward(chosen) - self.reward(rejected)
        smoothing = self.args.label_smoothing
        return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)

    def reward(self, side: Side) -> Tensor:
        """Return the implicit reward of each answer, (P,)."""
        return self.beta * side.ratio
