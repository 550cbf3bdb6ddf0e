"""PEFT's files for LoRA: which module or parameter of theirs stands for which Linears of ours, and back.

Where a checkpoint fuses Linears, the file holds one pair of factors for all of them: the A's stacked, B block-diagonal in
the checkpoint's row order. Experts are what PEFT calls target_parameters (its ParamWrapper gives their layout).
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from litft.checkpoints.conversion import (
    Drop,
    Interleave,
    Rename,
    Rule,
    Split,
    hf_tensor_name,
    mappings_from_hf,
    mappings_to_hf,
    rule_of,
    tensor_names,
)
from litft.checkpoints.weight_files import write_file
from litft.model.config import is_positive, read_object
from litft.model.mlp import ExpertLinear

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # how PEFT's keys begin
_TOKEN_ROWS = "token_adapter.trainable_tokens_delta"  # and how those of new tokens end; they are rows, not differences
_LEAVES = {"lora_A.weight": "a", "lora_B.weight": "b", "lora_embedding_A": "a", "lora_embedding_B": "b"}
_LEAVES |= {"lora_magnitude_vector": "m", "lora_magnitude_vector.weight": "m"}

# E experts, R rank


class LoraWeights(NamedTuple):
    """One Linear's update, scale * B A: A (R, in) and B (out, R), or with a leading E for stacked experts.

    m: DoRA's lengths of the rows, (out,) or (E, out).
    """

    a: Tensor
    b: Tensor
    scale: float
    m: Tensor | None = None


@dataclass
class LoraAdapter:
    """What a LoRA adapter's files hold, by our names."""

    factors: dict[str, LoraWeights]
    trained: dict[str, Tensor] = field(default_factory=dict)  # parameters of the base, trained whole
    tokens: list[int] = field(default_factory=list)  # ids of new tokens
    token_rows: dict[str, Tensor] = field(default_factory=dict)  # theirs, (N, C) each
    bias: str = "none"  # PEFT's word for which biases are trained
    apart: bool = False  # of a tied model: embedding and head are two from here on, as PEFT makes them unless told not to


@dataclass(frozen=True)
class PeftTarget:
    """What PEFT adapts as one: a module, or a parameter of stacked experts."""

    name: str  # theirs, of a module without ".weight"
    linears: tuple[str, ...]  # ours, in the order of its rows
    rule: Rename | Split | Interleave
    experts: int = 0  # 0: a module
    embedding: bool = False

    @property
    def is_parameter(self) -> bool:
        """Whether transformers holds it as a bare parameter: stacked experts, and what chooses among them."""
        return self.experts > 0 or self.linears[0].endswith(".router")

    @property
    def target(self) -> str:
        """What target_modules or target_parameters, and patterns, call it."""
        return f"{self.name}.weight" if self.is_parameter and not self.experts else self.name

    def fuse(self, factors: dict[str, LoraWeights]) -> LoraWeights:
        """The factors of its Linears (some may have none) as one pair in PEFT's layout."""
        own = [factors[name] for name in self.linears if name in factors]
        a, scale, start, blocks = torch.cat([f.a for f in own], dim=-2), next((f.scale for f in own if f.scale), 1.0), 0, []
        for name, rows in zip(self.linears, self.rows(own), strict=True):
            block = own[0].b.new_zeros((*a.shape[:-2], rows, a.size(-2)))
            if name in factors:
                b, r = factors[name].b, factors[name].b.size(-1)
                block[..., start : start + r] = b * (factors[name].scale / scale)
                start += r
            blocks.append(block)
        b = self.rule.join_rows(blocks)
        m = None if own[0].m is None else self.rule.join_rows([f.m[..., None] for f in own]).squeeze(-1)
        if self.experts:
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)  # (E R, in), (out, R E)
        return LoraWeights(a.contiguous(), b.contiguous(), scale, m)

    def rows(self, own: list[LoraWeights]) -> list[int]:
        """How many rows each of its Linears has, `own` being the factors of some."""
        if isinstance(self.rule, Split):
            return [self.rule.groups * size for size in self.rule.sizes]
        return [own[0].b.size(-2)]

    def split(self, fused: LoraWeights) -> dict[str, LoraWeights]:
        """The inverse of `fuse`: A for each Linear, B by rows, without the ranks that a Linear's rows do not use."""
        a, b, scale, m = fused
        if self.experts:
            a = a.unflatten(0, (self.experts, -1))
            b = b.unflatten(1, (-1, self.experts)).permute(2, 0, 1)
        if isinstance(self.rule, Rename):
            return {self.linears[0]: LoraWeights(a, b, scale, m)}
        lengths = (
            [None] * len(self.linears) if m is None else [part.squeeze(-1) for part in self.rule.split_rows(m[..., None])]
        )
        parts, untrained = {}, not b.any()
        for name, rows, length in zip(self.linears, self.rule.split_rows(b), lengths, strict=True):
            used = rows.flatten(0, -2).any(0) | untrained  # (R,)
            if used.any() or length is not None:
                parts[name] = LoraWeights(a[..., used, :], rows[..., used], scale, length)
        return parts


def adaptable(model: nn.Module) -> dict[str, nn.Module]:
    """Every module that factors may stand beside, by our name: Linears, stacks of them, embeddings."""
    kinds = (nn.Linear, ExpertLinear, nn.Embedding)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def peft_targets(model: nn.Module, rules: list[Rule]) -> dict[str, PeftTarget]:
    """The slot of each of our Linears; `rules`: PEFT's own names first, then the checkpoint's."""
    found = {}
    for name, module in adaptable(model).items():
        rule, numbers = rule_of(rules, f"{name}.weight")
        linears = tuple(each.removesuffix(".weight") for each in tensor_names(rule, numbers))
        experts = module.count if isinstance(module, ExpertLinear) else 0
        embedding = isinstance(module, nn.Embedding)
        found[name] = PeftTarget(hf_tensor_name(rule, numbers).removesuffix(".weight"), linears, rule, experts, embedding)
    return found


def write_adapter(folder: Path, model: nn.Module, rules: list[Rule], adapter: LoraAdapter, settings: dict[str, Any]) -> None:
    """Write adapter_config.json and adapter_model.safetensors; `settings` adds to PEFT's own fields, or replaces them."""
    of = peft_targets(model, rules)
    chosen = list(dict.fromkeys(of[name] for name in adapter.factors))
    fused = {slot: slot.fuse(adapter.factors) for slot in chosen}
    tensors = {}
    for key, slot in _keys(chosen):
        a, b = ("lora_embedding_A", "lora_embedding_B") if slot.embedding else ("lora_A.weight", "lora_B.weight")
        tensors |= {f"{key}.{a}": fused[slot].a, f"{key}.{b}": fused[slot].b}
        if fused[slot].m is not None:
            tensors[f"{key}.lora_magnitude_vector"] = fused[slot].m
    trained = _their_tensors(adapter.trained, rules, {slot.name for slot in chosen})
    if _tied(adapter, model):  # PEFT asks for the tied head's copy too
        trained[f"{of['lm_head'].name}.weight"] = adapter.trained["embed.weight"].clone()
    for name, rows in adapter.token_rows.items():
        tensors[f"{of[name.partition('.')[0]].name}.{_TOKEN_ROWS}"] = rows
    config = _sizes_config(fused, of) | _besides(adapter, model, rules, of) | settings
    if config.get("target_parameters"):
        config["lora_dropout"] = 0.0  # PEFT knows no dropout for parameters
    write_tensors(folder, {f"{_PREFIX}{key}": value for key, value in (tensors | trained).items()}, config)


def write_tensors(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """An adapter folder's two files."""
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_file(own, folder / ADAPTER_WEIGHTS)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _sizes_config(fused: dict[PeftTarget, LoraWeights], of: dict[str, PeftTarget]) -> dict[str, Any]:
    """Ranks, scales and targets as PEFT's config states them."""
    ranks = {slot.target: f.a.size(0) // max(slot.experts, 1) for slot, f in fused.items()}
    alphas = {slot.target: f.scale * ranks[slot.target] for slot, f in fused.items()}
    r, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    modules = [slot.target for slot in fused if not slot.is_parameter]
    parameters = [slot.target for slot in fused if slot.is_parameter]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": r,
        "lora_alpha": alpha,
        "rank_pattern": {name: value for name, value in ranks.items() if value != r},
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
        "target_modules": _target_modules(modules, [slot.target for slot in of.values()]),
        "fan_in_fan_out": any(slot.rule.transposed and not slot.is_parameter for slot in fused),
        "bias": "none",
        "inference_mode": True,
        **({"target_parameters": parameters} if parameters else {}),
    }


def _besides(adapter: LoraAdapter, model: nn.Module, rules: list[Rule], of: dict[str, PeftTarget]) -> dict[str, Any]:
    """What PEFT's config says of modules trained whole and of new tokens."""
    found: dict[str, Any] = {}
    whole = dict.fromkeys(name.rpartition(".")[0] for name in adapter.trained if not name.endswith(".bias"))
    if whole:
        mappings = mappings_to_hf(rules, [name for name in adapter.trained if name.rpartition(".")[0] in whole])
        found["modules_to_save"] = list(dict.fromkeys(target.rpartition(".")[0] for m in mappings for target in m.targets))
        found["ensure_weight_tying"] = _tied(adapter, model)
    if adapter.tokens:
        heads = [of[name.partition(".")[0]].name for name in adapter.token_rows]
        found["trainable_token_indices"] = {head.rpartition(".")[2]: adapter.tokens for head in heads}
    return found


def _tied(adapter: LoraAdapter, model: nn.Module) -> bool:
    """Whether one trained tensor is embedding and head."""
    return model.config.tied and not adapter.apart and "embed.weight" in adapter.trained


def _their_tensors(trained: dict[str, Tensor], rules: list[Rule], adapted: set[str]) -> dict[str, Tensor]:
    """Parameters of the base under the names of PEFT's files: a bias beside factors lies a level deeper there."""
    found = {}
    for mapping in mappings_to_hf(rules, trained):
        for target, tensor in zip(
            mapping.targets, mapping.convert([trained[name] for name in mapping.sources]), strict=True
        ):
            module, _, leaf = target.rpartition(".")
            found[f"{module}.base_layer.{leaf}" if module in adapted else target] = tensor
    return found


def _keys(chosen: Iterable[PeftTarget]) -> list[tuple[str, PeftTarget]]:
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


def read_adapter(folder: Path, model: nn.Module, rules: list[Rule]) -> LoraAdapter:
    """What an adapter folder holds, litft's or PEFT's."""
    config = read_adapter_config(folder)
    _refuse_unsupported(config, folder)
    rules = [rule for rule in rules if not isinstance(rule, Drop)]  # an adapter may hold the head that a tied base drops
    of, expert_halves, halves, whole, rows = peft_targets(model, rules), {}, {}, {}, {}
    parameters = _expert_keys(config.get("target_parameters") or [], of.values())
    by_name = {slot.name: slot for slot in of.values()}
    for key, tensor in read_tensors(folder).items():
        module, leaf = _split_key(key)
        if key.endswith(".base_layer.weight"):
            continue  # PEFT copies the base's own weight beside an adapted head
        if leaf == _TOKEN_ROWS and module in by_name:
            rows[f"{by_name[module].linears[0]}.token_rows"] = tensor.float()
        elif leaf is None:
            whole[module.replace(".base_layer.", ".")] = tensor.float()
        elif module in parameters:
            halves.setdefault(parameters[module], {})[leaf] = tensor.float()
        elif mappings := mappings_from_hf(rules, [f"{module}.weight"])[0]:
            name = mappings[0].targets[0].removesuffix(".weight")
            if of[name].experts:  # a module of its own, as experts were before transformers 5
                number = mappings[0].sources.index(f"{module}.weight")
                expert_halves.setdefault(name, {}).setdefault((number, module), {})[leaf] = tensor.float()
            else:
                halves.setdefault(of[name], {})[leaf] = tensor.float()
        else:
            raise ValueError(f"{folder / ADAPTER_WEIGHTS}: {key} belongs to no Linear of the base model")
    factors = {}
    for slot, half in halves.items():
        if problem := _misfit(slot, half, model):
            raise ValueError(f"{folder / ADAPTER_WEIGHTS}: the adapter does not fit its base model: {slot.name} {problem}")
        r = half["a"].size(0) // max(slot.experts, 1)
        factors |= slot.split(LoraWeights(half["a"], half["b"], _scale(config, slot.target, r), half.get("m")))
    for name, experts in expert_halves.items():
        factors[name] = _stacked(model.get_submodule(name), experts, config, folder)
    _check_whole(config, factors, whole, folder)
    tokens = read_token_ids(config, folder)
    _check_token_rows(tokens, rows, model, folder)
    trained = _trained(whole, model, rules, folder)
    embed, head = (trained.get(f"{name}.weight") for name in ("embed", "lm_head"))
    apart = model.config.tied and (embed is None) != (head is None)
    if model.config.tied and embed is not None and head is not None:
        apart = not torch.equal(embed, head)
        trained = trained if apart else {name: value for name, value in trained.items() if name != "lm_head.weight"}
    return LoraAdapter(factors, trained, tokens, rows, config.get("bias", "none"), apart)


def _split_key(key: str) -> tuple[str, str | None]:
    """A key of PEFT's as the module and what of an adapter it is; None: a parameter of the base, by its whole name."""
    name = key.removeprefix(_PREFIX)
    for ending, leaf in _LEAVES.items():
        if name.endswith(f".{ending}"):
            return name.removesuffix(f".{ending}"), leaf
    if name.endswith(f".{_TOKEN_ROWS}"):
        return name.removesuffix(f".{_TOKEN_ROWS}"), _TOKEN_ROWS
    return name, None


def _trained(whole: dict[str, Tensor], model: nn.Module, rules: list[Rule], folder: Path) -> dict[str, Tensor]:
    """The base's own parameters among an adapter's tensors, by our names."""
    expected, found = dict(model.named_parameters(remove_duplicate=False)), {}
    mappings, unknown = mappings_from_hf(rules, whole)
    for mapping in mappings:
        if any(name not in whole for name in mapping.sources) or any(name not in expected for name in mapping.targets):
            unknown += mapping.sources
            continue
        parts = zip(mapping.targets, mapping.convert([whole[name] for name in mapping.sources]), strict=True)
        found |= dict(parts)
    odd = [name for name, tensor in found.items() if tensor.shape != expected[name].shape or not tensor.isfinite().all()]
    if unknown or odd:
        reason = f"{unknown[0]} is no factor of a Linear and no parameter" if unknown else f"{odd[0]} has not the shape"
        raise ValueError(f"{folder / ADAPTER_WEIGHTS}: {reason} of the base model; it belongs to another")
    return found


def _check_whole(config: dict[str, Any], factors: dict[str, LoraWeights], whole: dict[str, Tensor], folder: Path) -> None:
    """ValueError where tensors are missing that the config, or the others, speak of."""
    path = folder / ADAPTER_WEIGHTS
    if not factors:
        raise ValueError(f"{path} holds no factors at all; copy the adapter again")
    if len({f.m is None for f in factors.values()}) > 1:
        name = next(name for name, f in factors.items() if f.m is None)
        raise ValueError(f"{path}: DoRA needs a lora_magnitude_vector everywhere, and {name} lacks one; copy it again")
    for module in config.get("modules_to_save") or []:
        if not any(name.rpartition(".")[0].endswith(module) for name in whole):
            raise ValueError(f"{path} lacks {module}, one of its modules_to_save; copy the adapter again")


def read_token_ids(config: dict[str, Any], folder: Path) -> list[int]:
    """The ids of new tokens that an adapter's config states; ValueError where they cannot be."""
    stated = config.get("trainable_token_indices") or []
    lists = list(stated.values()) if isinstance(stated, dict) else [stated]
    ids = lists[0]
    fit = isinstance(ids, list) and all(type(i) is int and 0 <= i < 10**7 for i in ids)
    if not fit or len(set(ids)) != len(ids) or any(other != ids for other in lists):
        reason = "must be a list of different token ids, the same for embedding and head"
        raise ValueError(f"{folder / ADAPTER_CONFIG}: trainable_token_indices {reason}; found {stated!r:.200}")
    return ids


def _check_token_rows(ids: list[int], rows: dict[str, Tensor], model: nn.Module, folder: Path) -> None:
    """ValueError where a row for an id is missing or odd."""
    names = ["embed.token_rows"] if model.config.tied else ["embed.token_rows", "lm_head.token_rows"]
    shapes = {name: tuple(row.shape) for name, row in rows.items()}
    if shapes != ({name: (len(ids), model.config.dim) for name in names} if ids else {}):
        reason = f"{len(ids)} new tokens need a row each of {model.config.dim} numbers in {' and '.join(names)}"
        raise ValueError(f"{folder / ADAPTER_WEIGHTS}: {reason}; found {shapes}")
    if any(not row.isfinite().all() for row in rows.values()):
        raise ValueError(f"{folder / ADAPTER_WEIGHTS}: the rows of new tokens hold NaN or infinity")


def _scale(config: dict[str, Any], target: str, r: int) -> float:
    """What an update of rank `r` is multiplied by."""
    alpha = _pattern(config.get("alpha_pattern"), target, config["lora_alpha"])
    return alpha / (math.sqrt(r) if config.get("use_rslora") else r)


def _stacked(
    linear: ExpertLinear, experts: dict[tuple[int, str], dict[str, Tensor]], config: dict[str, Any], folder: Path
) -> LoraWeights:
    """A pair of factors an expert as those of a stack; an expert without one is not changed."""
    r = max(half["a"].size(0) if "a" in half else 1 for half in experts.values())
    a, b = torch.zeros(linear.count, r, linear.in_features), torch.zeros(linear.count, linear.out_features, r)
    for (number, module), half in experts.items():
        shapes = {k: tuple(tensor.shape) for k, tensor in half.items()}
        own = shapes.get("a", (0,))[0]
        if own == 0 or shapes != {"a": (own, linear.in_features), "b": (linear.out_features, own)}:
            reason = f"{module} should be (R, {linear.in_features}) and ({linear.out_features}, R), is {shapes}"
            raise ValueError(f"{folder / ADAPTER_WEIGHTS}: the adapter does not fit its base model: {reason}")
        if not all(tensor.isfinite().all() for tensor in half.values()):
            raise ValueError(f"{folder / ADAPTER_WEIGHTS}: {module} holds NaN or infinity")
        a[number, :own], b[number, :, :own] = half["a"], half["b"] * _scale(config, module, own)
    return LoraWeights(a, b, 1.0)


def _expert_keys(targets: list[str], known: Iterable[PeftTarget]) -> dict[str, PeftTarget]:
    """The keys of PEFT's target_parameters, each a whole name or the end of several."""
    stacks = dict.fromkeys(slot for slot in known if slot.experts)
    return dict(_keys(slot for slot in stacks if any(f".{slot.name}".endswith(f".{target}") for target in targets)))


def _misfit(slot: PeftTarget, half: dict[str, Tensor], model: nn.Module) -> str | None:
    """What is wrong with a slot's tensors, if anything."""
    if not {"a", "b"} <= half.keys():
        return f"lacks {'lora_A' if 'a' not in half else 'lora_B'}"
    linears, count = [model.get_submodule(name) for name in slot.linears], max(slot.experts, 1)
    if slot.embedding:
        width, height = linears[0].num_embeddings, linears[0].embedding_dim
    else:
        width, height = linears[0].in_features, sum(linear.out_features for linear in linears)
    a, b, m = half["a"], half["b"], half.get("m")
    if a.dim() != 2 or b.dim() != 2:
        return f"should be two matrices, is {tuple(a.shape)} and {tuple(b.shape)}"
    if a.size(1) != width or b.size(0) != height or a.size(0) != b.size(1) or a.size(0) % count or not a.numel():
        r = f"{count} R" if slot.experts else "R"
        return f"should be ({r}, {width}) and ({height}, {r}), is {tuple(a.shape)} and {tuple(b.shape)}"
    if m is not None and tuple(m.shape) != ((count, height) if slot.experts else (height,)):
        return f"should have {height} magnitudes, has {tuple(m.shape)}"
    return None if all(tensor.isfinite().all() for tensor in half.values()) else "holds NaN or infinity"


def _pattern(patterns: dict[str, float] | None, name: str, default: float) -> float:
    """PEFT's alpha_pattern: the first key, a regular expression, that the end of the name matches."""
    hits = (value for key, value in (patterns or {}).items() if re.fullmatch(rf"(.*\.)?({key})", name))
    return next(hits, default)


def adapter_digest(folder: Path) -> str:
    """Which adapter this is."""
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS))).hexdigest()


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
    plain = {"peft_type": "LORA", "layer_replication": None, "lora_bias": False, "alora_invocation_tokens": None}
    odd = [f"{k} {config[k]!r}" for k, default in plain.items() if config.get(k) not in (default, None, [], {})]
    if odd:
        raise ValueError(f"{folder / ADAPTER_CONFIG}: {', '.join(odd)} is not supported; litft reads LoRA adapters and DoRA")
    if missing := [k for k in ("r", "lora_alpha") if k not in config]:
        raise ValueError(f"{folder / ADAPTER_CONFIG} lacks {', '.join(missing)}; is it a LoRA adapter of PEFT's?")
    patterns, parameters = config.get("alpha_pattern") or {}, config.get("target_parameters") or []
    if not isinstance(patterns, dict):
        raise ValueError(f"{folder / ADAPTER_CONFIG}: alpha_pattern {patterns!r} cannot be; write the adapter again")
    numbers = {"r": config["r"], "lora_alpha": config["lora_alpha"], **patterns}
    odd = [f"{name} {value!r}" for name, value in numbers.items() if not is_positive(value) and value != 0]
    if config.get("bias", "none") not in ("none", "lora_only", "all"):
        odd.append(f"bias {config['bias']!r}")
    odd += [
        f"{name} {config[name]!r}" for name in ("use_rslora", "use_dora") if not isinstance(config.get(name, False), bool)
    ]
    if not (isinstance(parameters, list) and all(isinstance(name, str) for name in parameters)):
        odd.append(f"target_parameters {parameters!r}")
    for key in patterns:
        try:
            re.compile(key)
        except (re.error, TypeError):
            odd.append(f"alpha_pattern {key!r}")
    if odd:
        raise ValueError(f"{folder / ADAPTER_CONFIG}: {', '.join(odd)} cannot be; write the adapter again")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter folder, by the names in its file."""
    path = folder / ADAPTER_WEIGHTS
    try:
        return load_file(path)
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(f"{folder} lacks {ADAPTER_WEIGHTS}; copy it beside {ADAPTER_CONFIG}") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or no safetensors file ({error}); copy it again") from None
