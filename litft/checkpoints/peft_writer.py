"""LoRA adapters in PEFT's file format: their contents by litft names, and how they are written.

If the checkpoint fuses several Linears, the file has one pair of factors for all of them: the A's
are stacked, and B is block-diagonal in the checkpoint's row order. Experts are `target_parameters`
in the layout of PEFT's ParamWrapper.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from litft.checkpoints.adapter_reader import ADAPTER_WEIGHTS, write_adapter_config
from litft.checkpoints.conversion import mappings_to_hf
from litft.checkpoints.peft_module_names import (
    PREFIX,
    TEXT_NAMES,
    ModuleNames,
    target_regex,
)
from litft.checkpoints.peft_targets import LoraWeights, PeftTarget, peft_targets
from litft.checkpoints.rules import Rule
from litft.checkpoints.weight_writer import write_file
from litft.model.transformer import GPT

# key of new tokens: rows, not differences
TOKEN_ROWS = "token_adapter.trainable_tokens_delta"

# Dimensions: E experts, R rank, N new tokens, C hidden dim

TABLES = ("embed", "lm_head")  # the modules with one row per token
# returns a tensor of the base model by its litft name
ReadBase = Callable[[str], Tensor]


@dataclass
class LoraAdapter:
    """The contents of a LoRA adapter's files, by litft names."""

    factors: dict[str, LoraWeights]
    # parameters of the base model, trained in full
    trained_in_full: dict[str, Tensor] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)  # ids of new tokens
    # rows of the new tokens, (N, C) each
    token_rows: dict[str, Tensor] = field(default_factory=dict)
    # which biases are trained: none, lora_only or all, as in PEFT
    bias: str = "none"
    # the adapter unties the head of a tied model, PEFT's default when it trains one of the two
    untied: bool = False
    dropout: float = 0.0


def write_adapter(
    folder: Path,
    model: GPT,
    rules: list[Rule],
    adapter: LoraAdapter,
    settings: dict[str, Any],
    read_base: ReadBase,
    names: ModuleNames = TEXT_NAMES,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors; `settings` adds or overrides fields
    of the config.

    read_base: returns a tensor of the base model. names: of the modules in the class that opens the
    base folder.
    """
    targets = peft_targets(model, rules)
    vocabulary = _vocabulary(adapter, model, targets, read_base)
    adapter = replace(
        adapter,
        factors=vocabulary.factors,
        trained_in_full=vocabulary.trained_in_full,
        token_rows=vocabulary.token_rows,
    )

    # Linears that the checkpoint has as one tensor have one target, and one pair of factors
    fused = {}
    for name in adapter.factors:
        target = targets[name]
        if target not in fused:
            fused[target] = target.fuse(adapter.factors)
    tensors = vocabulary.tables | _factor_tensors(fused)

    # parameters trained in full, and rows of new tokens
    trained = _peft_tensors(adapter.trained_in_full, rules, fused)
    if _trains_tied_embedding(adapter, model):
        trained |= _tied_head(adapter, targets)
    for name, rows in adapter.token_rows.items():
        tensors[f"{targets[name.partition('.')[0]].name}.{TOKEN_ROWS}"] = rows

    # the config
    config = _lora_config(fused, targets, names) | _extra_config(
        adapter, model, rules, targets
    )
    frozen: dict[str, Tensor] = {}
    if "modules_to_save" in config:
        frozen = _rest_of_saved_modules(
            config["modules_to_save"], adapter, model, rules, read_base
        )
        trained |= frozen
        config["modules_to_save"] = [
            names.of(module) for module in config["modules_to_save"]
        ]
    config |= settings
    # PEFT does not know which rows of a whole table are new, so litft's record says it
    if vocabulary.tables or (adapter.tokens and not adapter.token_rows):
        config["litft"] = config.get("litft", {}) | {"new_tokens": adapter.tokens}
    if frozen:
        config["litft"] = config.get("litft", {}) | {"frozen": list(frozen)}
    if config.get("target_parameters"):
        # PEFT does not support dropout for target_parameters
        config["lora_dropout"] = 0.0
    named = {}
    for key, value in (tensors | trained).items():
        named[PREFIX + names.of(key)] = value
    write_tensors(folder, named, config)


def _factor_tensors(fused: dict[PeftTarget, LoraWeights]) -> dict[str, Tensor]:
    """Return the LoRA factors and magnitudes by PEFT's keys."""
    tensors = {}
    for key, target in peft_keys(fused):
        lora = fused[target]
        if target.embedding:
            tensors[f"{key}.lora_embedding_A"] = lora.a
            tensors[f"{key}.lora_embedding_B"] = lora.b
        else:
            tensors[f"{key}.lora_A.weight"] = lora.a
            tensors[f"{key}.lora_B.weight"] = lora.b
        if lora.m is not None:
            tensors[f"{key}.lora_magnitude_vector"] = lora.m
    return tensors


@dataclass
class _WrittenVocabulary:
    """What an adapter has of embedding and head, as PEFT opens it."""

    factors: dict[str, LoraWeights]
    trained_in_full: dict[str, Tensor]
    token_rows: dict[str, Tensor]
    # whole tables that are not trained, by their keys
    tables: dict[str, Tensor] = field(default_factory=dict)


def _vocabulary(
    adapter: LoraAdapter, model: GPT, targets: dict[str, PeftTarget], read_base: ReadBase
) -> _WrittenVocabulary:
    """Return the rows of new tokens as PEFT's trainable tokens, or in whole tables beside LoRA or
    trained tables.

    PEFT has no trainable tokens in a module that it adapts in another way, or whose tied module it
    does.
    """
    plain = _WrittenVocabulary(adapter.factors, adapter.trained_in_full, adapter.token_rows)
    others = []
    for name in TABLES:
        if name in adapter.factors or f"{name}.weight" in adapter.trained_in_full:
            others.append(name)
    # without anything else in the tables, PEFT's trainable tokens do
    if not (adapter.tokens and others):
        return plain
    written = _WrittenVocabulary(dict(adapter.factors), dict(adapter.trained_in_full), {})
    for name in TABLES:
        rows = adapter.token_rows.get(
            f"{name}.token_rows", adapter.token_rows["embed.token_rows"]
        )
        weight = f"{name}.weight"
        # a table that is trained in full takes the rows
        if weight in written.trained_in_full:
            written.trained_in_full[weight] = _with_rows(
                written.trained_in_full[weight], adapter.tokens, rows
            )
            continue
        if (
            name == "lm_head"
            and model.config.tied
            and not adapter.untied
            and "embed.weight" in written.trained_in_full
        ):
            continue  # it is a copy of the trained embedding

        # the rows go into a copy of the base's table, next to the factors if there are any
        base = read_base(base_table(name, model)).float()
        table = _with_rows(base, adapter.tokens, rows)
        if name not in written.factors:
            written.tables[f"{targets[name].name}.weight"] = table
            continue
        written.tables[f"{targets[name].name}.base_layer.weight"] = table
        lora = written.factors[name]
        # no update of these rows
        zeros = table.new_zeros(len(adapter.tokens), lora.a.size(0))
        if targets[name].embedding:
            written.factors[name] = lora._replace(
                a=_with_rows(lora.a.mT, adapter.tokens, zeros).mT
            )
        else:
            written.factors[name] = lora._replace(
                b=_with_rows(lora.b, adapter.tokens, zeros)
            )
    return written


def base_table(name: str, model: GPT) -> str:
    """Return the litft name of the tensor that a module has in the base; a tied head has the
    embedding's."""
    if model.config.tied and name == "lm_head":
        return "embed.weight"
    return f"{name}.weight"


def _with_rows(table: Tensor, ids: list[int], rows: Tensor) -> Tensor:
    """Return a table (V, ...) with `rows` (N, ...) at `ids`, extended to have them."""
    missing = max(0, max(ids) + 1 - table.size(0))
    extended = torch.cat((table, table.new_zeros((missing, *table.shape[1:]))))
    extended[torch.tensor(ids)] = rows.to(table)
    return extended


def write_tensors(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write the two files of an adapter folder."""
    cpu_tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()
    }
    write_file(cpu_tensors, folder / ADAPTER_WEIGHTS)
    write_adapter_config(folder, config)


def _lora_config(
    fused: dict[PeftTarget, LoraWeights], targets: dict[str, PeftTarget], names: ModuleNames
) -> dict[str, Any]:
    """Return the fields of PEFT's config for ranks, scales and targets."""
    ranks = {}
    alphas = {}
    for target, lora in fused.items():
        name = names.of(target.config_name)
        ranks[name] = lora.a.size(0) // max(target.experts, 1)
        alphas[name] = lora.scale * ranks[name]

    # the most common values are the defaults, and the patterns have the others
    r = Counter(ranks.values()).most_common(1)[0][0]
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    modules = []
    parameters = []
    # PEFT transposes the updates of such modules
    is_transposed = False
    for target in fused:
        if target.is_parameter:
            parameters.append(names.of(target.config_name))
        else:
            modules.append(names.of(target.config_name))
            is_transposed |= target.transposed
    # short names would also match the modules of a vision tower
    if names.is_wrapper and modules:
        adaptable = {}
        for target in targets.values():
            if not target.is_parameter:
                adaptable[names.of(target.config_name)] = None
        target_modules: list[str] | str = target_regex(modules, adaptable)
    else:
        config_names = [target.config_name for target in targets.values()]
        target_modules = _target_modules(modules, config_names)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": r,
        "lora_alpha": alpha,
        "rank_pattern": {name: value for name, value in ranks.items() if value != r},
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
        "target_modules": target_modules,
        "fan_in_fan_out": is_transposed,
        "bias": "none",
        "inference_mode": True,
    }
    if parameters:
        config["target_parameters"] = parameters
    return config


def _extra_config(
    adapter: LoraAdapter, model: GPT, rules: list[Rule], targets: dict[str, PeftTarget]
) -> dict[str, Any]:
    """Return the fields of PEFT's config for modules trained in full and for new tokens."""
    config: dict[str, Any] = {}
    full_modules = set()
    for name in adapter.trained_in_full:
        if not name.endswith(".bias"):
            full_modules.add(name.rpartition(".")[0])
    # modules trained in full, by their names in the checkpoint
    if full_modules:
        parameters = []
        for name in adapter.trained_in_full:
            if name.rpartition(".")[0] in full_modules:
                parameters.append(name)
        # a dict keeps the order and removes duplicates
        hf_modules = {}
        for mapping in mappings_to_hf(rules, parameters):
            for hf_name in mapping.targets:
                hf_modules[hf_name.rpartition(".")[0]] = None
        # PEFT saves modules whole, and cannot open one within another
        outermost = []
        for module in hf_modules:
            if not _is_within(module.rpartition(".")[0], hf_modules):
                outermost.append(module)
        config["modules_to_save"] = outermost
        config["ensure_weight_tying"] = _trains_tied_embedding(adapter, model)
    if adapter.token_rows:
        config["trainable_token_indices"] = {}
        for name in adapter.token_rows:
            module = targets[name.partition(".")[0]].name.rpartition(".")[2]
            config["trainable_token_indices"][module] = adapter.tokens
    return config


def _is_within(name: str, modules: Container[str]) -> bool:
    """Return whether a name is that of a module, or of a part of one."""
    while name:
        if name in modules:
            return True
        name = name.rpartition(".")[0]
    return False


def _trains_tied_embedding(adapter: LoraAdapter, model: GPT) -> bool:
    """Whether the adapter trains the embedding in full and the head stays tied to it."""
    return (
        model.config.tied
        and not adapter.untied
        and "embed.weight" in adapter.trained_in_full
    )


def _tied_head(adapter: LoraAdapter, targets: dict[str, PeftTarget]) -> dict[str, Tensor]:
    """Return the copy of the embedding that PEFT expects for the tied head, too."""
    return {
        f"{targets['lm_head'].name}.weight": adapter.trained_in_full["embed.weight"].clone()
    }


def _rest_of_saved_modules(
    saved: list[str],
    adapter: LoraAdapter,
    model: GPT,
    rules: list[Rule],
    read_base: ReadBase,
) -> dict[str, Tensor]:
    """Return the parameters of saved modules that are not trained, by their names in the
    checkpoint: PEFT opens only whole modules, so the file has the base's values of them.

    saved: the modules' names in the checkpoint.
    """
    others = []
    for name, _ in model.named_parameters():
        if name not in adapter.trained_in_full:
            others.append(name)
    rest = {}
    for mapping in mappings_to_hf(rules, others):
        if not any(_is_within(target, saved) for target in mapping.targets):
            continue
        values = mapping.convert([read_base(name) for name in mapping.sources])
        for target, value in zip(mapping.targets, values, strict=True):
            if _is_within(target, saved):
                rest[target] = value
    return rest


def _peft_tensors(
    trained: dict[str, Tensor], rules: list[Rule], adapted: Iterable[PeftTarget]
) -> dict[str, Tensor]:
    """Rename trained parameters of the base model for PEFT's files: biases of adapted modules are
    under `base_layer`, once for each wrapper of the module."""
    wrappers = Counter(_wrapped_module(target) for target in adapted)
    peft_tensors = {}
    for mapping in mappings_to_hf(rules, trained):
        for hf_name, tensor in zip(
            mapping.targets,
            mapping.convert([trained[name] for name in mapping.sources]),
            strict=True,
        ):
            module, _, leaf = hf_name.rpartition(".")
            nested = ".base_layer" * wrappers[module]
            peft_tensors[f"{module}{nested}.{leaf}"] = tensor
    return peft_tensors


def peft_keys(targets: Iterable[PeftTarget]) -> list[tuple[str, PeftTarget]]:
    """Return the key of each target.

    PEFT nests one wrapper per parameter of a module; the last one is the outermost.
    """
    keys = []
    wrappers = Counter()
    for target in reversed(list(targets)):
        module = _wrapped_module(target)
        keys.append((module + ".base_layer" * wrappers[module], target))
        wrappers[module] += 1
    return keys[::-1]


def _wrapped_module(target: PeftTarget) -> str:
    """Return the module that PEFT wraps to adapt a target: stacked experts are parameters of
    one."""
    if target.experts:
        return target.name.rpartition(".")[0]
    return target.name


def _target_modules(adapted: list[str], adaptable: list[str]) -> list[str]:
    """Return PEFT's target_modules: the last parts of the names if they select the same modules,
    else full names."""
    last_names = {name.rpartition(".")[2] for name in adapted}
    if any(name.isdigit() for name in last_names):  # numbers also match whole layers
        return sorted(adapted)
    matched = set()
    for name in adaptable:
        if name.rpartition(".")[2] in last_names:
            matched.add(name)
    if matched == set(adapted):
        return sorted(last_names)
    return sorted(adapted)
