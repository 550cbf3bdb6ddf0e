"""Learning from the probabilities of a teacher (arXiv 1503.02531, 2306.13649)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from litft.args import DistillArgs, FinetuneArgs
from litft.data.packing import MicroBatch
from litft.data.sample import Sample
from litft.evaluation.rewards.reward import Reward
from litft.model.distillation import Distillation, TeacherTargets
from litft.training.objectives.objective import Objective, Totals

# a student's own answers that a device generates at once
ROWS = 64


class Distill(Objective):
    """alpha x cross-entropy of the data's answers + (1 - alpha) x divergence from the teacher, each
    a mean over target tokens."""

    name = "distill"
    title = "distillation"
    paper = "2306.13649"
    scores = ("cross_entropy", "divergence")

    def __init__(self, args: DistillArgs) -> None:
        self.distill = args

    @classmethod
    def of(cls, args: FinetuneArgs, rewards: Sequence[Reward] = ()) -> "Distill":
        """Return the objective of the flags; rewards: none."""
        return cls(args.distill)

    @property
    def beta_or_none(self) -> float | None:
        """--preference.beta does not apply."""
        return None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of metrics.csv that a step has next to the loss."""
        if not self.distill.on_policy:
            return self.scores
        of_answers = (
            "own_answers",
            "completion_tokens",
            "rollout_seconds",
            "teacher_seconds",
        )
        return (*of_answers, *self.scores)

    def uniform_loss(self, vocab_size: int) -> float:
        """Return roughly the loss of a uniform guess: a low temperature sharpens the teacher's
        probabilities and the student's mistakes."""
        return math.log(vocab_size) / min(1.0, self.distill.temperature)

    def totals(self, samples: Sequence[Sample]) -> Totals:
        """Return the counts of a step's samples: of all target tokens, and of the data's."""
        tokens = 0
        labels = 0
        for sample in samples:
            tokens += sample.supervised
            if not sample.is_own:
                labels += sample.supervised
        return Totals(len(samples), tokens, labels=labels)

    def weight(self, score: str, totals: Totals) -> float:
        """Return the number of target tokens; of the cross-entropy, those of the data."""
        if score == "cross_entropy":
            return totals.labels
        return totals.tokens

    def __call__(self, model: nn.Module, batch: MicroBatch, totals: Totals) -> Tensor:
        """Return (3,): this micro-batch's share of the step's loss and of the scores."""
        how = Distillation(
            batch.teacher or self._no_teacher(batch),
            # the cross-entropy is a mean over the labels, the divergence one over all targets
            label_weight=self.distill.alpha * totals.tokens / max(1, totals.labels),
            teacher_weight=1 - self.distill.alpha,
            beta=self.distill.beta,
            temperature=self.distill.temperature,
        )
        loss, cross_entropy, divergence = model(
            batch.tokens, **batch.inputs(), distillation=how
        )
        # without labels, their cross-entropy has no value
        labels = totals.labels or math.nan
        return torch.stack(
            [loss / totals.tokens, cross_entropy / labels, divergence / totals.tokens]
        )

    def _no_teacher(self, batch: MicroBatch) -> TeacherTargets:
        """Return values of the right shapes, for a micro-batch without samples, or one that only
        measures memory."""
        count = len(batch.target_indices)
        device = batch.tokens.device
        # one token fewer than the vocabulary may have, so that there are always others
        num_ids = max(1, self.distill.top_k - 1)
        return TeacherTargets(
            torch.arange(num_ids, device=device, dtype=torch.int32).expand(count, num_ids),
            torch.zeros(count, num_ids + 1, device=device, dtype=torch.float16),
            torch.ones(count, device=device, dtype=torch.bool),
        )
