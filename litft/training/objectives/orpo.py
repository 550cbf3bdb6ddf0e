"""Odds ratio preference optimization, without a reference (arXiv 2403.07691)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from litft.training.objectives.pairs import PairObjective, Side


class ORPO(PairObjective):
    """The loss of the chosen answer, plus lambda times -log sigmoid(log odds_chosen - log
    odds_rejected).

    The odds p / (1 - p) are those of the mean log-probability of a token, log p (equations 4 to 7).
    The loss of the chosen answer is the mean over the answers' tokens; the prompt is not part of
    it. Learning rate: 8e-6 in the paper.
    """

    name = "orpo"
    title = "ORPO"
    paper = "2403.07691"
    full_learning_rate = 8e-6

    @property
    def nll_weight(self) -> float:
        """The weight of the mean loss per token of the chosen answers."""
        return 1.0

    def losses(self, chosen: Side, rejected: Side) -> Tensor:
        """Return the odds ratio's loss of each pair, (P,)."""
        return -self.args.orpo_lambda * F.logsigmoid(
            _log_odds(chosen.mean) - _log_odds(rejected.mean)
        )

    def reward(self, side: Side) -> Tensor:
        """Return the reward of each answer, (P,)."""
        return self.args.orpo_lambda * side.mean


def _log_odds(log_p: Tensor) -> Tensor:
    """Return log (p / (1 - p)) from log p; a probability of 1 counts as slightly less."""
    log_p = log_p.clamp(max=-1e-9)
    return log_p - torch.log(-torch.expm1(log_p))
