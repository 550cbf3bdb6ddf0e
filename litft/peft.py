"""Methods that train a few parameters of their own: what each adds to the network.

A method gives a module a class that mixes the method over the type it has (as PyTorch's fully_shard does): base weight
names never change, no `forward` is copied, and it works alike on nn.Linear and on what derives from it.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litft.adapter_files import Factors, adaptable, read_adapter, slots, write_adapter
from litft.args import FinetuneArgs, LoRAArgs, LoRAFinetuneArgs
from litft.mlp import expert_linear
from litft.rules import Rule

# E experts, R rank


@cache
def mixed(method: type, base: type) -> type:
    """The class of a module of type `base` with `method` mixed over it."""
    return type(f"{method.__name__}_{base.__name__}", (method, base), {})


class LoRALinear(nn.Module):
    """A Linear y = W x with a low-rank update beside it: y + scale * B A x (arXiv 2106.09685, section 4.1)."""

    def add_factors(self, r: int, scale: float, dropout: float) -> None:
        """Register A (R, in) with PEFT's initialization and B (out, R) at zero, in fp32 on the weight's device."""
        *stack, height, width = self.stack_shape()
        self.lora_a = nn.Parameter(torch.empty(*stack, r, width, device=self.weight.device))
        self.lora_b = nn.Parameter(torch.zeros(*stack, height, r, device=self.weight.device))
        nn.init.kaiming_uniform_(self.lora_a.data.view(-1, width), a=math.sqrt(5))
        self.lora_scale, self.lora_dropout, self.lora_on = scale, dropout, True

    def stack_shape(self) -> tuple[int, ...]:
        """(out, in); the weight itself may be packed."""
        return (self.out_features, self.in_features)

    def remove_factors(self) -> None:
        """Undo `add_factors`."""
        del self.lora_a, self.lora_b, self.lora_scale, self.lora_dropout, self.lora_on

    def factors(self) -> Factors:
        """The update as it is."""
        return Factors(self.lora_a.detach(), self.lora_b.detach(), self.lora_scale)

    def forward(self, x: Tensor, *counts: list[int]) -> Tensor:
        y = super().forward(x, *counts)
        if not self.lora_on:
            return y
        low = self.product(F.dropout(x.to(self.lora_a.dtype), self.lora_dropout, self.training), self.lora_a, *counts)
        # the fp32 update is added before rounding to the base's dtype, so that small updates are not lost
        return (y + self.product(low * self.lora_scale, self.lora_b, *counts)).to(y.dtype)

    def product(self, x: Tensor, factor: Tensor) -> Tensor:
        """x (..., in) times a factor (out, in)."""
        return F.linear(x, factor)


class LoRAExpertLinear(LoRALinear):
    """The same beside each expert of an ExpertLinear: A (E, R, in), B (E, out, R)."""

    def stack_shape(self) -> tuple[int, ...]:
        """(E, out, in)"""
        return (self.count, self.out_features, self.in_features)

    def product(self, x: Tensor, factor: Tensor, counts: list[int]) -> Tensor:
        """x (N, in), sorted by expert, times each expert's factor (E, out, in)."""
        return expert_linear(x, factor, None, counts)


class Site(NamedTuple):
    """The size of one Linear's update."""

    r: int
    scale: float


class LoRA:
    """Low-rank factors on chosen Linears; `sites` maps a Linear's name to its factors' size once the model is known.

    `rules` are `Source.adapter_rules`: how PEFT and the checkpoint name the Linears.
    """

    name = "lora"

    def __init__(self, args: LoRAArgs) -> None:
        self.args = args
        self.sites: dict[str, Site] = {}

    def choose(self, model: nn.Module, rules: list[Rule]) -> None:
        """Find the Linears that `targets` name; ValueError where a target names none."""
        theirs = slots(model, rules)
        chosen: dict[str, None] = {}
        for target in self.args.targets:
            hits = [name for name in theirs if _named(target, name, theirs[name].name)]
            if not hits:
                known = ", ".join(sorted({n.rpartition(".")[2] for n in theirs}))
                raise ValueError(f"--lora.targets {target}: no Linear of this model has that name; known: {known}")
            chosen |= dict.fromkeys(hits)
        if "lm_head" in chosen and model.config.tied:
            raise ValueError("--lora.targets lm_head: its weight is the embedding's (tied), so an update cannot be merged")
        site = Site(self.args.r, self.args.alpha / self.args.r)
        self.sites = {name: site for name in theirs if name in chosen}

    def attach(self, model: nn.Module) -> None:
        """Add the factors to `model` and freeze everything else."""
        model.requires_grad_(False)
        for name, site in self.sites.items():
            module = model.get_submodule(name)
            module.__class__ = mixed(LoRALinear if isinstance(module, nn.Linear) else LoRAExpertLinear, type(module))
            module.add_factors(*site, self.args.dropout)

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The method's own parameters: those it trains, saves, counts and loads."""
        return {f"{n}.{leaf}": getattr(model.get_submodule(n), leaf) for n in self.sites for leaf in ("lora_a", "lora_b")}

    def save(self, model: nn.Module, rules: list[Rule], folder: Path, base: dict[str, Any]) -> None:
        """Write PEFT's two files; `base` goes into adapter_config.json beside PEFT's own fields."""
        factors = {name: model.get_submodule(name).factors() for name in self.sites}
        write_adapter(folder, model, rules, factors, {"lora_dropout": self.args.dropout, **base})

    @classmethod
    def read(cls, folder: Path, model: nn.Module, rules: list[Rule]) -> tuple["LoRA", dict[str, Factors]]:
        """The method of an adapter folder, litft's or PEFT's, and each Linear's factors."""
        factors = read_adapter(folder, model, rules)
        method = cls(LoRAArgs())
        method.sites = {n: Site(factors[n].a.size(-2), factors[n].scale) for n in adaptable(model) if n in factors}
        return method, factors

    def load(self, model: nn.Module, factors: dict[str, Factors]) -> None:
        """Attach the method with these factors."""
        self.attach(model)
        with torch.no_grad():
            for name in self.sites:
                module = model.get_submodule(name)
                module.lora_a.copy_(factors[name].a)
                module.lora_b.copy_(factors[name].b)


METHODS = {LoRAFinetuneArgs: lambda args: LoRA(args.lora)}


def method_of(args: FinetuneArgs) -> LoRA:
    """The method that a fine-tuning command stands for."""
    return METHODS[type(args)](args)


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Inside, `model` computes as its base does."""
    modules = [module for module in model.modules() if isinstance(module, LoRALinear)]
    for module in modules:
        module.lora_on = False
    try:
        yield
    finally:
        for module in modules:
            module.lora_on = True


def detach(model: nn.Module) -> None:
    """Take the method off again: classes and parameters are the base's."""
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.remove_factors()
            module.__class__ = type(module).__bases__[1]  # (the method, the type it was mixed over)


def merged(weight: Tensor, factors: Factors) -> Tensor:
    """W + scale * B A, in fp32; W (out, in) or (E, out, in)."""
    return weight.float() + (factors.b.float() @ factors.a.float()) * factors.scale


def _named(target: str, ours: str, theirs: str) -> bool:
    """Whether a target of the command line means a Linear: its name's last part, its whole path, or a pattern."""
    if target == "all-linear":
        return ours != "lm_head" and not ours.endswith(".router")
    names = (ours, theirs)
    whole_or_last = (*names, *(name.rpartition(".")[2] for name in names))
    return any(fnmatch(name, target) for name in whole_or_last) or any(name.endswith(f".{target}") for name in names)
