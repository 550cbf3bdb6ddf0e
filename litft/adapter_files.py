"""PEFT's files for LoRA factors: which module or parameter of theirs stands for which Linears of ours, and back.

Where a checkpoint fuses Linears, the file holds one pair of factors for all of them: the A's stacked, B block-diagonal in
the checkpoint's row order. Experts are what PEFT calls target_parameters (its ParamWrapper gives their layout).
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from litft.config import is_positive, read_object
from litft.mlp import ExpertLinear
from litft.rules import Rename, Rule, Split, importing, our_names, rule_of, their_name
from litft.weights import write_file

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # how PEFT's keys begin

# E experts, R rank


class Factors(NamedTuple):
    """One Linear's update, scale * B A: A (R, in) and B (out, R), or with a leading E for stacked experts."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class Slot:
    """What PEFT adapts as one: a module, or a parameter of stacked experts."""

    name: str  # theirs, of a module without ".weight"
    linears: tuple[str, ...]  # ours, in the order of its rows
    rule: Rename | Split
    experts: int = 0  # 0: a module

    @property
    def is_parameter(self) -> bool:
        """Whether transformers holds it as a bare parameter: stacked experts, and what chooses among them."""
        return self.experts > 0 or self.linears[0].endswith(".router")

    @property
    def target(self) -> str:
        """What target_modules or target_parameters, and patterns, call it."""
        return f"{self.name}.weight" if self.is_parameter and not self.experts else self.name

    def fuse(self, factors: dict[str, Factors]) -> Factors:
        """The factors of its Linears (some may have none) as one pair in PEFT's layout."""
        own = [factors[name] for name in self.linears if name in factors]
        a, scale, start, blocks = torch.cat([f.a for f in own], dim=-2), own[0].scale, 0, []
        for name, rows in zip(self.linears, self.rows(own), strict=True):
            block = own[0].b.new_zeros((*a.shape[:-2], rows, a.size(-2)))
            if name in factors:
                b, r = factors[name].b, factors[name].b.size(-1)
                block[..., start : start + r] = b * (factors[name].scale / scale)
                start += r
            blocks.append(block)
        b = self.rule.join_rows(blocks) if isinstance(self.rule, Split) else blocks[0]
        if self.experts:
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)  # (E R, in), (out, R E)
        return Factors(a.contiguous(), b.contiguous(), scale)

    def rows(self, own: list[Factors]) -> list[int]:
        """How many rows each of its Linears has, `own` being the factors of some."""
        if isinstance(self.rule, Split):
            return [self.rule.groups * size for size in self.rule.sizes]
        return [own[0].b.size(-2)]

    def split(self, fused: Factors) -> dict[str, Factors]:
        """The inverse of `fuse`: A for each Linear, B by rows, without the ranks that a Linear's rows do not use."""
        a, b, scale = fused
        if self.experts:
            a = a.unflatten(0, (self.experts, -1))
            b = b.unflatten(1, (-1, self.experts)).permute(2, 0, 1)
        if isinstance(self.rule, Rename):
            return {self.linears[0]: Factors(a, b, scale)}
        parts, untrained = {}, not b.any()
        for name, rows in zip(self.linears, self.rule.split_rows(b), strict=True):
            used = rows.flatten(0, -2).any(0) | untrained  # (R,)
            if used.any():
                parts[name] = Factors(a[..., used, :], rows[..., used], scale)
        return parts


def adaptable(model: nn.Module) -> dict[str, nn.Module]:
    """Every module that a method may change, by our name: Linears and stacks of them."""
    return {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, ExpertLinear))}


def slots(model: nn.Module, rules: list[Rule]) -> dict[str, Slot]:
    """The slot of each of our Linears; `rules`: PEFT's own names first, then the checkpoint's."""
    found = {}
    for name, module in adaptable(model).items():
        rule, numbers = rule_of(rules, f"{name}.weight")
        linears = tuple(each.removesuffix(".weight") for each in our_names(rule, numbers))
        experts = module.count if isinstance(module, ExpertLinear) else 0
        found[name] = Slot(their_name(rule, numbers).removesuffix(".weight"), linears, rule, experts)
    return found


def write_adapter(
    folder: Path, model: nn.Module, rules: list[Rule], factors: dict[str, Factors], settings: dict[str, Any]
) -> None:
    """Write adapter_config.json and adapter_model.safetensors; `settings` adds to PEFT's own fields, or replaces them."""
    of = slots(model, rules)
    chosen = list(dict.fromkeys(of[name] for name in factors))
    fused = {slot: slot.fuse(factors) for slot in chosen}
    tensors = {}
    for key, slot in _keys(chosen):
        tensors[f"{_PREFIX}{key}.lora_A.weight"] = fused[slot].a.detach().cpu()
        tensors[f"{_PREFIX}{key}.lora_B.weight"] = fused[slot].b.detach().cpu()
    write_file(tensors, folder / ADAPTER_WEIGHTS)
    ranks = {slot.target: f.a.size(0) // max(slot.experts, 1) for slot, f in fused.items()}
    alphas = {slot.target: f.scale * ranks[slot.target] for slot, f in fused.items()}
    r, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    modules = [slot.target for slot in chosen if not slot.is_parameter]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": r,
        "lora_alpha": alpha,
        "rank_pattern": {name: value for name, value in ranks.items() if value != r},
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
        "target_modules": _target_modules(modules, [slot.target for slot in of.values()]),
        "bias": "none",
        "fan_in_fan_out": any(slot.rule.transposed and not slot.is_parameter for slot in chosen),
        "inference_mode": True,
        **settings,
    }
    if parameters := [slot.target for slot in chosen if slot.is_parameter]:
        config |= {"target_parameters": parameters, "lora_dropout": 0.0}  # PEFT knows no dropout for parameters
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _keys(chosen: Iterable[Slot]) -> list[tuple[str, Slot]]:
    """How each slot's tensors are called: PEFT wraps the parameters of one module around each other, the last outermost."""
    keys, outside = [], Counter()
    for slot in reversed(list(chosen)):
        module = slot.name.rpartition(".")[0] if slot.experts else slot.name
        keys.append((module + ".base_layer" * outside[module], slot))
        outside[module] += 1
    return keys[::-1]


def _target_modules(chosen: list[str], every: list[str]) -> list[str]:
    """PEFT's target_modules for just these: last names where they say enough, whole names where not."""
    short = {name.rpartition(".")[2] for name in chosen}
    matched = {name for name in every if name.rpartition(".")[2] in short}
    return sorted(short) if matched == set(chosen) else sorted(chosen)


def read_adapter(folder: Path, model: nn.Module, rules: list[Rule]) -> dict[str, Factors]:
    """The factors in an adapter folder, litft's or PEFT's, by our Linears' names."""
    config = read_adapter_config(folder)
    _refuse_unsupported(config, folder)
    of, expert_halves, halves = slots(model, rules), {}, {}
    parameters = _expert_keys(config.get("target_parameters") or [], of.values())
    for key, tensor in _read_weights(folder).items():
        module, _, leaf = key.removeprefix(_PREFIX).rpartition(".lora_")
        if key.endswith(".base_layer.weight"):
            continue  # PEFT copies the base's own weight beside an adapted head
        if leaf not in ("A.weight", "B.weight"):
            raise ValueError(f"{folder / ADAPTER_WEIGHTS}: {key} is no factor of a Linear, and litft reads no other")
        if module in parameters:
            halves.setdefault(parameters[module], {})[leaf[0]] = tensor.float()
        elif moves := importing(rules, [f"{module}.weight"])[0]:
            name = moves[0].targets[0].removesuffix(".weight")
            if of[name].experts:  # a module of its own, as experts were before transformers 5
                number = moves[0].sources.index(f"{module}.weight")
                expert_halves.setdefault(name, {}).setdefault((number, module), {})[leaf[0]] = tensor.float()
            else:
                halves.setdefault(of[name], {})[leaf[0]] = tensor.float()
        else:
            raise ValueError(f"{folder / ADAPTER_WEIGHTS}: {key} belongs to no Linear of the base model")
    factors = {}
    for slot, half in halves.items():
        if problem := _misfit(slot, half, model):
            raise ValueError(f"{folder / ADAPTER_WEIGHTS}: the adapter does not fit its base model: {slot.name} {problem}")
        r = half["A"].size(0) // max(slot.experts, 1)
        factors |= slot.split(Factors(half["A"], half["B"], _scale(config, slot.target, r)))
    for name, experts in expert_halves.items():
        factors[name] = _stacked(model.get_submodule(name), experts, config, folder)
    return factors


def _scale(config: dict[str, Any], target: str, r: int) -> float:
    """What an update of rank `r` is multiplied by."""
    alpha = _pattern(config.get("alpha_pattern"), target, config["lora_alpha"])
    return alpha / (math.sqrt(r) if config.get("use_rslora") else r)


def _stacked(
    linear: ExpertLinear, experts: dict[tuple[int, str], dict[str, Tensor]], config: dict[str, Any], folder: Path
) -> Factors:
    """A pair of factors an expert as those of a stack; an expert without one is not changed."""
    r = max(half["A"].size(0) if "A" in half else 1 for half in experts.values())
    a, b = torch.zeros(linear.count, r, linear.in_features), torch.zeros(linear.count, linear.out_features, r)
    for (number, module), half in experts.items():
        shapes = {k: tuple(tensor.shape) for k, tensor in half.items()}
        own = shapes.get("A", (0,))[0]
        if own == 0 or shapes != {"A": (own, linear.in_features), "B": (linear.out_features, own)}:
            reason = f"{module} should be (R, {linear.in_features}) and ({linear.out_features}, R), is {shapes}"
            raise ValueError(f"{folder / ADAPTER_WEIGHTS}: the adapter does not fit its base model: {reason}")
        if not all(tensor.isfinite().all() for tensor in half.values()):
            raise ValueError(f"{folder / ADAPTER_WEIGHTS}: {module} holds NaN or infinity")
        a[number, :own], b[number, :, :own] = half["A"], half["B"] * _scale(config, module, own)
    return Factors(a, b, 1.0)


def _expert_keys(targets: list[str], known: Iterable[Slot]) -> dict[str, Slot]:
    """The keys of PEFT's target_parameters, each a whole name or the end of several."""
    stacks = dict.fromkeys(slot for slot in known if slot.experts)
    return dict(_keys(slot for slot in stacks if any(f".{slot.name}".endswith(f".{target}") for target in targets)))


def _misfit(slot: Slot, half: dict[str, Tensor], model: nn.Module) -> str | None:
    """What is wrong with a slot's tensors, if anything."""
    if half.keys() != {"A", "B"}:
        return f"has lora_{'A' if 'A' in half else 'B'} alone"
    linears, count = [model.get_submodule(name) for name in slot.linears], max(slot.experts, 1)
    width, height = linears[0].in_features, sum(linear.out_features for linear in linears)
    a, b = half["A"], half["B"]
    if a.dim() != 2 or b.dim() != 2:
        return f"should be two matrices, is {tuple(a.shape)} and {tuple(b.shape)}"
    if a.size(1) != width or b.size(0) != height or a.size(0) != b.size(1) or a.size(0) % count or not a.numel():
        r = f"{count} R" if slot.experts else "R"
        return f"should be ({r}, {width}) and ({height}, {r}), is {tuple(a.shape)} and {tuple(b.shape)}"
    return None if a.isfinite().all() and b.isfinite().all() else "holds NaN or infinity"


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
    plain = {"peft_type": "LORA", "use_dora": False, "bias": "none", "modules_to_save": None, "layer_replication": None}
    plain |= {"lora_bias": False, "trainable_token_indices": None}
    odd = [f"{k} {config[k]!r}" for k, default in plain.items() if config.get(k) not in (default, None, [], {})]
    if odd:
        raise ValueError(f"{folder / ADAPTER_CONFIG}: {', '.join(odd)} is not supported; litft reads plain LoRA adapters")
    if missing := [k for k in ("r", "lora_alpha") if k not in config]:
        raise ValueError(f"{folder / ADAPTER_CONFIG} lacks {', '.join(missing)}; is it a LoRA adapter of PEFT's?")
    patterns, parameters = config.get("alpha_pattern") or {}, config.get("target_parameters") or []
    numbers = {"r": config["r"], "lora_alpha": config["lora_alpha"]}
    numbers |= patterns if isinstance(patterns, dict) else {"alpha_pattern": patterns}
    odd = [f"{name} {value!r}" for name, value in numbers.items() if not is_positive(value) and value != 0]
    if not isinstance(config.get("use_rslora", False), bool):
        odd.append(f"use_rslora {config['use_rslora']!r}")
    if not (isinstance(parameters, list) and all(isinstance(name, str) for name in parameters)):
        odd.append(f"target_parameters {parameters!r}")
    for key in patterns:
        try:
            re.compile(key)
        except (re.error, TypeError):
            odd.append(f"alpha_pattern {key!r}")
    if odd:
        raise ValueError(f"{folder / ADAPTER_CONFIG}: {', '.join(odd)} cannot be; write the adapter again")


def _read_weights(folder: Path) -> dict[str, Tensor]:
    path = folder / ADAPTER_WEIGHTS
    try:
        return load_file(path)
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(f"{folder} lacks {ADAPTER_WEIGHTS}; copy it beside {ADAPTER_CONFIG}") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or no safetensors file ({error}); copy it again") from None
