"""Kahneman-Tversky optimization: answers that are desirable or not, without pairs (arXiv
2402.01306)."""

from collections.abc import Callable, Mapping, Sequence

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from litft.data.packing import BatchLayout, MicroBatch
from litft.data.sample import Sample
from litft.distributed.process_group import sum_over_processes
from litft.evaluation.log_probs import (
    document_log_probs,
    label_margins,
    sequence_log_probs,
    wins,
)
from litft.training.objectives.objective import Objective, Totals


class KTO(Objective):
    """w (1 - sigmoid(beta (r - z))) for desirable answers, and w (1 - sigmoid(beta (z - r))) for
    undesirable ones.

    r is the log-probability of an answer relative to the reference. z estimates the KL divergence
    from the reference: the mean of r over the step's prompts with answers of other examples, at
    least 0 and without a gradient.
    Learning rate: as for DPO; TRL's example trains a model of 1.8B in full with 5e-7.
    """

    name = "kto"
    title = "KTO"
    needs_token_losses = True
    paper = "2402.01306"
    needs_reference = True
    needs_mismatches = True
    scores = (
        "accuracy",
        "margin",
        "chosen_reward",
        "rejected_reward",
        "chosen_logp",
        "rejected_logp",
        "kl",
    )
    default_beta = 0.1
    full_learning_rate = 5e-6
    kl: Tensor  # z of the current step, () fp64

    def totals(self, samples: Sequence[Sample]) -> Totals:
        """Return the counts of a step's samples."""
        desirable = [sample for sample in samples if sample.desirable]
        tokens = sum(sample.supervised for sample in desirable)
        return Totals(len(samples), tokens, len(desirable), len(samples) - len(desirable))

    def weight(self, score: str, totals: Totals) -> float:
        """Return the number of answers that a score counts: the desirable, the undesirable, or
        all."""
        if score.startswith("chosen"):
            return totals.desirable
        if score.startswith("rejected"):
            return totals.undesirable
        return totals.samples

    def together(
        self, by_set: Sequence[Mapping[str, float]], totals: Sequence[Totals]
    ) -> dict[str, float]:
        """Return the loss and the scores over several sets; the margin is between the means of all
        desirable and of all undesirable answers."""
        sums = []
        for values, counts in zip(by_set, totals, strict=True):
            sums.append(
                values["chosen_logp"] * counts.desirable if counts.desirable else 0.0
            )
        together = self.together_with_tokens(by_set, totals, sums, self.args.sft_weight)
        together["margin"] = together["chosen_reward"] - together["rejected_reward"]
        return together

    def before_step(
        self,
        fabric: Fabric,
        model: nn.Module,
        samples: Sequence[Sample],
        layout: BatchLayout,
        before_batch: Callable[[], None] = lambda: None,
    ) -> None:
        """Compute the KL divergence over the step's samples with the answers of others."""
        mismatches: list[Sample] = []
        for sample in samples:
            # `RunSamples` adds one, as `needs_mismatches` says
            assert sample.mismatch is not None
            mismatches.append(sample.mismatch)
        log_probs, _ = document_log_probs(
            model, mismatches, layout, fabric.device, fabric.global_rank, before_batch
        )
        total = sum_over_processes(fabric, log_probs.sum())

        # each process has computed its part of the log-probabilities, but knows all references
        references: list[float] = []
        for mismatch in mismatches:
            references.extend(mismatch.reference)
        self.kl = ((total - sum(references)) / len(samples)).clamp(min=0)

    def scores_of_each(
        self,
        samples: Sequence[Sample],
        log_probs: Tensor,
        lengths: Tensor,
        weights: Sequence[float] = (),
    ) -> dict[str, Tensor]:
        """Return what each answer adds to the margin between desirable and undesirable ones:
        (S,)."""
        references = log_probs.new_tensor([sample.reference for sample in samples])
        rewards = self.beta * (log_probs - references)[:, 0]
        desirable = [bool(sample.desirable) for sample in samples]
        labels = torch.tensor(desirable, device=rewards.device)
        return {"margin": label_margins(rewards, labels, weights)}

    def begin_probe(self, device: torch.device) -> None:
        """Prepare for a micro-batch that only measures memory, without `before_step`."""
        self.kl = torch.zeros((), dtype=torch.float64, device=device)

    def __call__(self, model: nn.Module, batch: MicroBatch, totals: Totals) -> Tensor:
        """Return (8,): this micro-batch's share of the step's loss and of the scores."""
        log_probs, _ = sequence_log_probs(model, batch)
        # a process without samples returns zeros that still depend on the network
        if batch.sequences is None:
            return torch.cat([log_probs.sum()[None], log_probs.new_zeros(len(self.scores))])
        references = batch.sequences.references
        desirable = batch.sequences.desirable
        advantage = self.beta * (log_probs - references - self.kl)
        # (B,): how much better the network is with the label than the reference
        gain = torch.where(desirable, advantage, -advantage)
        weights = torch.where(
            desirable, self.args.desirable_weight, self.args.undesirable_weight
        )
        losses = weights * (1 - torch.sigmoid(gain))
        loss = losses.sum() / totals.samples
        # plus the mean loss per token of the desirable answers
        if self.args.sft_weight:
            weighted = self.args.sft_weight * (log_probs * desirable).sum()
            loss = loss - weighted / max(1, totals.tokens)
        with torch.no_grad():
            rewards = self.beta * (log_probs - references)
            means = [
                *_means_by_label(rewards, desirable, totals),
                *_means_by_label(log_probs, desirable, totals),
            ]
            # the shares of all micro-batches sum to it
            kl = self.kl * (len(log_probs) / totals.samples)
            accuracy = wins(gain).sum() / totals.samples
            scores = [accuracy, means[0] - means[1], *means, kl]
        return torch.stack([loss, *scores])


def _means_by_label(
    values: Tensor, desirable: Tensor, totals: Totals
) -> tuple[Tensor, Tensor]:
    """Return this micro-batch's shares of the means over the step's desirable answers, and over its
    undesirable ones, NaN without any."""
    of_desirable = (values * desirable).sum() / totals.desirable
    of_undesirable = (values * ~desirable).sum() / totals.undesirable
    return of_desirable, of_undesirable
