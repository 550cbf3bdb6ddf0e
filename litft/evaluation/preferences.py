"""Scores on preferences: how probable a model finds the chosen and the rejected, or desirable and
undesirable, answers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from litft.data.packing import BatchLayout
from litft.data.sample import Sample
from litft.evaluation.log_probs import document_log_probs, label_margins, wins
from litft.evaluation.verdict import Key, Part, parts_of
from litft.model.transformer import GPT


@dataclass(frozen=True)
class PreferenceScores:
    """A model's log-probabilities of the answers of N examples: pairs, or single answers with
    labels."""

    # summed over tokens: (N, 2), chosen and rejected, or (N, 1)
    log_probs: Tensor
    lengths: Tensor  # number of tokens, like log_probs
    desirable: Tensor | None  # (N,) bool: the labels; None for pairs

    @classmethod
    def of(
        cls, model: GPT, samples: list[Sample], rows: int, name: str
    ) -> "PreferenceScores":
        """Compute them. rows: examples per forward pass; name: the model's, for the progress
        bar."""
        if samples[0].documents:
            labels = None
        else:
            labels = torch.tensor([sample.desirable for sample in samples])
        with tqdm(
            total=-(-len(samples) // rows), desc=f"{name}: preferences", disable=None
        ) as bar:
            log_probs, lengths = document_log_probs(
                model, samples, BatchLayout(rows), model.device, before_batch=bar.update
            )
        return cls(log_probs.cpu(), lengths.cpu(), labels)

    def scores(self) -> dict[str, float]:
        """Return the number of examples, and the scores of summed and of mean log-probabilities
        (`per token`)."""
        means = {
            f"{key} per token": value
            for key, value in self._compare(self.log_probs / self.lengths).items()
        }
        counted = "pairs" if self.desirable is None else "labelled answers"
        return {counted: len(self.log_probs)} | self._compare(self.log_probs) | means

    def over(self, base: "PreferenceScores") -> dict[str, float]:
        """Return the scores relative to the base's: those that DPO and KTO optimize, with a beta of
        1."""
        # the difference is the implicit reward
        relative = self._compare(self.log_probs - base.log_probs)
        return {f"{key} over the base": value for key, value in relative.items()}

    def parts(self, names: Sequence[Key]) -> dict[str, dict[Key, Part]]:
        """Return what each example adds to the scores; names: of the samples."""
        if self.desirable is None:
            margins = self.log_probs[:, 0] - self.log_probs[:, 1]
            scores = {"accuracy": wins(margins), "margin": margins}
        else:
            scores = {"margin": label_margins(self.log_probs[:, 0], self.desirable)}
        return {
            name: parts_of(names, map(Part, found.tolist()))
            for name, found in scores.items()
        }

    def _compare(self, values: Tensor) -> dict[str, float]:
        """Return how often, and by how much, chosen answers have higher values than rejected ones,
        or the labels' means."""
        if self.desirable is None:
            # pairs compare two answers to the same prompt
            margins = values[:, 0] - values[:, 1]
            return {
                "accuracy": float(wins(margins).mean()),
                "margin": float(margins.mean()),
            }
        labels = {"desirable": self.desirable, "undesirable": ~self.desirable}
        return {
            f"{name}: log-probability": float(values[mask].mean())
            for name, mask in labels.items()
            if mask.any()
        }
