"""Methods that train a few parameters of their own: what each adds to the network, and PEFT's files for it.

A method gives a module a class that mixes the method over the type it has (as PyTorch's fully_shard does): base weight
names never change, no `forward` is copied, and it works alike on nn.Linear and on what derives from it.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from litft.args import FinetuneArgs, LoRAArgs, LoRAFinetuneArgs
from litft.config import is_positive, read_object
from litft.rules import Rule, exporting
from litft.weights import write_file

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # how PEFT's keys begin

# R rank


@cache
def mixed(method: type, base: type) -> type:
    """The class of a module of type `base` with `method` mixed over it."""
    return type(f"{method.__name__}_{base.__name__}", (method, base), {})


class LoRALinear(nn.Module):
    """A Linear y = W x with a low-rank update beside it: y + scale * B A x (arXiv 2106.09685, section 4.1)."""

    def add_factors(self, r: int, scale: float, dropout: float) -> None:
        """Register A (R, in) with PEFT's initialization and B (out, R) at zero, in fp32 on the weight's device."""
        self.lora_a = nn.Parameter(torch.empty(r, self.in_features, device=self.weight.device))
        self.lora_b = nn.Parameter(torch.zeros(self.out_features, r, device=self.weight.device))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        self.lora_scale, self.lora_dropout, self.lora_on = scale, dropout, True

    def remove_factors(self) -> None:
        """Undo `add_factors`."""
        del self.lora_a, self.lora_b, self.lora_scale, self.lora_dropout, self.lora_on

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not self.lora_on:
            return y
        low = F.linear(F.dropout(x.to(self.lora_a.dtype), self.lora_dropout, self.training), self.lora_a)
        # the fp32 update is added before rounding to the base's dtype, so that small updates are not lost
        return (y + F.linear(low * self.lora_scale, self.lora_b)).to(y.dtype)


class Factors(NamedTuple):
    """The size of one Linear's update."""

    r: int
    scale: float


class LoRA:
    """Low-rank factors on chosen Linears; `sites` maps a Linear's name to its factors once the model is known."""

    name = "lora"

    def __init__(self, args: LoRAArgs) -> None:
        self.args = args
        self.sites: dict[str, Factors] = {}

    def choose(self, model: nn.Module, rules: list[Rule]) -> None:
        """Find the Linears that `targets` name; ValueError where a target names none."""
        theirs = module_names(model, rules)
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        chosen: dict[str, None] = {}
        for target in self.args.targets:
            hits = [n for n in linears if _named(target, n) or _named(target, theirs[n])]
            if not hits:
                known = ", ".join(sorted({n.rpartition(".")[2] for n in linears}))
                raise ValueError(f"--lora.targets {target}: no Linear of this model has that name; known: {known}")
            chosen |= dict.fromkeys(hits)
        if "lm_head" in chosen and model.config.tied:
            raise ValueError("--lora.targets lm_head: its weight is the embedding's (tied), so an update cannot be merged")
        factors = Factors(self.args.r, self.args.alpha / self.args.r)
        self.sites = {name: factors for name in linears if name in chosen}

    def attach(self, model: nn.Module) -> None:
        """Add the factors to `model` and freeze everything else."""
        model.requires_grad_(False)
        for name, factors in self.sites.items():
            module = model.get_submodule(name)
            module.__class__ = mixed(LoRALinear, type(module))
            module.add_factors(*factors, self.args.dropout)

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The method's own parameters: those it trains, saves, counts and loads."""
        return {f"{n}.{leaf}": getattr(model.get_submodule(n), leaf) for n in self.sites for leaf in ("lora_a", "lora_b")}

    def save(self, model: nn.Module, rules: list[Rule], folder: Path, base: dict[str, Any]) -> None:
        """Write PEFT's two files; `base` goes into adapter_config.json beside PEFT's own fields."""
        theirs = module_names(model, rules)
        tensors = {}
        for name in self.sites:
            module, key = model.get_submodule(name), _PREFIX + theirs[name]
            tensors[f"{key}.lora_A.weight"] = module.lora_a.detach().cpu().contiguous()
            tensors[f"{key}.lora_B.weight"] = module.lora_b.detach().cpu().contiguous()
        write_file(tensors, folder / ADAPTER_WEIGHTS)
        ranks = {theirs[name]: factors.r for name, factors in self.sites.items()}
        alphas = {theirs[name]: factors.scale * factors.r for name, factors in self.sites.items()}
        r, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": r,
            "lora_alpha": alpha,
            "rank_pattern": {name: value for name, value in ranks.items() if value != r},
            "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
            "lora_dropout": self.args.dropout,
            "target_modules": _target_modules([theirs[name] for name in self.sites], list(theirs.values())),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            **base,
        }
        (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")

    @classmethod
    def read(cls, folder: Path, model: nn.Module, rules: list[Rule]) -> tuple["LoRA", dict[str, Tensor]]:
        """The method of an adapter folder, litft's or PEFT's, and its parameters' values by our names."""
        config = read_adapter_config(folder)
        _refuse_unsupported(config, folder)
        ours = {their: our for our, their in module_names(model, rules).items()}
        values, sites = {}, {}
        for key, tensor in _read_adapter_weights(folder).items():
            their, _, leaf = key.removeprefix(_PREFIX).rpartition(".lora_")
            if their not in ours or leaf not in ("A.weight", "B.weight"):
                raise ValueError(f"{folder / ADAPTER_WEIGHTS}: {key} belongs to no Linear of the base model")
            values[f"{ours[their]}.lora_{leaf[0].lower()}"] = tensor.float()
            if leaf == "A.weight" and tensor.dim() == 2:
                alpha = _pattern(config.get("alpha_pattern"), their, config["lora_alpha"])
                r = tensor.size(0)
                sites[ours[their]] = Factors(r, alpha / (math.sqrt(r) if config.get("use_rslora") else r))
        method = cls(LoRAArgs(r=config["r"], alpha=config["lora_alpha"]))
        method.sites = sites
        return method, values


METHODS = {LoRAFinetuneArgs: lambda args: LoRA(args.lora)}


def method_of(args: FinetuneArgs) -> LoRA:
    """The method that a fine-tuning command stands for."""
    return METHODS[type(args)](args)


def attach_values(model: nn.Module, method: LoRA, values: dict[str, Tensor]) -> None:
    """Attach the method with these values (on the meta device: only see that they fit); ValueError where they do not."""
    method.attach(model)
    parameters = method.parameters(model)
    problems = [f"{name} stands on one side only" for name in sorted(parameters.keys() ^ values.keys())]
    problems += [
        f"{name} should be {tuple(p.shape)}, is {tuple(values[name].shape)}"
        for name, p in parameters.items()
        if name in values and values[name].shape != p.shape
    ]
    problems += [f"{name} holds NaN or infinity" for name, value in values.items() if not value.isfinite().all()]
    if problems:
        raise ValueError(f"the adapter does not fit its base model: {'; '.join(problems[:10])}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])


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
            module.__class__ = type(module).__mro__[2]  # (mixed, LoRALinear, the type it was mixed over)


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale * B A, in fp32."""
    return weight.float() + (b.float() @ a.float()) * scale


def module_names(model: nn.Module, rules: list[Rule]) -> dict[str, str]:
    """The checkpoint's name of each of our Linears."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    known = [name for name in linears if not (name == "lm_head" and model.config.tied)]
    moves = exporting(rules, [f"{name}.weight" for name in known])
    names = {our: move.targets[0].removesuffix(".weight") for our, move in zip(known, moves, strict=True)}
    return {name: names.get(name, name) for name in linears}


def _named(target: str, name: str) -> bool:
    """Whether a target of the command line means the Linear `name`: its last part, its whole path, or a pattern."""
    if target == "all-linear":
        return name != "lm_head"
    return fnmatch(name.rpartition(".")[2], target) or fnmatch(name, target) or name.endswith(f".{target}")


def _target_modules(chosen: list[str], every: list[str]) -> list[str]:
    """PEFT's target_modules for just these: last names where they say enough, whole names where not."""
    short = {name.rpartition(".")[2] for name in chosen}
    matched = {name for name in every if name.rpartition(".")[2] in short}
    return sorted(short) if matched == set(chosen) else sorted(chosen)


def _pattern(patterns: dict[str, float] | None, name: str, default: float) -> float:
    """PEFT's alpha_pattern: the first key, a regular expression, that the end of the name matches."""
    hits = (value for key, value in (patterns or {}).items() if re.fullmatch(rf"(.*\.)?({key})", name))
    return next(hits, default)


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json as a dictionary; ValueError where a field that litft reads holds what it cannot."""
    path = folder / ADAPTER_CONFIG
    config = read_object(path)
    texts = isinstance(config.get("base_model_name_or_path") or "", str)
    own = config.get("litft", {})
    own = isinstance(own, dict) and all(isinstance(own.get(name, ""), str) for name in ("base_path", "base_fingerprint"))
    if not (texts and own):
        raise ValueError(f"{path}: base_model_name_or_path must be text, litft an object of texts; write it again")
    return config


def _refuse_unsupported(config: dict[str, Any], folder: Path) -> None:
    plain = {"peft_type": "LORA", "use_dora": False, "bias": "none", "modules_to_save": None, "fan_in_fan_out": False}
    plain |= {"layer_replication": None, "target_parameters": None, "lora_bias": False, "trainable_token_indices": None}
    odd = [f"{k} {config[k]!r}" for k, default in plain.items() if config.get(k) not in (default, None, [], {})]
    if odd:
        raise ValueError(f"{folder / ADAPTER_CONFIG}: {', '.join(odd)} is not supported; litft reads plain LoRA adapters")
    if missing := [k for k in ("r", "lora_alpha") if k not in config]:
        raise ValueError(f"{folder / ADAPTER_CONFIG} lacks {', '.join(missing)}; is it a LoRA adapter of PEFT's?")
    patterns = config.get("alpha_pattern") or {}
    numbers = {"r": config["r"], "lora_alpha": config["lora_alpha"]}
    numbers |= patterns if isinstance(patterns, dict) else {"alpha_pattern": patterns}
    odd = [f"{name} {value!r}" for name, value in numbers.items() if not is_positive(value) and value != 0]
    if not isinstance(config.get("use_rslora", False), bool):
        odd.append(f"use_rslora {config['use_rslora']!r}")
    for key in patterns:
        try:
            re.compile(key)
        except (re.error, TypeError):
            odd.append(f"alpha_pattern {key!r}")
    if odd:
        raise ValueError(f"{folder / ADAPTER_CONFIG}: {', '.join(odd)} cannot be; write the adapter again")


def _read_adapter_weights(folder: Path) -> dict[str, Tensor]:
    path = folder / ADAPTER_WEIGHTS
    try:
        return load_file(path)
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(f"{folder} lacks {ADAPTER_WEIGHTS}; copy it beside {ADAPTER_CONFIG}") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or no safetensors file ({error}); copy it again") from None
