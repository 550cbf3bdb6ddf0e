"""LoRA adapters in PEFT's file format: map PEFT's target modules and parameters to litft Linears and back.

If the checkpoint fuses several Linears, the file has one pair of factors for all of them: the A's are stacked, and B is
block-diagonal in the checkpoint's row order. Experts are `target_parameters` in the layout of PEFT's ParamWrapper.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from litft.checkpoints.adapter_reader import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    check_lora_config,
    read_adapter_config,
    read_tensors,
    read_token_ids,
)
from litft.checkpoints.conversion import mappings_from_hf, mappings_to_hf
from litft.checkpoints.peft_targets import LoraWeights, PeftTarget, peft_targets
from litft.checkpoints.rules import Drop, Rule
from litft.checkpoints.weight_files import write_file
from litft.model.mlp import ExpertLinear

_PREFIX = "base_model.model."  # of every key in PEFT's files
_TOKEN_ROWS = "token_adapter.trainable_tokens_delta"  # key of new tokens: rows, not differences
_LEAVES = {"lora_A.weight": "a", "lora_B.weight": "b", "lora_embedding_A": "a", "lora_embedding_B": "b"}
_LEAVES |= {"lora_magnitude_vector": "m", "lora_magnitude_vector.weight": "m"}

# Dimensions: E experts, R rank, N new tokens, C hidden dim


@dataclass
class LoraAdapter:
    """The contents of a LoRA adapter's files, by litft names."""

    factors: dict[str, LoraWeights]
    trained: dict[str, Tensor] = field(default_factory=dict)  # parameters of the base model, trained in full
    tokens: list[int] = field(default_factory=list)  # ids of new tokens
    token_rows: dict[str, Tensor] = field(default_factory=dict)  # rows of the new tokens, (N, C) each
    bias: str = "none"  # which biases are trained: none, lora_only or all, as in PEFT
    untied: bool = False  # the adapter unties the head of a tied model, PEFT's default when it trains one of the two


def write_adapter(folder: Path, model: nn.Module, rules: list[Rule], adapter: LoraAdapter, settings: dict[str, Any]) -> None:
    """Write adapter_config.json and adapter_model.safetensors; `settings` adds or overrides fields of the config."""
    targets = peft_targets(model, rules)
    adapted = list(dict.fromkeys(targets[name] for name in adapter.factors))
    fused = {target: target.fuse(adapter.factors) for target in adapted}
    tensors = {}
    for key, target in _peft_keys(adapted):
        a, b = ("lora_embedding_A", "lora_embedding_B") if target.embedding else ("lora_A.weight", "lora_B.weight")
        tensors |= {f"{key}.{a}": fused[target].a, f"{key}.{b}": fused[target].b}
        if fused[target].m is not None:
            tensors[f"{key}.lora_magnitude_vector"] = fused[target].m
    trained = _peft_tensors(adapter.trained, rules, {target.name for target in adapted})
    if _trains_tied_embedding(adapter, model):  # PEFT expects a copy for the tied head too
        trained[f"{targets['lm_head'].name}.weight"] = adapter.trained["embed.weight"].clone()
    for name, rows in adapter.token_rows.items():
        tensors[f"{targets[name.partition('.')[0]].name}.{_TOKEN_ROWS}"] = rows
    config = _lora_config(fused, targets) | _extra_config(adapter, model, rules, targets) | settings
    if config.get("target_parameters"):
        config["lora_dropout"] = 0.0  # PEFT does not support dropout for target_parameters
    write_tensors(folder, {f"{_PREFIX}{key}": value for key, value in (tensors | trained).items()}, config)


def write_tensors(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write the two files of an adapter folder."""
    cpu_tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_file(cpu_tensors, folder / ADAPTER_WEIGHTS)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _lora_config(fused: dict[PeftTarget, LoraWeights], targets: dict[str, PeftTarget]) -> dict[str, Any]:
    """Return the fields of PEFT's config for ranks, scales and targets."""
    ranks = {target.config_name: lora.a.size(0) // max(target.experts, 1) for target, lora in fused.items()}
    alphas = {target.config_name: lora.scale * ranks[target.config_name] for target, lora in fused.items()}
    r, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    modules = [target.config_name for target in fused if not target.is_parameter]
    parameters = [target.config_name for target in fused if target.is_parameter]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": r,
        "lora_alpha": alpha,
        "rank_pattern": {name: value for name, value in ranks.items() if value != r},
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
        "target_modules": _target_modules(modules, [target.config_name for target in targets.values()]),
        "fan_in_fan_out": any(target.rule.transposed and not target.is_parameter for target in fused),
        "bias": "none",
        "inference_mode": True,
        **({"target_parameters": parameters} if parameters else {}),
    }


def _extra_config(
    adapter: LoraAdapter, model: nn.Module, rules: list[Rule], targets: dict[str, PeftTarget]
) -> dict[str, Any]:
    """Return the fields of PEFT's config for modules trained in full and for new tokens."""
    config: dict[str, Any] = {}
    full_modules = dict.fromkeys(name.rpartition(".")[0] for name in adapter.trained if not name.endswith(".bias"))
    if full_modules:
        mappings = mappings_to_hf(rules, [name for name in adapter.trained if name.rpartition(".")[0] in full_modules])
        config["modules_to_save"] = list(
            dict.fromkeys(hf_name.rpartition(".")[0] for mapping in mappings for hf_name in mapping.targets)
        )
        config["ensure_weight_tying"] = _trains_tied_embedding(adapter, model)
    if adapter.tokens:
        modules = [targets[name.partition(".")[0]].name for name in adapter.token_rows]
        config["trainable_token_indices"] = {module.rpartition(".")[2]: adapter.tokens for module in modules}
    return config


def _trains_tied_embedding(adapter: LoraAdapter, model: nn.Module) -> bool:
    """Whether the adapter trains the embedding in full and the head stays tied to it."""
    return model.config.tied and not adapter.untied and "embed.weight" in adapter.trained


def _peft_tensors(trained: dict[str, Tensor], rules: list[Rule], adapted: set[str]) -> dict[str, Tensor]:
    """Rename trained parameters of the base model for PEFT's files: biases of adapted modules are under `base_layer`."""
    peft_tensors = {}
    for mapping in mappings_to_hf(rules, trained):
        for hf_name, tensor in zip(
            mapping.targets, mapping.convert([trained[name] for name in mapping.sources]), strict=True
        ):
            module, _, leaf = hf_name.rpartition(".")
            peft_tensors[f"{module}.base_layer.{leaf}" if module in adapted else hf_name] = tensor
    return peft_tensors


def _peft_keys(targets: Iterable[PeftTarget]) -> list[tuple[str, PeftTarget]]:
    """Return the key of each target. PEFT nests one wrapper per parameter of a module; the last one is the outermost."""
    keys, wrappers = [], Counter()
    for target in reversed(list(targets)):
        module = target.name.rpartition(".")[0] if target.experts else target.name
        keys.append((module + ".base_layer" * wrappers[module], target))
        wrappers[module] += 1
    return keys[::-1]


def _target_modules(adapted: list[str], adaptable: list[str]) -> list[str]:
    """Return PEFT's target_modules: the last parts of the names if they select the same modules, else full names."""
    last_names = {name.rpartition(".")[2] for name in adapted}
    if any(name.isdigit() for name in last_names):  # numbers also match whole layers
        return sorted(adapted)
    matched = {name for name in adaptable if name.rpartition(".")[2] in last_names}
    return sorted(last_names) if matched == set(adapted) else sorted(adapted)


def read_adapter(folder: Path, model: nn.Module, rules: list[Rule]) -> LoraAdapter:
    """Read an adapter folder written by litft or PEFT."""
    config = read_adapter_config(folder)
    check_lora_config(config, folder)
    rules = [rule for rule in rules if not isinstance(rule, Drop)]  # an adapter may have a head that a tied base drops
    targets, stack_parts, target_parts, base_tensors, token_rows = peft_targets(model, rules), {}, {}, {}, {}
    parameter_keys = _expert_keys(config.get("target_parameters") or [], targets.values())
    targets_by_name = {target.name: target for target in targets.values()}
    for key, tensor in read_tensors(folder).items():
        module, leaf = _split_key(key)
        if key.endswith(".base_layer.weight"):
            continue  # PEFT also saves the base weight of an adapted head
        if leaf == _TOKEN_ROWS and module in targets_by_name:
            token_rows[f"{targets_by_name[module].linears[0]}.token_rows"] = tensor.float()
        elif leaf is None:
            base_tensors[module.replace(".base_layer.", ".")] = tensor.float()
        elif module in parameter_keys:
            target_parts.setdefault(parameter_keys[module], {})[leaf] = tensor.float()
        elif mappings := mappings_from_hf(rules, [f"{module}.weight"])[0]:
            name = mappings[0].targets[0].removesuffix(".weight")
            if targets[name].experts:  # before transformers 5 each expert was a module
                expert = mappings[0].sources.index(f"{module}.weight")
                stack_parts.setdefault(name, {}).setdefault((expert, module), {})[leaf] = tensor.float()
            else:
                target_parts.setdefault(targets[name], {})[leaf] = tensor.float()
        else:
            raise ValueError(
                f"{folder / ADAPTER_WEIGHTS}: {key} matches no module of the base; pass --base_dir with another base"
            )
    factors = {}
    for target, parts in target_parts.items():
        if problem := _problem(target, parts, model):
            raise ValueError(f"{folder / ADAPTER_WEIGHTS}: the adapter does not fit its base model: {target.name} {problem}")
        r = parts["a"].size(0) // max(target.experts, 1)
        factors |= target.split(LoraWeights(parts["a"], parts["b"], _scale(config, target.config_name, r), parts.get("m")))
    for name, expert_parts in stack_parts.items():
        factors[name] = _stack_experts(model.get_submodule(name), expert_parts, config, folder)
    _check_complete(config, factors, base_tensors, folder)
    tokens = read_token_ids(config, folder)
    _check_token_rows(tokens, token_rows, model, folder)
    trained = _trained_parameters(base_tensors, model, rules, folder)
    embed, head = (trained.get(f"{name}.weight") for name in ("embed", "lm_head"))
    untied = model.config.tied and (embed is None) != (head is None)
    if model.config.tied and embed is not None and head is not None:
        untied = not torch.equal(embed, head)
        trained = trained if untied else {name: value for name, value in trained.items() if name != "lm_head.weight"}
    return LoraAdapter(factors, trained, tokens, token_rows, config.get("bias", "none"), untied)


def _split_key(key: str) -> tuple[str, str | None]:
    """Split a PEFT key into module and kind (a, b, m or token rows); for a base parameter return its full name and None."""
    name = key.removeprefix(_PREFIX)
    for ending, leaf in _LEAVES.items():
        if name.endswith(f".{ending}"):
            return name.removesuffix(f".{ending}"), leaf
    if name.endswith(f".{_TOKEN_ROWS}"):
        return name.removesuffix(f".{_TOKEN_ROWS}"), _TOKEN_ROWS
    return name, None


def _trained_parameters(
    base_tensors: dict[str, Tensor], model: nn.Module, rules: list[Rule], folder: Path
) -> dict[str, Tensor]:
    """Return the base model's parameters among the adapter's tensors, by litft name."""
    expected, parameters = dict(model.named_parameters(remove_duplicate=False)), {}
    mappings, unknown = mappings_from_hf(rules, base_tensors)
    for mapping in mappings:
        if any(name not in base_tensors for name in mapping.sources) or any(
            name not in expected for name in mapping.targets
        ):
            unknown += mapping.sources
            continue
        converted = zip(mapping.targets, mapping.convert([base_tensors[name] for name in mapping.sources]), strict=True)
        parameters |= dict(converted)
    mismatches = [
        name for name, tensor in parameters.items() if tensor.shape != expected[name].shape or not tensor.isfinite().all()
    ]
    if unknown or mismatches:
        reason = (
            f"{unknown[0]} is not in the base model"
            if unknown
            else f"{mismatches[0]} is not finite or does not fit the base"
        )
        raise ValueError(f"{folder / ADAPTER_WEIGHTS}: {reason}; pass --base_dir with the base it was trained on")
    return parameters


def _check_complete(
    config: dict[str, Any], factors: dict[str, LoraWeights], base_tensors: dict[str, Tensor], folder: Path
) -> None:
    """Raise ValueError if tensors are missing that the config or the other tensors require."""
    path = folder / ADAPTER_WEIGHTS
    if not factors:
        raise ValueError(f"{path} contains no LoRA weights; copy the adapter again")
    if len({lora.m is None for lora in factors.values()}) > 1:
        name = next(name for name, lora in factors.items() if lora.m is None)
        raise ValueError(f"{path}: DoRA needs a lora_magnitude_vector for every module, {name} has none; copy it again")
    for module in config.get("modules_to_save") or []:
        if not any(name.rpartition(".")[0].endswith(module) for name in base_tensors):
            raise ValueError(f"{path} lacks {module}, one of its modules_to_save; copy the adapter again")


def _check_token_rows(ids: list[int], token_rows: dict[str, Tensor], model: nn.Module, folder: Path) -> None:
    """Raise ValueError if rows of new tokens are missing, have the wrong shape or are not finite."""
    names = ["embed.token_rows"] if model.config.tied else ["embed.token_rows", "lm_head.token_rows"]
    shapes = {name: tuple(rows.shape) for name, rows in token_rows.items()}
    if shapes != ({name: (len(ids), model.config.dim) for name in names} if ids else {}):
        reason = f"{len(ids)} new tokens need one row each of {model.config.dim} values in {' and '.join(names)}"
        raise ValueError(f"{folder / ADAPTER_WEIGHTS}: {reason}; found {shapes}")
    if any(not rows.isfinite().all() for rows in token_rows.values()):
        raise ValueError(
            f"{folder / ADAPTER_WEIGHTS}: the rows of new tokens contain NaN or infinity; copy the adapter again"
        )


def _scale(config: dict[str, Any], target: str, r: int) -> float:
    """Return the scaling factor of an update of rank `r`."""
    alpha = _matching_pattern(config.get("alpha_pattern"), target, config["lora_alpha"])
    return alpha / (math.sqrt(r) if config.get("use_rslora") else r)


def _stack_experts(
    linear: ExpertLinear, expert_parts: dict[tuple[int, str], dict[str, Tensor]], config: dict[str, Any], folder: Path
) -> LoraWeights:
    """Stack the LoRA weights of single experts; experts without an adapter get zeros."""
    max_rank = max(parts["a"].size(0) if "a" in parts else 1 for parts in expert_parts.values())
    a, b = torch.zeros(linear.count, max_rank, linear.in_features), torch.zeros(linear.count, linear.out_features, max_rank)
    for (expert, module), parts in expert_parts.items():
        shapes = {leaf: tuple(tensor.shape) for leaf, tensor in parts.items()}
        rank = shapes.get("a", (0,))[0]
        if rank == 0 or shapes != {"a": (rank, linear.in_features), "b": (linear.out_features, rank)}:
            reason = f"{module} should be (R, {linear.in_features}) and ({linear.out_features}, R), found {shapes}"
            raise ValueError(f"{folder / ADAPTER_WEIGHTS}: the adapter does not fit its base model: {reason}")
        if not all(tensor.isfinite().all() for tensor in parts.values()):
            raise ValueError(f"{folder / ADAPTER_WEIGHTS}: {module} contains NaN or infinity")
        a[expert, :rank], b[expert, :, :rank] = parts["a"], parts["b"] * _scale(config, module, rank)
    return LoraWeights(a, b, 1.0)


def _expert_keys(names: list[str], targets: Iterable[PeftTarget]) -> dict[str, PeftTarget]:
    """Return the targets of PEFT's target_parameters by key; each name is a full name or the suffix of several."""
    stacks = dict.fromkeys(target for target in targets if target.experts)
    return dict(_peft_keys(target for target in stacks if any(f".{target.name}".endswith(f".{name}") for name in names)))


def _problem(target: PeftTarget, parts: dict[str, Tensor], model: nn.Module) -> str | None:
    """Describe what is wrong with the tensors of a target, or return None."""
    if not {"a", "b"} <= parts.keys():
        return f"lacks {'lora_A' if 'a' not in parts else 'lora_B'}"
    linears, num_experts = [model.get_submodule(name) for name in target.linears], max(target.experts, 1)
    if target.embedding:
        in_features, out_features = linears[0].num_embeddings, linears[0].embedding_dim
    else:
        in_features, out_features = linears[0].in_features, sum(linear.out_features for linear in linears)
    in_features, out_features = (out_features, in_features) if target.swapped else (in_features, out_features)
    a, b, m = parts["a"], parts["b"], parts.get("m")
    if a.dim() != 2 or b.dim() != 2:
        return f"should have two matrices, found {tuple(a.shape)} and {tuple(b.shape)}"
    if (
        a.size(1) != in_features
        or b.size(0) != out_features
        or a.size(0) != b.size(1)
        or a.size(0) % num_experts
        or not a.numel()
    ):
        rank = f"{num_experts} R" if target.experts else "R"
        return f"should be ({rank}, {in_features}) and ({out_features}, {rank}), found {tuple(a.shape)} and {tuple(b.shape)}"
    if m is not None and tuple(m.shape) != ((num_experts, out_features) if target.experts else (out_features,)):
        return f"should have {out_features} magnitudes, found shape {tuple(m.shape)}"
    return None if all(tensor.isfinite().all() for tensor in parts.values()) else "contains NaN or infinity"


def _matching_pattern(patterns: dict[str, float] | None, name: str, default: float) -> float:
    """Return the value of the first key in PEFT's alpha_pattern, a regular expression, that matches the end of `name`."""
    matches = (value for key, value in (patterns or {}).items() if re.fullmatch(rf"(.*\.)?({key})", name))
    return next(matches, default)
