"""How a method changes a network: classes mixed over a module's own, and parameters of the base that are trained."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litft.model.mlp import ExpertLinear, Grouping, expert_linear
from litft.model.norm import Norm
from litft.model.quantization import QuantizedModule
from litft.model.transformer import GPT


@cache
def mixed(part: type, base: type) -> type:
    """The class of a module of type `base` with `part` mixed over it."""
    return type(f"{part.__name__}_{base.__name__}", (part, base), {})


class Mixin(nn.Module):
    """A class that a method mixes over a module's own, as PyTorch's fully_shard does."""

    on = True
    reads_weight = False  # whether `begin` has to see the module's own weight

    @classmethod
    def mix_over(cls, module: nn.Module) -> Any:
        """Give `module` this class over its own."""
        module.__class__ = mixed(cls, type(module))
        return module

    def reset_parameters(self) -> None:
        """Give what the part has registered its first values; the base's are there."""

    def turn(self, on: bool) -> None:
        """Let the module compute with the method, or as the base does."""
        self.on = on

    def remove(self) -> None:
        """Delete what the part has registered; its class goes next."""
        raise NotImplementedError


def mixins(model: nn.Module) -> list[Mixin]:
    """Every module that a method has changed."""
    return [module for module in model.modules() if isinstance(module, Mixin)]


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Inside, `model` computes as its base does."""
    changed = mixins(model)
    for module in changed:
        module.turn(False)
    try:
        yield
    finally:
        for module in changed:
            module.turn(True)


def detach(model: nn.Module) -> None:
    """Take the method off again: classes and parameters are the base's."""
    for module in mixins(model):
        while isinstance(module, Mixin):
            part, base = type(module).__bases__  # (the part, the type it was mixed over)
            part.remove(module)
            module.__class__ = base


class TrainedWeight(Mixin):
    """A module of which some parameters of its own are trained, in fp32; the base's wait in `others`.

    It computes in the dtype that it had before: the fp32 copies are rounded for each use, and gradients arrive in fp32.
    What needs no class beneath rounds them itself: norms, attention with its sinks, quantized Linears with their bias.
    """

    def replace_leaf(self, leaf: str, trained: nn.Parameter, dtype: torch.dtype, keep: bool) -> None:
        """Put a trained parameter in the place of the base's, which is kept or forgotten."""
        if "others" not in self.__dict__:
            self.others, self.dtype = {}, dtype
        if keep:
            self.others[leaf] = getattr(self, leaf)
        setattr(self, leaf, trained)

    def turn(self, on: bool) -> None:
        """Exchange what is trained and the base's."""
        if on != self.on:
            for leaf, other in self.others.items():
                self.others[leaf] = getattr(self, leaf)
                setattr(self, leaf, other)
        super().turn(on)

    def remove(self) -> None:
        """Back to the base's own parameters."""
        for leaf, frozen in self.others.items():
            setattr(self, leaf, frozen)
        del self.others, self.dtype


class TrainedLinear(TrainedWeight):
    """An nn.Linear with trained parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias if self.bias is None else self.bias.to(x.dtype))

    forward.is_plain = True  # of a head: the loss may take its weight and bias as they are


class TrainedExpertLinear(TrainedWeight):
    """An ExpertLinear with trained parameters."""

    def forward(self, x: Tensor, grouping: Grouping) -> Tensor:
        bias = self.bias if self.bias is None else self.bias.to(x.dtype)
        return expert_linear(x, self.weight.to(x.dtype), bias, grouping)


class TrainedEmbedding(TrainedWeight):
    """An nn.Embedding with trained rows."""

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight).to(self.dtype)


def trained_class(module: nn.Module) -> type[TrainedWeight]:
    """The class that trains a module's own parameters."""
    if isinstance(module, QuantizedModule):
        return TrainedWeight
    by_type = {nn.Linear: TrainedLinear, ExpertLinear: TrainedExpertLinear, nn.Embedding: TrainedEmbedding}
    return next((part for base, part in by_type.items() if isinstance(module, base)), TrainedWeight)


def train_parameters(
    model: GPT, names: Iterable[str], dtype: torch.dtype | None = None, keep: bool = True, apart: bool = False
) -> None:
    """Train the base's parameters of these names, in fp32.

    dtype: what the network computes in, default the parameter's own. keep: hold the base's for `disabled` and `detach`.
    apart: a tied head does not follow its embedding.
    """
    for name in names:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        frozen = getattr(module, leaf)
        data = frozen.detach().float()
        trained = nn.Parameter(data.clone() if keep and data.dtype == frozen.dtype else data)
        heads = [model.lm_head] if name == "embed.weight" and model.config.tied and not apart else []
        for each in [module, *heads]:  # a tied head stays the same parameter
            if not isinstance(each, TrainedWeight):
                trained_class(each).mix_over(each)
            each.replace_leaf(leaf, trained, dtype or frozen.dtype, keep)


def norm_names(model: nn.Module) -> list[str]:
    """The parameters of every norm."""
    norms = ((name, module) for name, module in model.named_modules() if isinstance(module, Norm))
    return [f"{name}.{leaf}" for name, module in norms for leaf, _ in module.named_parameters(recurse=False)]
