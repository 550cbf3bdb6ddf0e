"""Simple preference optimization, without a reference (arXiv 2405.14734)."""

import torch.nn.functional as F
from torch import Tensor

from litft.training.objectives.pairs import PairObjective, Side


class SimPO(PairObjective):
    """-log sigmoid(beta (m_chosen - m_rejected) - gamma), where m is the mean log-probability of a
    token.

    Defaults: the authors recommend beta of 2 to 2.5, gamma / beta of about 0.5, and learning rates
    of 3e-7 to 1e-6 for full fine-tuning (https://github.com/princeton-nlp/SimPO).
    """

    name = "simpo"
    title = "SimPO"
    paper = "2405.14734"
    full_learning_rate = 1e-6
    default_beta = 2.0

    def losses(self, chosen: Side, rejected: Side) -> Tensor:
        """Return the loss of each pair, (P,)."""
        margin = self.reward(chosen) - self.reward(rejected) - self.args.gamma
        smoothing = self.args.label_smoothing
        return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)

    def reward(self, side: Side) -> Tensor:
        """Return the reward of each answer, (P,)."""
        return self.beta * side.mean
