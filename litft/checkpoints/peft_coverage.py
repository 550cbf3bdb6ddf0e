"""Whether an adapter's config covers the tensors in its file: what PEFT would leave out must not be
applied here.

An edited adapter_config.json, or one of another adapter, may name fewer modules than the file has
tensors of.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import regex
from torch import Tensor

from litft.checkpoints.adapter_reader import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from litft.checkpoints.peft_module_names import PREFIX

# for one expression and one name; an honest one takes microseconds
MATCH_SECONDS = 1.0
_FIRST_FACTORS = ("lora_A.weight", "lora_embedding_A")  # their first dimension is the rank
_LAYER = r".*?\.[^.]*\.(?P<index>\d+)\."  # finds the first number in a name
_REMEDY = "use the config that was saved with the tensors"


def check_coverage(
    config: dict[str, Any], tensors: Mapping[str, Tensor], folder: Path
) -> None:
    """Raise ValueError if the config leaves out a module of the file, or says another rank or
    variant for it."""
    modules = _module_ranks(config, tensors)
    for module, rank in modules.items():
        if not _is_targeted(module, config):
            fields = []
            for name in ("exclude_modules", "layers_to_transform"):
                if config.get(name):
                    fields.append(name)
            names = " and ".join(["target_modules", *fields])
            reason = f"{names} leave out {module}, of which {ADAPTER_WEIGHTS} has weights"
            raise ValueError(f"{folder / ADAPTER_CONFIG}: {reason}; {_REMEDY}")
        expected = matching_pattern(config, "rank_pattern", module, config["r"])
        if rank != expected:
            reason = f"{module} has the rank {expected}, but {rank} in {ADAPTER_WEIGHTS}"
            raise ValueError(f"{folder / ADAPTER_CONFIG}: {reason}; {_REMEDY}")
    has_magnitudes = any("lora_magnitude_vector" in key for key in tensors)
    if modules and has_magnitudes != bool(config.get("use_dora")):
        reason = f"use_dora is {str(bool(config.get('use_dora'))).lower()}"
        found = "has" if has_magnitudes else "has no"
        raise ValueError(
            f"{folder / ADAPTER_CONFIG}: {reason}, but {ADAPTER_WEIGHTS} {found} magnitudes; "
            f"{_REMEDY}"
        )


def matching_pattern(
    config: dict[str, Any], field: str, name: str, default: float
) -> float:
    """Return the value of the first expression of alpha_pattern or rank_pattern that matches the
    end of a module's name, which is that in the class of the adapter, as in PEFT."""
    for expression, value in (config.get(field) or {}).items():
        if _matches(rf"(.*\.)?({expression})", name, field):
            return value
    return default


def _module_ranks(config: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the rank of each module that has LoRA weights; stacked experts are adapted as
    parameters instead."""
    # an entry names a parameter, the tensors of its factors are under the module, which a short
    # entry leaves out (PEFT 0.21 writes gate_up_proj for experts)
    stacks = []
    for name in config.get("target_parameters") or []:
        module = name.rpartition(".")[0]
        stacks.append(f".{module or 'experts'}")

    ranks = {}
    for key, tensor in tensors.items():
        module, _, leaf = key.removeprefix(PREFIX).partition(".lora_")
        if f"lora_{leaf}" not in _FIRST_FACTORS or tensor.ndim != 2:
            continue
        # PEFT nests one wrapper for each adapted parameter of a module
        unwrapped = module.replace(".base_layer", "")
        if not f".{unwrapped}".endswith(tuple(stacks)):
            ranks[module] = tensor.size(0)
    return ranks


def _is_targeted(module: str, config: dict[str, Any]) -> bool:
    """Return whether PEFT would adapt a module
    (peft.tuners.tuners_utils.check_target_module_exists)."""
    if config.get("ensure_weight_tying") and not regex.search(r"\.\d+\.", module):
        # PEFT adapts the head with the embedding, whichever is named
        return True
    excluded = config.get("exclude_modules")
    if excluded and _is_named(module, excluded, "exclude_modules"):
        return False
    targets = config.get("target_modules") or []
    if targets == "all-linear":
        return True
    if not _is_named(module, targets, "target_modules"):
        return False
    layers = config.get("layers_to_transform")
    # layers_to_transform limits only names that match by their end
    if isinstance(targets, str) or module in targets or layers is None or layers == []:
        return True
    patterns = config.get("layers_pattern") or []
    patterns = [patterns] if isinstance(patterns, str) else patterns
    expressions = [rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\." for pattern in patterns] or [
        _LAYER
    ]
    for expression in expressions:
        match = _search(expression, module, "layers_pattern")
        if match:
            return int(match["index"]) in (layers if isinstance(layers, list) else [layers])
    return False


def _is_named(module: str, names: str | list[str], field: str) -> bool:
    """Return whether an expression matches a module's name, or one of several names is its end."""
    if isinstance(names, str):
        return _matches(names, module, field)
    return any(f".{module}".endswith(f".{name}") for name in names)


def _matches(expression: str, name: str, field: str) -> bool:
    """Return whether an expression of an adapter's config matches a whole name."""
    return _search(rf"(?:{expression})\Z", name, field) is not None


def _search(expression: str, name: str, field: str) -> regex.Match | None:
    """Match an expression at the beginning of a name.

    Raises ValueError if it is invalid or takes too long.
    """
    # the expression comes from a file: a bad one could run for hours without the timeout
    try:
        return regex.match(expression, name, timeout=MATCH_SECONDS)
    except TimeoutError:
        reason = f"{field} {expression!r:.200}: the expression takes too long to match"
    except regex.error as error:
        reason = f"{field} {expression!r:.200}: {error}"
    raise ValueError(f"{ADAPTER_CONFIG}: {reason}; save the adapter again")
