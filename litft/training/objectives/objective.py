"""The protocol of objectives, and the log-probabilities of whole sequences that most of them
compare."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from litft.args import FinetuneArgs, PreferenceArgs
from litft.args.preference import DATA_KINDS, DataKind
from litft.data.packing import BatchLayout, MicroBatch
from litft.data.sample import Sample
from litft.evaluation.rewards.reward import Reward

# learning rate of LoRA divided by that of full fine-tuning (https://thinkingmachines.ai/blog/lora)
LORA_RATIO = 10
# the default learning rate of LoRA with the supervised objective
SFT_LORA_RATE = 2e-4

# D sequences of a micro-batch, N target tokens


class Totals(NamedTuple):
    """Counts over a step's samples on all processes: what sums of losses are divided by.

    They are whole, but for a validation set of which a part is measured: it counts as the whole.
    """

    samples: float
    # target tokens; of preferences: those of the chosen (desirable) answers
    tokens: float
    desirable: float = 0  # samples with this label
    undesirable: float = 0
    learned: float = 0  # tokens of completions that have a gradient
    labels: float = 0  # target tokens of the data's answers, without those of a student


class Objective:
    """What training minimizes. The loss of a micro-batch is its sum of losses / counts of the whole
    step.

    The sum over a step's micro-batches and processes is therefore the step's loss, however its
    samples are laid out.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str | None] = None  # arXiv id
    # the samples have the log-probabilities of the model at the start
    needs_reference: ClassVar[bool] = False
    # the loss of each token, not their sum
    needs_token_losses: ClassVar[bool] = False
    # the loss that is reported is the cross-entropy per target token
    is_cross_entropy: ClassVar[bool] = False
    # KTO: each prompt is also scored with the answer of another sample, for the KL term
    needs_mismatches: ClassVar[bool] = False
    scores: ClassVar[tuple[str, ...]] = ()  # columns of metrics.csv next to the loss
    default_beta: ClassVar[float | None] = None  # None: it has no beta
    # the default for full fine-tuning; None: the method's default
    full_learning_rate: ClassVar[float | None] = None

    # optimizer updates with the samples of one step
    updates: int = 1
    # samples of a step for each example
    group_size: int = 1
    # of prompts: the most tokens of a completion
    completion_tokens: int = 0
    # forward passes over a step's samples in addition to those of the updates
    extra_forward_passes: int = 0

    def __init__(self, args: PreferenceArgs) -> None:
        self.args = args

    @classmethod
    def of(cls, args: FinetuneArgs, rewards: Sequence[Reward] = ()) -> "Objective":
        """Return the objective of the flags; rewards: functions in place of those of --reward."""
        return cls(args.preference)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of metrics.csv that a step has next to the loss."""
        return self.scores

    @property
    def validation_scores(self) -> tuple[str, ...]:
        """What a validation measures next to the loss."""
        return self.scores

    @property
    def data_kind(self) -> DataKind:
        """The kind of examples that it learns from."""
        return DATA_KINDS[self.name]

    @property
    def beta_or_none(self) -> float | None:
        """--preference.beta or the default; None: it has no beta."""
        return self.args.beta or self.default_beta

    @property
    def beta(self) -> float:
        """How closely the model is kept to the reference, or the scale of the rewards without
        one."""
        beta = self.beta_or_none
        assert beta is not None  # read by those with a default alone
        return beta

    @classmethod
    def learning_rate(cls, method: str, default: float) -> float:
        """Return the default learning rate; default: the method's for supervised fine-tuning.

        Methods that train few parameters get LORA_RATIO times the rate of full fine-tuning, in
        proportion to `default`.
        """
        if cls.full_learning_rate is None:
            return default
        if method == "full":
            return cls.full_learning_rate
        return cls.full_learning_rate * (LORA_RATIO * default / SFT_LORA_RATE)

    def uniform_loss(self, vocab_size: int) -> float:
        """Return roughly the loss of a uniform guess; a loss far above it has exploded."""
        return math.log(vocab_size)

    def totals(self, samples: Sequence[Sample]) -> Totals:
        """Return the counts of a step's samples."""
        raise NotImplementedError

    def learned(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return the samples that a step computes: those with a gradient."""
        return samples

    def together(
        self, by_set: Sequence[Mapping[str, float]], totals: Sequence[Totals]
    ) -> dict[str, float]:
        """Return "loss" and the other scores over several sets, each with its values and its
        totals: means, weighted by what a score counts.

        A set without answers of a kind has no value (NaN).
        """
        names = list(by_set[0])
        means: dict[str, float] = {}
        for name in names:
            means[name] = self._mean(name, [values[name] for values in by_set], totals)
        return means

    def together_with_tokens(
        self,
        by_set: Sequence[Mapping[str, float]],
        totals: Sequence[Totals],
        sums: Sequence[float],
        weight: float,
    ) -> dict[str, float]:
        """Return `together` where the loss has `weight` times the mean loss of the tokens of chosen
        answers, which is weighted by tokens. sums: of each set, that of their
        log-probabilities."""
        without = []
        for values, counts, total in zip(by_set, totals, sums, strict=True):
            of_tokens = -total / max(1, counts.tokens)
            without.append({**values, "loss": values["loss"] - weight * of_tokens})
        together = Objective.together(self, without, totals)
        tokens = max(1, sum(counts.tokens for counts in totals))
        together["loss"] -= weight * sum(sums) / tokens
        return together

    def _mean(self, score: str, values: Sequence[float], totals: Sequence[Totals]) -> float:
        """Return the weighted mean of a score over several sets."""
        weights = []
        weighted = []
        for value, counts in zip(values, totals, strict=True):
            # NaN is a score without answers of its kind, but a loss of NaN must stay visible
            if score == "loss" or not math.isnan(value):
                weight = self.weight(score, counts)
                weights.append(weight)
                weighted.append(value * weight)
        if sum(weights):
            return sum(weighted) / sum(weights)
        return math.nan

    def weight(self, score: str, totals: Totals) -> float:
        """Return what a set counts in the mean of a score."""
        return totals.samples

    def before_step(
        self,
        fabric: Fabric,
        model: nn.Module,
        samples: Sequence[Sample],
        layout: BatchLayout,
        before_batch: Callable[[], None] = lambda: None,
    ) -> None:
        """Compute what the losses of all of a step's micro-batches depend on.

        Every process takes part.
        """

    def scores_of_each(
        self,
        samples: Sequence[Sample],
        log_probs: Tensor,
        lengths: Tensor,
        weights: Sequence[float] = (),
    ) -> dict[str, Tensor]:
        """Return scores that each preference has by itself, (S,) each: those in which a run is
        compared with the model before it.

        log_probs, lengths: (S, D) fp64, as from `document_log_probs`. weights: how many preferences
        each stands for in a mean; empty: 1.
        """
        return {}

    def begin_probe(self, device: torch.device) -> None:
        """Prepare for a micro-batch that only measures memory, without `before_step`."""

    def __call__(self, model: nn.Module, batch: MicroBatch, totals: Totals) -> Tensor:
        """Return (1 + len(scores),): this micro-batch's share of the step's loss, with a gradient,
        and of its scores."""
        raise NotImplementedError
