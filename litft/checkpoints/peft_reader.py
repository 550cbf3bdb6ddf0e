"""LoRA adapters written by PEFT or litft: their tensors and settings, by litft names.

An adapter for a resized vocabulary has its tables of all rows: its new rows become rows of new
tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from litft.checkpoints.adapter_reader import (
    ADAPTER_CONFIG,
    check_lora_config,
    initial_update,
    read_adapter_config,
    read_tensors,
)
from litft.checkpoints.conversion import mappings_from_hf
from litft.checkpoints.peft_coverage import check_coverage
from litft.checkpoints.peft_module_names import PREFIX, names_of_class, text_name
from litft.checkpoints.peft_targets import (
    LoraWeights,
    PeftTarget,
    adaptable_size,
    peft_targets,
)
from litft.checkpoints.peft_vocabulary import (
    AdapterReading,
    split_key,
    take_vocabulary,
    update_scale,
)
from litft.checkpoints.peft_writer import (
    TABLES,
    LoraAdapter,
    ReadBase,
    peft_keys,
)
from litft.checkpoints.rules import Drop, Rule
from litft.model.mlp import ExpertLinear
from litft.model.transformer import GPT

# Dimensions: E experts, R rank, N new tokens, C hidden
# dim, V vocabulary of the base, W that of the adapter


def read_adapter(
    folder: Path, model: GPT, rules: list[Rule], read_base: ReadBase
) -> LoraAdapter:
    """Read an adapter folder written by litft or PEFT.

    model: the base network, on the meta device. rules: for PEFT's names of its modules. Raises
    ValueError if the adapter does not fit the base, or has something that litft does not compute.
    """
    config = read_adapter_config(folder)
    check_lora_config(config, folder)
    # an adapter may have a head that a tied base drops
    rules = [rule for rule in rules if not isinstance(rule, Drop)]
    stored = read_tensors(folder)
    check_coverage(config, stored, folder)
    reading = AdapterReading(
        folder=folder,
        config=config,
        init=initial_update(config, folder),
        saved=[text_name(module) for module in config.get("modules_to_save") or []],
        model=model,
        rules=rules,
        targets=peft_targets(model, rules),
        read_base=read_base,
        names=names_of_class(key.removeprefix(PREFIX) for key in stored),
    )

    # the vocabulary comes first: what is left then has the shapes of the base
    tensors = _with_text_names(stored)
    vocabulary = take_vocabulary(tensors, reading)
    parts = _sort_tensors(tensors, reading)

    # the rest
    factors = _factors(parts, reading)
    _check_complete(factors, parts.base, reading)
    adapter = LoraAdapter(
        factors,
        trained_in_full=_trained_parameters(parts.base, reading),
        tokens=vocabulary.ids,
        token_rows=vocabulary.rows,
        bias=config.get("bias", "none"),
        dropout=_dropout(config, folder),
    )

    # a tied head is the embedding, unless the adapter has other values for it
    if not model.config.tied:
        return adapter
    if _differs(adapter):
        return replace(adapter, untied=True)
    return _without_head(adapter)


def _dropout(config: dict[str, Any], folder: Path) -> float:
    """Return the dropout of an adapter's inputs; raise ValueError if it is no share."""
    value = config.get("lora_dropout") or 0.0
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(
            f"{folder / ADAPTER_CONFIG}: lora_dropout must be at least 0 and less than 1, found "
            f"{value!r:.100}; save the adapter again"
        )
    return float(value)


def _differs(adapter: LoraAdapter) -> bool:
    """Return whether an adapter of a tied base has other values for the head than for the
    embedding."""
    # parameters trained in full, and then the rows of new tokens
    embed = adapter.trained_in_full.get("embed.weight")
    head = adapter.trained_in_full.get("lm_head.weight")
    if embed is not None and head is not None:
        if not torch.equal(embed, head):
            return True
    elif embed is not None or head is not None:
        return True
    head_rows = adapter.token_rows.get("lm_head.token_rows")
    if head_rows is None:
        return False
    return not torch.equal(adapter.token_rows["embed.token_rows"], head_rows)


def _with_text_names(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file in fp32, by their names in the text model."""
    tensors = {}
    for key, tensor in stored.items():
        tensors[text_name(key.removeprefix(PREFIX))] = tensor.float()
    return tensors


def _without_head(adapter: LoraAdapter) -> LoraAdapter:
    """Return an adapter of a tied base without the head's values, which are the embedding's."""
    trained = dict(adapter.trained_in_full)
    trained.pop("lm_head.weight", None)
    token_rows = dict(adapter.token_rows)
    token_rows.pop("lm_head.token_rows", None)
    return replace(adapter, trained_in_full=trained, token_rows=token_rows)


@dataclass
class _Parts:
    """The tensors of an adapter, by what they belong to."""

    targets: dict[PeftTarget, dict[str, Tensor]] = field(default_factory=dict)
    # before transformers 5 each expert was a module: litft name -> (expert, module) -> its tensors
    experts: dict[str, dict[tuple[int, str], dict[str, Tensor]]] = field(
        default_factory=dict
    )
    # trained parameters of the base, by their names in it
    base: dict[str, Tensor] = field(default_factory=dict)


def _factors(parts: _Parts, reading: AdapterReading) -> dict[str, LoraWeights]:
    """Return the updates of modules, by their litft names."""
    factors = {}
    for target, target_parts in parts.targets.items():
        factors |= target.split(_weights(target, target_parts, reading))
    for name, expert_parts in parts.experts.items():
        factors[name] = _stack_experts(name, expert_parts, reading)
    return factors


def _sort_tensors(tensors: dict[str, Tensor], reading: AdapterReading) -> _Parts:
    """Sort tensors by the unit that they adapt; raise ValueError for one that matches no module of
    the base."""
    parts = _Parts()
    targets = reading.targets
    stacked = [text_name(name) for name in reading.config.get("target_parameters") or []]
    parameter_keys = _expert_keys(stacked, targets.values())
    frozen = reading.config.get("litft", {}).get("frozen", [])
    untrained = _untrained_biases(reading)
    for key, tensor in tensors.items():
        module, leaf = split_key(key)
        if key.endswith(".base_layer.weight"):
            # PEFT also saves the base weight of an adapted head
            continue
        # and, with bias="all", the base's bias of a module that is saved
        if ".original_module." in key:
            continue
        # a parameter of the base, which PEFT names after its own wrapper
        if leaf is None:
            base_name = module.replace(".base_layer", "").replace(".token_adapter", "")
            base_name = base_name.replace(".modules_to_save.", ".")
            # PEFT saves modules whole; these parameters of them were not trained
            if base_name not in frozen and base_name not in untrained:
                parts.base[base_name] = tensor
            continue
        # a stack of experts that is adapted as a parameter
        if module in parameter_keys:
            parts.targets.setdefault(parameter_keys[module], {})[leaf] = tensor
            continue

        # a module, known to the base by another name
        mappings = mappings_from_hf(reading.rules, [f"{module}.weight"])[0]
        if mappings:
            name = mappings[0].targets[0].removesuffix(".weight")
        else:
            name = None
        # an unknown module, or a block that the base does not have
        if name not in targets:
            reason = f"{PREFIX}{key} matches no module of the base"
            raise ValueError(f"{reading.path}: {reason}; pass --base_dir with another base")
        if targets[name].experts:
            expert = mappings[0].sources.index(f"{module}.weight")
            parts.experts.setdefault(name, {}).setdefault((expert, module), {})[leaf] = (
                tensor
            )
        else:
            parts.targets.setdefault(targets[name], {})[leaf] = tensor
    return parts


def _untrained_biases(reading: AdapterReading) -> set[str]:
    """Return the biases that save_embedding_layers saves beside the tables, without training."""
    names = set()
    for table in TABLES:
        name = reading.targets[table].name
        is_saved = any(name.endswith(pattern) for pattern in reading.saved)
        if reading.config.get("bias", "none") == "none" and not is_saved:
            names.add(f"{name}.bias")
    return names


def _weights(
    target: PeftTarget, parts: dict[str, Tensor], reading: AdapterReading
) -> LoraWeights:
    """Return the update of a target.

    One that began as a part of the base's weight has that part subtracted from it.

    PEFT subtracts it from the base when it opens the adapter. Raises ValueError if the tensors do
    not fit.
    """
    problem = _misfit(target, parts, reading.model)
    if problem:
        raise ValueError(
            f"{reading.path}: the adapter does not fit its base model: {target.name} {problem}"
        )
    a = parts["a"]
    b = parts["b"]
    init = reading.init
    # a stack has R rows of A for each expert
    rank = a.size(0) // max(target.experts, 1)
    scale = update_scale(reading, _name_in_patterns(target, reading.config), rank)
    if init is None or target.embedding:
        return LoraWeights(a, b, scale, parts.get("m"))
    # PEFT subtracts from a tied head's weight, which is the embedding, too
    changes_embedding = reading.model.config.tied and target.linears == ("lm_head",)
    if target.experts or changes_embedding or (init == "olora" and target.transposed):
        reason = f"init_lora_weights {init!r} of {target.name} is not supported"
        raise ValueError(f"{reading.path}: {reason}; merge the adapter in PEFT")

    # to subtract the initial update is to add ranks with the opposite sign
    weights = [reading.read_base(f"{name}.weight").float() for name in target.linears]
    weight = target.row_rule.join_rows(weights)  # (out, in)
    a0, b0 = _initial_factors(weight, rank, scale, init)
    return LoraWeights(
        torch.cat((a, a0)), torch.cat((b, -b0), dim=1), scale, parts.get("m")
    )


def _name_in_patterns(target: PeftTarget, config: dict[str, Any]) -> str:
    """Return the name that PEFT looks for in alpha_pattern: of what target_parameters does not
    name, it has adapted the module."""
    if not target.experts:
        parameter = f"{target.name}.weight"
        for entry in config.get("target_parameters") or []:
            if f".{parameter}".endswith(f".{entry}"):
                return parameter
    return target.name


def _initial_factors(
    weight: Tensor, rank: int, scale: float, init: str
) -> tuple[Tensor, Tensor]:
    """Return A (R, in) and B (out, R) that PEFT begins with: PiSSA (arXiv 2404.02948) or OLoRA
    (2406.01775)."""
    if init == "olora":
        q, r = torch.linalg.qr(weight)
        return r[:rank], q[:, :rank]
    u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    root = (s[:rank] / scale).sqrt()
    return root[:, None] * vh[:rank], u[:, :rank] * root


def _trained_parameters(
    base_tensors: dict[str, Tensor], reading: AdapterReading
) -> dict[str, Tensor]:
    """Return the base model's parameters among the adapter's tensors, by litft name."""
    remedy = "pass --base_dir with the base it was trained on"
    expected = dict(reading.model.named_parameters(remove_duplicate=False))
    parameters = {}
    mappings, unknown = mappings_from_hf(reading.rules, base_tensors)

    # a fused tensor is converted only if all of its parts are there
    for mapping in mappings:
        is_complete = all(name in base_tensors for name in mapping.sources)
        if not (is_complete and all(name in expected for name in mapping.targets)):
            unknown += mapping.sources
            continue
        converted = mapping.convert([base_tensors[name] for name in mapping.sources])
        parameters |= zip(mapping.targets, converted, strict=True)
    if unknown:
        raise ValueError(f"{reading.path}: {unknown[0]} is not in the base model; {remedy}")
    for name, tensor in parameters.items():
        if tensor.shape != expected[name].shape or not tensor.isfinite().all():
            raise ValueError(
                f"{reading.path}: {name} is not finite or does not fit the base; {remedy}"
            )
    return parameters


def _check_complete(
    factors: dict[str, LoraWeights],
    base_tensors: dict[str, Tensor],
    reading: AdapterReading,
) -> None:
    """Raise ValueError if tensors are missing that the config or the other tensors require."""
    path = reading.path
    if not factors:
        raise ValueError(f"{path} contains no LoRA weights; copy the adapter again")
    without_magnitudes = []
    for name, lora in factors.items():
        if lora.m is None:
            without_magnitudes.append(name)
    # in PEFT's config, DoRA is for all modules or for none
    if 0 < len(without_magnitudes) < len(factors):
        reason = (
            "DoRA needs a lora_magnitude_vector for every module, "
            f"{without_magnitudes[0]} has none"
        )
        raise ValueError(f"{path}: {reason}; copy it again")
    for module in reading.saved:
        if not any(f".{module}." in f".{name}" for name in base_tensors):
            raise ValueError(
                f"{path} lacks {module}, one of its modules_to_save; copy the adapter again"
            )


def _stack_experts(
    name: str,
    expert_parts: dict[tuple[int, str], dict[str, Tensor]],
    reading: AdapterReading,
) -> LoraWeights:
    """Stack the LoRA weights of single experts; experts without an adapter get zeros.

    expert_parts: by (number of the expert, name of its module in the file).
    """
    linear = reading.model.get_submodule(name)
    assert isinstance(linear, ExpertLinear)  # the target has `experts`
    if reading.init is not None:
        reason = f"init_lora_weights {reading.init!r} of single experts is not supported"
        raise ValueError(f"{reading.path}: {reason}; merge the adapter in PEFT")

    # ranks may differ between experts: smaller ones are padded with zeros
    ranks = []
    for parts in expert_parts.values():
        if "a" in parts:
            ranks.append(parts["a"].size(0))
    max_rank = max(ranks, default=1)
    a = torch.zeros(linear.count, max_rank, linear.in_features)
    b = torch.zeros(linear.count, linear.out_features, max_rank)
    for (expert, module), parts in expert_parts.items():
        shapes = {leaf: tuple(tensor.shape) for leaf, tensor in parts.items()}
        rank = shapes.get("a", (0,))[0]
        expected = {"a": (rank, linear.in_features), "b": (linear.out_features, rank)}
        if rank == 0 or shapes != expected:
            wanted = f"(R, {linear.in_features}) and ({linear.out_features}, R)"
            reason = f"{module} should be {wanted}, found {shapes}"
            raise ValueError(
                f"{reading.path}: the adapter does not fit its base model: {reason}"
            )
        if not all(tensor.isfinite().all() for tensor in parts.values()):
            raise ValueError(f"{reading.path}: {module} contains NaN or infinity")
        a[expert, :rank] = parts["a"]
        # scales may differ as well, so they become part of B
        b[expert, :, :rank] = parts["b"] * update_scale(reading, module, rank)
    return LoraWeights(a, b, 1.0)


def _expert_keys(names: list[str], targets: Iterable[PeftTarget]) -> dict[str, PeftTarget]:
    """Return the targets of PEFT's target_parameters by key; each name is a full name or the suffix
    of several."""
    suffixes = tuple(f".{name}" for name in names)
    # a dict keeps the order and removes duplicates
    stacks = {}
    for target in targets:
        if target.experts and f".{target.name}".endswith(suffixes):
            stacks[target] = None
    return dict(peft_keys(stacks))


def _misfit(target: PeftTarget, parts: dict[str, Tensor], model: GPT) -> str | None:
    """Describe what is wrong with the tensors of a target, or return None."""
    if not {"a", "b"} <= parts.keys():
        lacking = "lora_B" if "a" in parts else "lora_A"
        return f"lacks {lacking}"
    sizes = [adaptable_size(model, name) for name in target.linears]
    num_experts = max(target.experts, 1)

    # the sizes that the factors must have
    in_features = sizes[0].in_features
    out_features = sum(size.out_features for size in sizes)
    if target.experts:
        magnitudes = (num_experts, out_features)
    else:
        magnitudes = (out_features,)
    # PEFT takes (E, in, out) for (E, out, in); magnitudes belong to the rows all the same
    if target.swapped:
        in_features, out_features = out_features, in_features

    # the sizes that they have
    a = parts["a"]
    b = parts["b"]
    m = parts.get("m")
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
        return (
            f"should be ({rank}, {in_features}) and ({out_features}, {rank}), found "
            f"{tuple(a.shape)} and {tuple(b.shape)}"
        )
    if m is not None and tuple(m.shape) != magnitudes:
        return f"should have magnitudes of shape {magnitudes}, found {tuple(m.shape)}"
    if all(tensor.isfinite().all() for tensor in parts.values()):
        return None
    return "contains NaN or infinity"
