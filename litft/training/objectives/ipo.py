"""Identity preference optimization (arXiv 2310.12036)."""

from torch import Tensor

from litft.training.objectives.pairs import PairObjective, Side


class IPO(PairObjective):
    """(r_chosen - r_rejected - 1 / (2 beta))^2, where r is the *mean* log-probability of a token
    relative to the reference.

    The paper writes sums (equation 17). Means keep the target difference independent of the
    answers' lengths; TRL uses them too, and has confirmed them with the authors
    (https://huggingface.co/blog/pref-tuning). Learning rate: as for DPO.
    """

    name = "ipo"
    title = "IPO"
    paper = "2310.12036"
    needs_reference = True
    default_beta = 0.1
    full_learning_rate = 5e-6

    def losses(self, chosen: Side, rejected: Side) -> Tensor:
        """Return the loss of each pair, (P,)."""
        return (
            (self.reward(chosen) - self.reward(rejected)) / self.beta - 1 / (2 * self.beta)
        ) ** 2

    def reward(self, side: Side) -> Tensor:
        """Return the implicit reward of each answer, (P,)."""
        return self.beta * side.ratio / side.lengths
