"""Several adapters of one base, combined: what each changes is computed exactly, then added."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from litft.model.config import Config
from litft.model.transformer import GPT
from litft.pretrained.save import Result

# Dimensions: A adapters


@dataclass(frozen=True)
class CombinedResult:
    """The results of several methods that change the same base."""

    results: Sequence[Result]
    weights: Sequence[float]
    # share of the changes that TIES keeps; None: all of them are added
    density: float | None = None

    def config(self, config: Config) -> Config:
        """Return the base's config, untied if one of the methods changes only embedding or head."""
        tied = all(result.config(config).tied for result in self.results)
        return replace(config, tied=tied)

    def check(self, names: list[str]) -> None:
        """Raise ValueError if a method cannot be merged, or has a vocabulary of its own."""
        for result in self.results:
            if result.method.tokens:
                raise ValueError(
                    "adapters with new tokens cannot be combined: their rows have no counterpart "
                    "in the others; merge one alone"
                )
            result.check(names)

    def replacement(self, name: str, base: GPT) -> Tensor | None:
        """Return None: every tensor depends on the base's."""
        return None

    def tensor(self, name: str, weight: Tensor, base: GPT) -> Tensor:
        """Return the base's tensor `weight` with the combined changes, in fp32; unchanged where no
        adapter changes it."""
        changes = []
        weights = []
        weight = weight.float()
        for result, factor in zip(self.results, self.weights, strict=True):
            # a method that keeps the tie has one tensor for embedding and head
            keeps_tie = base.config.tied and result.config(base.config).tied
            if name == "lm_head.weight" and keeps_tie:
                merged = result.tensor("embed.weight", weight, base)
            else:
                merged = result.tensor(name, weight, base)
            # methods return the same tensor where they change nothing
            if merged is not weight:
                changes.append(merged.float() - weight)
                weights.append(factor)
        if not changes:
            return weight
        stacked = torch.stack(changes)
        factors = torch.tensor(weights).view(-1, *(1,) * weight.dim())
        if self.density is None:
            return weight + (stacked * factors).sum(dim=0)
        return weight + ties(stacked, factors, self.density)


def ties(changes: Tensor, weights: Tensor, density: float) -> Tensor:
    """Return changes (A, ...) combined by TIES (arXiv 2306.01708) as in PEFT, with the sign that
    has the larger sum.

    weights: of the changes, with the same number of dimensions. density: the share of the elements
    of each change that is kept, those of largest size.
    """
    kept = torch.stack([_largest(change, density) for change in changes])
    sign = torch.where(kept.sum(dim=0) >= 0, 1, -1)
    agrees = kept.sign() == sign
    count = agrees.sum(dim=0).clamp(min=1)
    return (kept * weights * agrees).sum(dim=0) / count


def _largest(change: Tensor, density: float) -> Tensor:
    """Return a tensor with zeros in place of all but its largest elements."""
    count = int(density * change.numel())
    if count == change.numel():
        return change
    indices = change.abs().flatten().topk(count).indices
    mask = torch.zeros(change.numel())
    mask[indices] = 1
    return change * mask.view_as(change)
