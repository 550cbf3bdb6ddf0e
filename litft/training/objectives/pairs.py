"""What the objectives over pairs share: both answers' log-probabilities, the scores, and the loss
of the chosen answer."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from litft.data.packing import MicroBatch
from litft.data.sample import Sample
from litft.evaluation.log_probs import sequence_log_probs, wins
from litft.training.objectives.objective import Objective, Totals


class Side(NamedTuple):
    """The chosen, or the rejected, answers of P pairs; all (P,) fp64."""

    log_probs: Tensor  # summed over the answer's tokens
    lengths: Tensor  # number of the answer's tokens
    # the log-probabilities in the reference model
    references: Tensor

    @property
    def mean(self) -> Tensor:
        """The mean log-probability of a token in each answer, (P,)."""
        return self.log_probs / self.lengths

    @property
    def ratio(self) -> Tensor:
        """The log of each answer's probability relative to the reference, (P,)."""
        return self.log_probs - self.references


class PairObjective(Objective):
    """An objective over pairs of a chosen and a rejected answer; subclasses define the loss of a
    pair and the rewards."""

    needs_token_losses = True

    scores = (
        "accuracy",
        "margin",
        "chosen_reward",
        "rejected_reward",
        "chosen_logp",
        "rejected_logp",
    )

    @property
    def nll_weight(self) -> float:
        """The weight of the mean loss per token of the chosen answers, which is added."""
        return self.args.sft_weight

    def losses(self, chosen: Side, rejected: Side) -> Tensor:
        """Return the loss of each pair, (P,)."""
        raise NotImplementedError

    def reward(self, side: Side) -> Tensor:
        """Return the reward of each answer, (P,), whose difference the loss increases."""
        raise NotImplementedError

    def totals(self, samples: Sequence[Sample]) -> Totals:
        """Return the counts of a step's samples; the chosen answer is the first document."""
        return Totals(len(samples), sum(sample.split()[0].supervised for sample in samples))

    def together(
        self, by_set: Sequence[Mapping[str, float]], totals: Sequence[Totals]
    ) -> dict[str, float]:
        """Return the loss and the scores over several sets; the loss of the chosen answers counts
        their tokens."""
        sums = []
        for values, counts in zip(by_set, totals, strict=True):
            sums.append(values["chosen_logp"] * counts.samples)
        return self.together_with_tokens(by_set, totals, sums, self.nll_weight)

    def scores_of_each(
        self,
        samples: Sequence[Sample],
        log_probs: Tensor,
        lengths: Tensor,
        weights: Sequence[float] = (),
    ) -> dict[str, Tensor]:
        """Return whether each chosen answer has the higher reward, and by how much: (P,) each."""
        # without a reference, its log-probabilities are not read
        references = [sample.reference or (0.0, 0.0) for sample in samples]
        chosen, rejected = _sides(log_probs, lengths, log_probs.new_tensor(references))
        margin = self.reward(chosen) - self.reward(rejected)
        return {"accuracy": wins(margin), "margin": margin}

    def __call__(self, model: nn.Module, batch: MicroBatch, totals: Totals) -> Tensor:
        """Return (7,): this micro-batch's share of the step's loss and of the scores."""
        log_probs, lengths = sequence_log_probs(model, batch)
        if batch.sequences is None:
            references = log_probs.detach()
        else:
            references = batch.sequences.references

        # documents 2 n and 2 n + 1 are the chosen and the rejected answer of pair n: (pairs, 2)
        chosen, rejected = _sides(
            log_probs.view(-1, 2), lengths.view(-1, 2), references.view(-1, 2)
        )

        # log-probabilities are negative losses, hence the minus below
        loss = self.losses(chosen, rejected).sum() / totals.samples
        if self.nll_weight:
            loss = loss - self.nll_weight * chosen.log_probs.sum() / totals.tokens
        with torch.no_grad():
            rewards = [self.reward(chosen), self.reward(rejected)]
            margin = rewards[0] - rewards[1]
            scores = torch.stack(
                [wins(margin), margin, *rewards, chosen.log_probs, rejected.log_probs]
            )
        return torch.cat([loss[None], scores.sum(1) / totals.samples])


def _sides(log_probs: Tensor, lengths: Tensor, references: Tensor) -> tuple[Side, Side]:
    """Return the chosen and the rejected answers of pairs, from (P, 2) each."""
    chosen = Side(log_probs[:, 0], lengths[:, 0], references[:, 0])
    rejected = Side(log_probs[:, 1], lengths[:, 1], references[:, 1])
    return chosen, rejected
