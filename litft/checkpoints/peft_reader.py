"""LoRA adapters written by PEFT or litft: their tensors and settings, by litft names.

An adapter for a resized vocabulary has its tables of all rows: its new rows become rows of new tokens.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from litft.checkpoints.adapter_reader import (
    ADAPTER_WEIGHTS,
    check_lora_config,
    initial_update,
    read_adapter_config,
    read_tensors,
    read_token_ids,
)
from litft.checkpoints.conversion import mappings_from_hf
from litft.checkpoints.peft_format import TOKEN_ROWS, LoraAdapter, peft_keys
from litft.checkpoints.peft_names import PREFIX, all_names, text_name
from litft.checkpoints.peft_targets import LoraWeights, PeftTarget, peft_targets
from litft.checkpoints.rules import Drop, Rule
from litft.model.mlp import ExpertLinear

_LEAVES = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_embedding_A": "a",
    "lora_embedding_B": "b",
    "lora_magnitude_vector": "m",
    "lora_magnitude_vector.weight": "m",
}
# endings under which PEFT saves a table of the vocabulary that is not trained, or not trained in full
_FROZEN_TABLES = ("base_layer.weight", "token_adapter.base_layer.weight", "original_module.weight")
MOST_ROWS = 0.1  # the share of a table's rows from which on the table was trained, not single rows
_SAVED_TABLE = "modules_to_save.weight"

# Dimensions: E experts, R rank, N new tokens, C hidden dim, V vocabulary of the base, W that of the adapter

ReadBase = Callable[[str], Tensor]  # returns a tensor of the base model by its litft name


@dataclass
class _Vocabulary:
    """The rows of an adapter that are not in the base's tables: of new tokens, and of tokens that are trained alone."""

    ids: list[int] = field(default_factory=list)
    rows: dict[str, Tensor] = field(default_factory=dict)  # litft module -> (N, C)


def read_adapter(folder: Path, model: nn.Module, rules: list[Rule], read_base: ReadBase) -> LoraAdapter:
    """Read an adapter folder written by litft or PEFT.

    model: the base network, on the meta device. rules: for PEFT's names of its modules. Raises ValueError if the adapter
    does not fit the base, or has something that litft does not compute.
    """
    config = read_adapter_config(folder)
    check_lora_config(config, folder)
    init = initial_update(config, folder)
    rules = [rule for rule in rules if not isinstance(rule, Drop)]  # an adapter may have a head that a tied base drops
    targets = peft_targets(model, rules)
    tensors = {text_name(key.removeprefix(PREFIX)): tensor.float() for key, tensor in read_tensors(folder).items()}
    saved = [text_name(module) for module in config.get("modules_to_save") or []]
    vocabulary = _take_vocabulary(tensors, config, saved, targets, model, read_base, folder)
    parts = _sort_tensors(tensors, config, targets, rules, folder)
    factors = {}
    for target, target_parts in parts.targets.items():
        if problem := _problem(target, target_parts, model):
            raise ValueError(f"{folder / ADAPTER_WEIGHTS}: the adapter does not fit its base model: {target.name} {problem}")
        factors |= target.split(_weights(target, target_parts, config, init, read_base, folder))
    for name, expert_parts in parts.experts.items():
        factors[name] = _stack_experts(model.get_submodule(name), expert_parts, config, folder)
    _check_complete(saved, factors, parts.base, folder)
    trained = _trained_parameters(parts.base, model, rules, folder)
    return _untie(LoraAdapter(factors, trained, vocabulary.ids, vocabulary.rows, config.get("bias", "none")), model)


def _untie(adapter: LoraAdapter, model: nn.Module) -> LoraAdapter:
    """Return the adapter of a tied base as one that keeps embedding and head tied, if it has the same values for both."""
    if not model.config.tied:
        return adapter
    embed, head = (adapter.trained.get(f"{name}.weight") for name in ("embed", "lm_head"))
    rows = [adapter.token_rows.get(f"{name}.token_rows") for name in ("embed", "lm_head")]
    untied = (embed is None) != (head is None)
    if embed is not None and head is not None:
        untied = not torch.equal(embed, head)
    if rows[1] is not None and not torch.equal(rows[0], rows[1]):
        untied = True
    if untied:
        return replace(adapter, untied=True)
    trained = {name: value for name, value in adapter.trained.items() if name != "lm_head.weight"}
    token_rows = {name: value for name, value in adapter.token_rows.items() if name != "lm_head.token_rows"}
    return replace(adapter, trained=trained, token_rows=token_rows)


def _take_vocabulary(
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    saved: list[str],
    targets: dict[str, PeftTarget],
    model: nn.Module,
    read_base: ReadBase,
    folder: Path,
) -> _Vocabulary:
    """Take the rows of new tokens out of the tensors, which then fit the base's vocabulary; return the rows.

    PEFT saves the whole tables if the vocabulary was resized (more rows, or fewer, without the base's padding).
    """
    given_ids = read_token_ids(config, folder)
    given = {}
    own = {}
    for name in ("embed", "lm_head"):
        module = targets[name].name
        given[name] = tensors.pop(f"{module}.{TOKEN_ROWS}", None)
        table = _take_table(tensors, module)
        is_saved = any(module.endswith(pattern) for pattern in saved)
        own[name] = _fit_table(tensors, targets[name], table, is_saved, config, model, read_base, folder)
    if given_ids and given["embed"] is None and given["lm_head"] is None:
        raise ValueError(f"{folder / ADAPTER_WEIGHTS}: {len(given_ids)} new tokens need rows; copy the adapter again")
    vocabulary = _Vocabulary(list(dict.fromkeys([*given_ids, *sorted(own["embed"].keys() | own["lm_head"].keys())])))
    if not vocabulary.ids:
        return vocabulary
    # one of the tables may have no rows of its own: then those of the other if the two are tied, or the base's
    for name, other in (("embed", "lm_head"), ("lm_head", "embed")):
        if model.config.tied and given[name] is None and not own[name]:
            given[name], own[name] = given[other], own[other]
    for name in ("embed", "lm_head"):
        rows = dict(own[name])
        if given[name] is not None:
            rows |= zip(given_ids, given[name].split(1), strict=False)
        missing = [token for token in vocabulary.ids if token not in rows and token < model.config.vocab_size]
        if missing:
            table = read_base(_table_of(name, model)).float()
            rows |= {token: table[token : token + 1] for token in missing}
        _check_rows(rows, vocabulary.ids, model, folder)
        vocabulary.rows[f"{name}.token_rows"] = torch.cat([rows[token] for token in vocabulary.ids])
    return vocabulary


def _table_of(name: str, model: nn.Module) -> str:
    """Return the litft name of the tensor that the embedding or the head has in the base."""
    return "embed.weight" if model.config.tied else f"{name}.weight"


def _check_rows(rows: dict[int, Tensor], ids: list[int], model: nn.Module, folder: Path) -> None:
    """Raise ValueError if a token has no row, or rows do not fit the network or are not finite."""
    path = folder / ADAPTER_WEIGHTS
    shape = (1, model.config.dim)
    if any(token not in rows or tuple(rows[token].shape) != shape for token in ids) or rows.keys() - set(ids):
        found = {token: tuple(row.shape) for token, row in rows.items()}
        reason = f"{len(ids)} new tokens need one row each of {model.config.dim} values in embedding and head"
        raise ValueError(f"{path}: {reason}; found {str(found)[:200]}; save it again with save_embedding_layers=True")
    if not all(row.isfinite().all() for row in rows.values()):
        raise ValueError(f"{path}: the rows of new tokens contain NaN or infinity; copy the adapter again")


def _take_table(tensors: dict[str, Tensor], module: str) -> Tensor | None:
    """Take the table of a module out of the tensors: the trained one, if there are several."""
    table = None
    for ending in (*_FROZEN_TABLES, "weight", _SAVED_TABLE):
        stored = tensors.pop(f"{module}.{ending}", None)
        table = table if stored is None else stored
    return table


def _fit_table(
    tensors: dict[str, Tensor],
    target: PeftTarget,
    table: Tensor | None,
    is_saved: bool,
    config: dict[str, Any],
    model: nn.Module,
    read_base: ReadBase,
    folder: Path,
) -> dict[int, Tensor]:
    """Make table and factors of an embedding or a head fit the base's vocabulary.

    table: (W, C), all rows as PEFT saved them. Returns the rows (1, C) that the base does not have, by token: those beyond
    its vocabulary, and single others. A table of which most rows differ from the base's is one that was trained.
    """
    name = target.linears[0]
    module = target.name
    size = model.config.vocab_size
    keys = {}
    for key in tensors:
        owner, leaf = _split_key(key)
        if owner == module and leaf:
            keys[leaf] = key
    if table is not None and (table.dim() != 2 or table.size(1) != model.config.dim):
        raise ValueError(f"{folder / ADAPTER_WEIGHTS}: {module} has shape {tuple(table.shape)}; pass --base_dir")
    leaf = "a" if target.embedding else "b"  # the factor with a column, or a row, for each token
    dim = 1 if target.embedding else 0
    width = size if table is None else table.size(0)
    if leaf in keys:
        width = tensors[keys[leaf]].size(dim)
    if width != size and (table is None or len(table) != width or "m" in keys):
        kind = "DoRA's magnitudes" if "m" in keys else "no rows of the new tokens"
        reason = f"{module} is resized from {size} to {width} rows, with {kind}"
        raise ValueError(f"{folder / ADAPTER_WEIGHTS}: {reason}; merge it in PEFT, or save it with its embedding layers")
    if table is None:
        return {}
    base = read_base(_table_of(name, model)).float()
    whole = torch.cat((table[:size], base[width:]))
    recorded = config.get("litft", {}).get("new_tokens", [])  # litft's, which are rows of the whole table here
    changed = (whole != base).any(1).nonzero().flatten().tolist()
    if is_saved or (len(changed) > MOST_ROWS * size and leaf not in keys):
        tensors[f"{module}.weight"] = whole
        changed = []
    tokens = {*changed, *recorded, *range(size, width)}
    rows = table
    if leaf in keys:
        a, b = tensors[keys["a"]], tensors[keys["b"]]
        update = (b @ a).mT if target.embedding else b @ a  # (W, C)
        rows = table + _scale(config, target.config_name, a.size(0)) * update
        tensors[keys[leaf]] = _resized(tensors[keys[leaf]], size, dim)
    return {token: rows[token : token + 1] for token in sorted(tokens)}


def _resized(tensor: Tensor, size: int, dim: int) -> Tensor:
    """Return a tensor cut, or extended by zeros, to `size` along `dim`."""
    missing = size - tensor.size(dim)
    if missing <= 0:
        return tensor.narrow(dim, 0, size)
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat((tensor, tensor.new_zeros(shape)), dim)


@dataclass
class _Parts:
    """The tensors of an adapter, by what they belong to."""

    targets: dict[PeftTarget, dict[str, Tensor]] = field(default_factory=dict)
    # before transformers 5 each expert was a module: litft name -> (expert, module) -> its tensors
    experts: dict[str, dict[tuple[int, str], dict[str, Tensor]]] = field(default_factory=dict)
    base: dict[str, Tensor] = field(default_factory=dict)  # trained parameters of the base, by their names in it


def _sort_tensors(
    tensors: dict[str, Tensor], config: dict[str, Any], targets: dict[str, PeftTarget], rules: list[Rule], folder: Path
) -> _Parts:
    """Sort tensors by the unit that they adapt; raise ValueError for one that matches no module of the base."""
    parts = _Parts()
    stacked = [text_name(name) for name in config.get("target_parameters") or []]
    parameter_keys = _expert_keys(stacked, targets.values())
    for key, tensor in tensors.items():
        module, leaf = _split_key(key)
        if key.endswith(".base_layer.weight"):
            continue  # PEFT also saves the base weight of an adapted head
        if leaf is None:
            parts.base[module.replace(".base_layer.", ".").replace(".modules_to_save.", ".")] = tensor
            continue
        if module in parameter_keys:
            parts.targets.setdefault(parameter_keys[module], {})[leaf] = tensor
            continue
        mappings = mappings_from_hf(rules, [f"{module}.weight"])[0]
        if not mappings:
            reason = f"{PREFIX}{key} matches no module of the base"
            raise ValueError(f"{folder / ADAPTER_WEIGHTS}: {reason}; pass --base_dir with another base")
        name = mappings[0].targets[0].removesuffix(".weight")
        if targets[name].experts:
            expert = mappings[0].sources.index(f"{module}.weight")
            parts.experts.setdefault(name, {}).setdefault((expert, module), {})[leaf] = tensor
        else:
            parts.targets.setdefault(targets[name], {})[leaf] = tensor
    return parts


def _weights(
    target: PeftTarget,
    parts: dict[str, Tensor],
    config: dict[str, Any],
    init: str | None,
    read_base: ReadBase,
    folder: Path,
) -> LoraWeights:
    """Return the update of a target. One that began as a part of the base's weight has that part subtracted from it.

    PEFT subtracts it from the base when it opens the adapter.
    """
    a = parts["a"]
    b = parts["b"]
    rank = a.size(0) // max(target.experts, 1)
    scale = _scale(config, target.config_name, rank)
    if init is None or target.embedding:
        return LoraWeights(a, b, scale, parts.get("m"))
    if target.experts or (init == "olora" and target.rule.transposed):
        reason = f"init_lora_weights {init!r} of {target.name}"
        raise ValueError(f"{folder / ADAPTER_WEIGHTS}: {reason} is not supported; merge the adapter in PEFT")
    weights = [read_base(f"{name}.weight").float() for name in target.linears]
    weight = target.rule.join_rows(weights)  # (out, in)
    a0, b0 = _initial_factors(weight, rank, scale, init)
    return LoraWeights(torch.cat((a, a0)), torch.cat((b, -b0), dim=1), scale, parts.get("m"))


def _initial_factors(weight: Tensor, rank: int, scale: float, init: str) -> tuple[Tensor, Tensor]:
    """Return A (R, in) and B (out, R) that PEFT begins with: PiSSA (arXiv 2404.02948) or OLoRA (2406.01775)."""
    if init == "olora":
        q, r = torch.linalg.qr(weight)
        return r[:rank], q[:, :rank]
    u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    root = (s[:rank] / scale).sqrt()
    return root[:, None] * vh[:rank], u[:, :rank] * root


def _split_key(key: str) -> tuple[str, str | None]:
    """Split a key into module and kind (a, b or m); for a base parameter return its full name and None."""
    for ending, leaf in _LEAVES.items():
        if key.endswith(f".{ending}"):
            return key.removesuffix(f".{ending}"), leaf
    return key, None


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
    saved: list[str], factors: dict[str, LoraWeights], base_tensors: dict[str, Tensor], folder: Path
) -> None:
    """Raise ValueError if tensors are missing that `saved`, the modules_to_save, or the other tensors require."""
    path = folder / ADAPTER_WEIGHTS
    if not factors:
        raise ValueError(f"{path} contains no LoRA weights; copy the adapter again")
    if len({lora.m is None for lora in factors.values()}) > 1:
        name = next(name for name, lora in factors.items() if lora.m is None)
        raise ValueError(f"{path}: DoRA needs a lora_magnitude_vector for every module, {name} has none; copy it again")
    for module in saved:
        if not any(name.rpartition(".")[0].endswith(module) for name in base_tensors):
            raise ValueError(f"{path} lacks {module}, one of its modules_to_save; copy the adapter again")


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
    return dict(peft_keys(target for target in stacks if any(f".{target.name}".endswith(f".{name}") for name in names)))


def _problem(target: PeftTarget, parts: dict[str, Tensor], model: nn.Module) -> str | None:
    """Describe what is wrong with the tensors of a target, or return None."""
    if not {"a", "b"} <= parts.keys():
        return f"lacks {'lora_A' if 'a' not in parts else 'lora_B'}"
    linears = [model.get_submodule(name) for name in target.linears]
    num_experts = max(target.experts, 1)
    if target.embedding:
        in_features, out_features = linears[0].num_embeddings, linears[0].embedding_dim
    else:
        in_features, out_features = linears[0].in_features, sum(linear.out_features for linear in linears)
    magnitudes = (num_experts, out_features) if target.experts else (out_features,)
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
    if m is not None and tuple(m.shape) != magnitudes:
        return f"should have magnitudes of shape {magnitudes}, found {tuple(m.shape)}"
    return None if all(tensor.isfinite().all() for tensor in parts.values()) else "contains NaN or infinity"


def _matching_pattern(patterns: dict[str, float] | None, name: str, default: float) -> float:
    """Return the value of the first key in PEFT's alpha_pattern, a regular expression, that matches the end of `name`."""
    for key, value in (patterns or {}).items():
        # as in PEFT, where the name may be that of a multimodal model's language model
        if any(re.fullmatch(rf"(.*\.)?({key})", full_name) for full_name in all_names(name)):
            return value
    return default
