"""LoRA adapters written by PEFT or litft: their tensors and settings, by litft names.

An adapter for a resized vocabulary has its tables of all rows: its new rows become rows of new tokens.
"""

import math
from collections.abc import Iterable
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
from litft.checkpoints.peft_coverage import check_coverage, matching_pattern
from litft.checkpoints.peft_format import TABLES, TOKEN_ROWS, LoraAdapter, ReadBase, base_table, peft_keys
from litft.checkpoints.peft_names import PREFIX, text_name
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
    # an adapter may have a head that a tied base drops
    rules = [rule for rule in rules if not isinstance(rule, Drop)]
    reading = _Reading(
        folder=folder,
        config=config,
        init=initial_update(config, folder),
        saved=[text_name(module) for module in config.get("modules_to_save") or []],
        model=model,
        rules=rules,
        targets=peft_targets(model, rules),
        read_base=read_base,
    )
    stored = read_tensors(folder)
    check_coverage(config, stored, folder)
    tensors = {}
    for key, tensor in stored.items():
        tensors[text_name(key.removeprefix(PREFIX))] = tensor.float()
    vocabulary = _take_vocabulary(tensors, reading)
    parts = _sort_tensors(tensors, reading)
    factors = {}
    for target, target_parts in parts.targets.items():
        factors |= target.split(_weights(target, target_parts, reading))
    for name, expert_parts in parts.experts.items():
        factors[name] = _stack_experts(name, expert_parts, reading)
    _check_complete(factors, parts.base, reading)
    adapter = LoraAdapter(
        factors,
        trained=_trained_parameters(parts.base, reading),
        tokens=vocabulary.ids,
        token_rows=vocabulary.rows,
        bias=config.get("bias", "none"),
    )
    if not model.config.tied:
        return adapter
    return replace(adapter, untied=True) if _differs(adapter) else _without_head(adapter)


@dataclass(frozen=True)
class _Reading:
    """An adapter folder that is read, and the base that it is for."""

    folder: Path
    config: dict[str, Any]
    init: str | None  # see `initial_update`
    saved: list[str]  # modules_to_save, by their names in the text model
    model: nn.Module
    rules: list[Rule]
    targets: dict[str, PeftTarget]  # by litft name
    read_base: ReadBase

    @property
    def path(self) -> Path:
        """The file with the tensors, for messages."""
        return self.folder / ADAPTER_WEIGHTS


def _differs(adapter: LoraAdapter) -> bool:
    """Return whether an adapter of a tied base has other values for the head than for the embedding."""
    embed = adapter.trained.get("embed.weight")
    head = adapter.trained.get("lm_head.weight")
    if (embed is None) != (head is None):
        return True
    if embed is not None and not torch.equal(embed, head):
        return True
    embed_rows = adapter.token_rows.get("embed.token_rows")
    head_rows = adapter.token_rows.get("lm_head.token_rows")
    return head_rows is not None and not torch.equal(embed_rows, head_rows)


def _without_head(adapter: LoraAdapter) -> LoraAdapter:
    """Return an adapter of a tied base without the head's values, which are the embedding's."""
    trained = {name: value for name, value in adapter.trained.items() if name != "lm_head.weight"}
    token_rows = {name: value for name, value in adapter.token_rows.items() if name != "lm_head.token_rows"}
    return replace(adapter, trained=trained, token_rows=token_rows)


def _take_vocabulary(tensors: dict[str, Tensor], reading: _Reading) -> _Vocabulary:
    """Take the rows of new tokens out of the tensors, which then fit the base's vocabulary; return the rows.

    PEFT saves the whole tables if the vocabulary was resized (more rows, or fewer, without the base's padding).
    """
    given_ids = read_token_ids(reading.config, reading.folder)
    given = {}
    own = {}
    for name in TABLES:
        given[name] = tensors.pop(f"{reading.targets[name].name}.{TOKEN_ROWS}", None)
        own[name] = _fit_table(name, tensors, reading)
    if given_ids and all(rows is None for rows in given.values()):
        raise ValueError(f"{reading.path}: {len(given_ids)} new tokens need rows; copy the adapter again")
    new_ids = sorted(own["embed"].keys() | own["lm_head"].keys())
    vocabulary = _Vocabulary(list(dict.fromkeys([*given_ids, *new_ids])))
    if not vocabulary.ids:
        return vocabulary
    # one of the tables may have no rows of its own: then those of the other if the two are tied, or the base's
    of_the_other = set()
    for name, other in (TABLES, TABLES[::-1]):
        if reading.model.config.tied and given[name] is None and not own[name]:
            given[name] = given[other]
            own[name] = own[other]
            of_the_other.add(name)
    for name in TABLES:
        rows = dict(own[name])
        if given[name] is not None:
            rows |= zip(given_ids, given[name].split(1), strict=False)
        if name in of_the_other:
            _add_update(rows, name, tensors, reading)
        _add_other_rows(rows, name, vocabulary.ids, tensors, reading)
        _check_rows(rows, vocabulary.ids, reading)
        vocabulary.rows[f"{name}.token_rows"] = torch.cat([rows[token] for token in vocabulary.ids])
    return vocabulary


def _add_update(rows: dict[int, Tensor], name: str, tensors: dict[str, Tensor], reading: _Reading) -> None:
    """Add the LoRA update of a table to rows (1, C) that are those of the tied other one: PEFT adds it to all rows."""
    known = [token for token in rows if token < reading.model.config.vocab_size]
    if not known or not _are_factors(tensors, _factor_keys(tensors, reading.targets[name].name)):
        return
    table = reading.read_base(base_table(name, reading.model)).float().clone()
    for token in known:
        table[token] = rows[token][0]
    table = _updated_table(table, name, tensors, reading)
    for token in known:
        rows[token] = table[token : token + 1]


def _updated_table(table: Tensor, name: str, tensors: dict[str, Tensor], reading: _Reading) -> Tensor:
    """Return a table (V, C) with its LoRA update, if it has one.

    Raises ValueError for kinds of LoRA that change all rows.
    """
    target = reading.targets[name]
    factors = _factor_keys(tensors, target.name)
    if not _are_factors(tensors, factors):
        return table
    if "m" in factors or (reading.init and not target.embedding):
        reason = f"{target.name} has LoRA that changes all rows, beside trained rows of the other table"
        raise ValueError(f"{reading.path}: {reason}; merge the adapter in PEFT")
    return _with_update(table, target, tensors, reading)


def _add_other_rows(
    rows: dict[int, Tensor], name: str, ids: list[int], tensors: dict[str, Tensor], reading: _Reading
) -> None:
    """Add the rows (1, C) of those tokens that a table does not train alone: as it has them with the rest of the adapter."""
    missing = [token for token in ids if token not in rows and token < reading.model.config.vocab_size]
    if not missing:
        return
    target = reading.targets[name]
    table = tensors.get(f"{target.name}.weight")  # trained in full
    if table is None:
        table = reading.read_base(base_table(name, reading.model)).float()
    table = _updated_table(table, name, tensors, reading)
    for token in missing:
        rows[token] = table[token : token + 1]


def _check_rows(rows: dict[int, Tensor], ids: list[int], reading: _Reading) -> None:
    """Raise ValueError if a token has no row, or rows do not fit the network or are not finite."""
    dim = reading.model.config.dim
    for token in ids:
        if token not in rows or tuple(rows[token].shape) != (1, dim):
            found = tuple(rows[token].shape) if token in rows else "none"
            reason = f"the token {token} needs a row of {dim} values in embedding and head, found {found}"
            raise ValueError(f"{reading.path}: {reason}; save it again with save_embedding_layers=True")
        if not rows[token].isfinite().all():
            raise ValueError(f"{reading.path}: the row of token {token} contains NaN or infinity; copy the adapter again")


def _take_table(tensors: dict[str, Tensor], module: str) -> Tensor | None:
    """Take the table of a module out of the tensors: the trained one, if there are several."""
    table = None
    for ending in (*_FROZEN_TABLES, "weight", _SAVED_TABLE):
        stored = tensors.pop(f"{module}.{ending}", None)
        table = table if stored is None else stored
    return table


def _fit_table(name: str, tensors: dict[str, Tensor], reading: _Reading) -> dict[int, Tensor]:
    """Make table and factors of the embedding or the head fit the base's vocabulary.

    Returns the rows (1, C) that the base does not have, by token: those beyond its vocabulary, and single others. A table
    of which most rows differ from the base's is one that was trained.
    """
    target = reading.targets[name]
    table = _take_table(tensors, target.name)  # (W, C), all rows as PEFT saved them
    factors = _factor_keys(tensors, target.name)
    # the factor with a column, or a row, for each token
    leaf, dim = ("a", 1) if target.embedding else ("b", 0)
    has_lora = _are_factors(tensors, factors)
    if leaf in factors and not has_lora:
        return {}  # `_problem` says what is wrong with them
    size = reading.model.config.vocab_size
    width = size if table is None else table.size(0)
    if has_lora:
        width = tensors[factors[leaf]].size(dim)
    _check_table(table, width, "m" in factors, target, reading)
    if table is None:
        return {}
    if reading.init and has_lora and not target.embedding:
        if width != size:
            reason = f"{target.name} is resized from {size} to {width} rows, with init_lora_weights {reading.init!r}"
            raise ValueError(f"{reading.path}: {reason}; merge the adapter in PEFT")
        return {}  # the table is what is left of the base's after the initial update
    base = reading.read_base(base_table(name, reading.model)).float()
    whole = torch.cat((table[:size], base[width:]))
    changed = (whole != base).any(1).nonzero().flatten().tolist()
    is_saved = any(target.name.endswith(pattern) for pattern in reading.saved)
    if is_saved or (len(changed) > MOST_ROWS * size and not has_lora):
        tensors[f"{target.name}.weight"] = whole
        changed = []
    # litft's own new tokens, which are rows of a whole table beside LoRA or a trained table
    recorded = reading.config.get("litft", {}).get("new_tokens", [])
    tokens = {*changed, *recorded, *range(size, width)}
    rows = table
    if has_lora:
        rows = _with_update(table, target, tensors, reading)
        tensors[factors[leaf]] = _resized(tensors[factors[leaf]], size, dim)
    return {token: rows[token : token + 1] for token in sorted(tokens)}


def _with_update(table: Tensor, target: PeftTarget, tensors: dict[str, Tensor], reading: _Reading) -> Tensor:
    """Return a table (V, C) with the LoRA update of its module added."""
    factors = _factor_keys(tensors, target.name)
    a = tensors[factors["a"]]
    b = tensors[factors["b"]]
    update = (b @ a).mT if target.embedding else b @ a  # (V, C)
    return table + _scale(reading.config, target.config_name, a.size(0)) * update


def _factor_keys(tensors: dict[str, Tensor], module: str) -> dict[str, str]:
    """Return the keys of a module's LoRA tensors by kind: a, b or m."""
    keys = {}
    for key in tensors:
        owner, leaf = _split_key(key)
        if owner == module and leaf:
            keys[leaf] = key
    return keys


def _are_factors(tensors: dict[str, Tensor], factors: dict[str, str]) -> bool:
    """Return whether a module has two matrices that can be multiplied."""
    if not {"a", "b"} <= factors.keys():
        return False
    a = tensors[factors["a"]]
    b = tensors[factors["b"]]
    return a.dim() == b.dim() == 2 and a.size(0) == b.size(1)


def _check_table(table: Tensor | None, width: int, has_magnitudes: bool, target: PeftTarget, reading: _Reading) -> None:
    """Raise ValueError if a table does not fit the network, or a resized one lacks what its rows are made of."""
    dim = reading.model.config.dim
    size = reading.model.config.vocab_size
    if table is not None and (table.dim() != 2 or table.size(1) != dim):
        raise ValueError(f"{reading.path}: {target.name} has shape {tuple(table.shape)}; pass --base_dir with its base")
    if width == size:
        return
    what = f"{target.name} is resized from {size} to {width} rows"
    remedy = "merge the adapter in PEFT, or save it with save_embedding_layers=True"
    if table is None or len(table) != width:
        raise ValueError(f"{reading.path}: {what}, but the file has no table with them; {remedy}")
    if has_magnitudes:
        raise ValueError(f"{reading.path}: {what}, with DoRA's magnitudes over all of them; {remedy}")


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


def _sort_tensors(tensors: dict[str, Tensor], reading: _Reading) -> _Parts:
    """Sort tensors by the unit that they adapt; raise ValueError for one that matches no module of the base."""
    parts = _Parts()
    targets = reading.targets
    stacked = [text_name(name) for name in reading.config.get("target_parameters") or []]
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
        mappings = mappings_from_hf(reading.rules, [f"{module}.weight"])[0]
        name = mappings[0].targets[0].removesuffix(".weight") if mappings else None
        if name not in targets:  # an unknown module, or a block that the base does not have
            reason = f"{PREFIX}{key} matches no module of the base"
            raise ValueError(f"{reading.path}: {reason}; pass --base_dir with another base")
        if targets[name].experts:
            expert = mappings[0].sources.index(f"{module}.weight")
            parts.experts.setdefault(name, {}).setdefault((expert, module), {})[leaf] = tensor
        else:
            parts.targets.setdefault(targets[name], {})[leaf] = tensor
    return parts


def _weights(target: PeftTarget, parts: dict[str, Tensor], reading: _Reading) -> LoraWeights:
    """Return the update of a target. One that began as a part of the base's weight has that part subtracted from it.

    PEFT subtracts it from the base when it opens the adapter. Raises ValueError if the tensors do not fit.
    """
    problem = _problem(target, parts, reading.model)
    if problem:
        raise ValueError(f"{reading.path}: the adapter does not fit its base model: {target.name} {problem}")
    a = parts["a"]
    b = parts["b"]
    init = reading.init
    rank = a.size(0) // max(target.experts, 1)
    scale = _scale(reading.config, target.config_name, rank)
    if init is None or target.embedding:
        return LoraWeights(a, b, scale, parts.get("m"))
    # PEFT subtracts from a tied head's weight, which is the embedding, too
    changes_embedding = reading.model.config.tied and target.linears == ("lm_head",)
    if target.experts or changes_embedding or (init == "olora" and target.rule.transposed):
        reason = f"init_lora_weights {init!r} of {target.name} is not supported"
        raise ValueError(f"{reading.path}: {reason}; merge the adapter in PEFT")
    weights = [reading.read_base(f"{name}.weight").float() for name in target.linears]
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


def _trained_parameters(base_tensors: dict[str, Tensor], reading: _Reading) -> dict[str, Tensor]:
    """Return the base model's parameters among the adapter's tensors, by litft name."""
    remedy = "pass --base_dir with the base it was trained on"
    expected = dict(reading.model.named_parameters(remove_duplicate=False))
    parameters = {}
    mappings, unknown = mappings_from_hf(reading.rules, base_tensors)
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
            raise ValueError(f"{reading.path}: {name} is not finite or does not fit the base; {remedy}")
    return parameters


def _check_complete(factors: dict[str, LoraWeights], base_tensors: dict[str, Tensor], reading: _Reading) -> None:
    """Raise ValueError if tensors are missing that the config or the other tensors require."""
    path = reading.path
    if not factors:
        raise ValueError(f"{path} contains no LoRA weights; copy the adapter again")
    without_magnitudes = [name for name, lora in factors.items() if lora.m is None]
    if 0 < len(without_magnitudes) < len(factors):
        reason = f"DoRA needs a lora_magnitude_vector for every module, {without_magnitudes[0]} has none"
        raise ValueError(f"{path}: {reason}; copy it again")
    for module in reading.saved:
        if not any(f".{module}." in f".{name}" for name in base_tensors):
            raise ValueError(f"{path} lacks {module}, one of its modules_to_save; copy the adapter again")


def _scale(config: dict[str, Any], target: str, r: int) -> float:
    """Return the scaling factor of an update of rank `r`."""
    alpha = matching_pattern(config, "alpha_pattern", target, config["lora_alpha"])
    return alpha / (math.sqrt(r) if config.get("use_rslora") else r)


def _stack_experts(name: str, expert_parts: dict[tuple[int, str], dict[str, Tensor]], reading: _Reading) -> LoraWeights:
    """Stack the LoRA weights of single experts; experts without an adapter get zeros."""
    linear: ExpertLinear = reading.model.get_submodule(name)
    ranks = [parts["a"].size(0) for parts in expert_parts.values() if "a" in parts]
    max_rank = max(ranks, default=1)
    a = torch.zeros(linear.count, max_rank, linear.in_features)
    b = torch.zeros(linear.count, linear.out_features, max_rank)
    for (expert, module), parts in expert_parts.items():
        shapes = {leaf: tuple(tensor.shape) for leaf, tensor in parts.items()}
        rank = shapes.get("a", (0,))[0]
        if rank == 0 or shapes != {"a": (rank, linear.in_features), "b": (linear.out_features, rank)}:
            wanted = f"(R, {linear.in_features}) and ({linear.out_features}, R)"
            reason = f"{module} should be {wanted}, found {shapes}"
            raise ValueError(f"{reading.path}: the adapter does not fit its base model: {reason}")
        if not all(tensor.isfinite().all() for tensor in parts.values()):
            raise ValueError(f"{reading.path}: {module} contains NaN or infinity")
        a[expert, :rank] = parts["a"]
        b[expert, :, :rank] = parts["b"] * _scale(reading.config, module, rank)
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
