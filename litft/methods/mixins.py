"""How a method changes a network: classes mixed over a module's type, and base parameters that are
trained."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litft.model.mlp import ExpertLinear, Grouping, expert_linear
from litft.model.norm import Norm
from litft.model.quantization import QuantizedModule
from litft.model.recomputation import recomputable
from litft.model.transformer import GPT

# C channels, N rows of expert inputs

M = TypeVar("M", bound=nn.Module)


@cache
def subclass_with(mixin: type, base: type) -> type:
    """Return a subclass of `mixin` and `base`, in this order; the same class for the same
    arguments."""
    return type(f"{mixin.__name__}_{base.__name__}", (mixin, base), {})


def change_class(module: nn.Module, mixin: type[M]) -> M:
    """Change the type of `module` to one that puts `mixin` before its current type; return the
    module."""
    module.__class__ = subclass_with(mixin, type(module))
    assert isinstance(module, mixin)  # a base of its new type
    return module


class Mixin(nn.Module):
    """Base of the classes that a method mixes over a module's type, as PyTorch's fully_shard does.

    A subclass registers parameters on the module in a method of its own, overrides
    `reset_parameters` and `remove`, and overrides `forward` (or `Attention.add_attended`), which
    calls `super()` and returns its result if not `enabled`.
    """

    enabled = True
    # whether the mixin reads the weight of the module besides `forward`: it is then gathered in
    # `reset_parameters`, and a Linear is not packed
    reads_weight = False

    @classmethod
    def convert_module(cls: type[M], module: nn.Module) -> M:
        """Change the type of `module` to one that puts this class before its current type; return
        the module."""
        return change_class(module, cls)

    def reset_parameters(self) -> None:
        """Initialize the parameters that the mixin has registered; the module's own weights are
        already loaded."""

    def set_enabled(self, enabled: bool) -> None:
        """Compute with the method if `enabled`, otherwise like the base."""
        self.enabled = enabled

    def remove(self) -> None:
        """Delete what the mixin has registered; `detach` then restores the type."""
        raise NotImplementedError


def mixins(model: nn.Module) -> list[Mixin]:
    """Return all modules that a method has changed."""
    changed = []
    for module in model.modules():
        if isinstance(module, Mixin):
            changed.append(module)
    return changed


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Within the context, `model` computes like its base."""
    changed = mixins(model)
    for module in changed:
        module.set_enabled(False)
    try:
        yield
    finally:
        for module in changed:
            module.set_enabled(True)


def detach(model: nn.Module) -> None:
    """Remove the method: restore the base's classes and parameters."""
    for module in mixins(model):
        # several classes may be mixed over one module; the one mixed last is removed first
        while isinstance(module, Mixin):
            mixin, base = type(module).__bases__
            mixin.remove(module)
            module.__class__ = base


class TrainedWeight(Mixin):
    """A module with parameters of the base that are trained, in fp32.

    It computes in the dtype that it had before: the fp32 parameters are rounded at each use, and
    their gradients are fp32. Norms, attention (its sinks) and quantized Linears (their bias) round
    them in their own `forward`; other modules need a subclass. `inactive` has, by leaf name, the
    base's parameters, or the trained ones while the mixin is disabled.
    """

    inactive: dict[str, nn.Parameter]
    dtype: torch.dtype

    def replace_leaf(
        self, leaf: str, trained: nn.Parameter, dtype: torch.dtype, keep: bool
    ) -> None:
        """Replace the parameter `leaf` by a trained one. keep: store the base's parameter for
        `set_enabled` and `remove`."""
        # the first trained parameter of this module
        if "inactive" not in self.__dict__:
            self.inactive = {}
            self.dtype = dtype
        if keep:
            self.inactive[leaf] = getattr(self, leaf)
        setattr(self, leaf, trained)

    def set_enabled(self, enabled: bool) -> None:
        """Swap the trained parameters and the base's."""
        # swapping twice would bring back the wrong parameters
        if enabled != self.enabled:
            for leaf, parameter in self.inactive.items():
                self.inactive[leaf] = getattr(self, leaf)
                setattr(self, leaf, parameter)
        super().set_enabled(enabled)

    def remove(self) -> None:
        """Restore the base's parameters."""
        for leaf, parameter in self.inactive.items():
            setattr(self, leaf, parameter)
        del self.inactive, self.dtype


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight of any shape in `dtype`; a block that recomputes does not save the copy."""
    if weight.dtype == dtype:
        return weight
    return recomputable(lambda weight: weight.to(dtype), weight)


class TrainedLinear(TrainedWeight):
    """An nn.Linear with trained parameters."""

    is_plain = True  # see model/linear.py
    # of the nn.Linear
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b, (..., out), for x (..., in), in the dtype of x."""
        weight = rounded(self.weight, x.dtype)
        if self.bias is None:
            return F.linear(x, weight)
        return F.linear(x, weight, self.bias.to(x.dtype))


class TrainedExpertLinear(TrainedWeight):
    """An ExpertLinear with trained parameters."""

    # of the ExpertLinear
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: Tensor, grouping: Grouping) -> Tensor:
        """Apply to x (N, in), sorted by expert; return (N, out) in the dtype of x."""
        bias = self.bias if self.bias is None else self.bias.to(x.dtype)
        return expert_linear(x, rounded(self.weight, x.dtype), bias, grouping)


class TrainedEmbedding(TrainedWeight):
    """An nn.Embedding with trained rows."""

    weight: nn.Parameter  # of the nn.Embedding

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows (..., C) of tokens (...) in the compute dtype."""
        return F.embedding(tokens, self.weight).to(self.dtype)


def trained_class(module: nn.Module) -> type[TrainedWeight]:
    """Return the mixin that trains a module's parameters."""
    # a quantized Linear is an nn.Linear, but must keep its own `forward`
    if isinstance(module, QuantizedModule):
        return TrainedWeight
    by_type = {
        nn.Linear: TrainedLinear,
        ExpertLinear: TrainedExpertLinear,
        nn.Embedding: TrainedEmbedding,
    }
    for base, mixin in by_type.items():
        if isinstance(module, base):
            return mixin
    return TrainedWeight


def make_trainable(
    model: GPT,
    names: Iterable[str],
    dtype: torch.dtype | None = None,
    keep: bool = True,
    untied: bool = False,
) -> None:
    """Make the base parameters with these names trainable, in fp32.

    dtype: compute dtype of the network; None: the parameter's dtype. keep: keep the base's values
    for `disabled` and `detach`. untied: a tied head keeps the base's weight when the embedding is
    trained.
    """
    for name in names:
        module_name, _, leaf = name.rpartition(".")
        module = model.get_submodule(module_name)
        frozen = getattr(module, leaf)
        data = frozen.detach().float()
        # float() of an fp32 tensor is the tensor itself; the base's values must not change with it
        if keep and data.dtype == frozen.dtype:
            data = data.clone()
        trained = nn.Parameter(data)
        if name == "embed.weight" and model.config.tied and not untied:
            heads = [model.lm_head]
        else:
            heads = []
        # a tied head keeps sharing the embedding's parameter
        for owner in [module, *heads]:
            if not isinstance(owner, TrainedWeight):
                owner = trained_class(owner).convert_module(owner)
            owner.replace_leaf(leaf, trained, dtype or frozen.dtype, keep)


def norm_names(model: nn.Module) -> list[str]:
    """Return the names of all parameters of norms."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, Norm):
            for leaf, _ in module.named_parameters(recurse=False):
                names.append(f"{name}.{leaf}")
    return names
