"""adapter_config.json and the tensors next to it: read, check, and identify an adapter folder."""

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import regex
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from litft.model.config_file import is_positive, read_object

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# what litft alone reads: in the config, PEFT would warn of an unknown field
ADAPTER_RECORD = "litft.json"


def read_token_ids(config: dict[str, Any], folder: Path) -> list[int]:
    """Return the ids of new tokens in an adapter's config; raise ValueError if they are invalid."""
    config_value = config.get("trainable_token_indices") or []
    # a list is for the embedding; a dictionary has one for each module
    if isinstance(config_value, dict):
        lists = list(config_value.values())
    else:
        lists = [config_value]
    ids = lists[0]
    are_valid = isinstance(ids, list) and all(
        type(i) is int and 0 <= i < 10**7 for i in ids
    )
    if (
        not are_valid
        or len(set(ids)) != len(ids)
        or any(other_ids != ids for other_ids in lists)
    ):
        reason = "must be a list of distinct token ids, the same for embedding and head"
        raise ValueError(
            f"{folder / ADAPTER_CONFIG}: trainable_token_indices {reason}; found "
            f"{config_value!r:.200}"
        )
    return ids


def adapter_digest(folder: Path) -> str:
    """Return a hash of the adapter's files."""
    sha256 = hashlib.sha256()
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_RECORD):
        if (folder / name).is_file():
            sha256.update((folder / name).read_bytes())
    return sha256.hexdigest()


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json, with litft's record as its field `litft`.

    Raises ValueError if a field that locates the base model is invalid.
    """
    path = folder / ADAPTER_CONFIG
    config = read_object(path)
    if not isinstance(config.get("base_model_name_or_path") or "", str):
        raise ValueError(
            f"{path}: base_model_name_or_path must be text; save the adapter again"
        )
    record_path = folder / ADAPTER_RECORD
    if record_path.is_file():
        # a file of its own, since PEFT warns of fields that it does not know
        config["litft"] = read_object(record_path)
        _check_record(record_path, config["litft"])
    elif "litft" in config:
        # written before the record had a file of its own
        _check_record(path, config["litft"])
    return config


def _check_record(path: Path, record: Any) -> None:
    """Raise ValueError if litft's own record is invalid."""
    if not isinstance(record, dict):
        raise ValueError(
            f"{path}: litft's record must be an object, found {record!r:.100}; save the adapter "
            "again"
        )
    for name in ("base_path", "base_fingerprint"):
        value = record.get(name, "")
        if not isinstance(value, str):
            raise ValueError(
                f"{path}: {name} must be text, found {value!r:.100}; save the adapter again"
            )
    tokens = record.get("new_tokens", [])
    if not isinstance(tokens, list) or not all(map(_is_token_id, tokens)):
        raise ValueError(
            f"{path}: new_tokens must be a list of token ids, found {tokens!r:.100}; save the "
            "adapter again"
        )
    frozen = record.get("frozen", [])
    if not isinstance(frozen, list) or not all(isinstance(name, str) for name in frozen):
        raise ValueError(
            f"{path}: frozen must be a list of names, found {frozen!r:.100}; save the adapter again"
        )


def write_adapter_config(folder: Path, config: dict[str, Any]) -> None:
    """Write adapter_config.json, and the field `litft` to a file of its own."""
    for name, content in adapter_config_files(config).items():
        (folder / name).write_bytes(content)


def adapter_config_files(config: dict[str, Any]) -> dict[str, bytes]:
    """Return the content of the files that `write_adapter_config` writes, by name."""
    fields = dict(config)
    record = fields.pop("litft", None)
    files = {ADAPTER_CONFIG: fields}
    if record:
        files[ADAPTER_RECORD] = record
    contents = {}
    for name, content in files.items():
        text = json.dumps(content, indent=2) + "\n"
        contents[name] = text.encode()
    return contents


def vllm_obstacles(config: dict[str, Any]) -> list[str]:
    """Return the parts of an adapter that vLLM does not load: all but LoRA of Linears."""
    fields = {
        "use_dora": "DoRA",
        "modules_to_save": "modules trained in full",
        "trainable_token_indices": "new tokens",
        "target_parameters": "LoRA of stacked experts",
    }
    obstacles = []
    for field, name in fields.items():
        if config.get(field):
            obstacles.append(name)
    if config.get("bias", "none") != "none":
        obstacles.append("trained biases")
    if _has_several_scales(config):
        obstacles.append("updates of several scales (alpha / rank)")
    return obstacles


def _has_several_scales(config: dict[str, Any]) -> bool:
    """Return whether modules have another scale than alpha / r: vLLM reads no patterns."""
    ranks = config.get("rank_pattern") or {}
    alphas = config.get("alpha_pattern") or {}
    rank = config.get("r", 8)
    alpha = config.get("lora_alpha", 8)
    power = 0.5 if config.get("use_rslora") else 1.0
    for name in {**ranks, **alphas}:
        scale = alphas.get(name, alpha) / ranks.get(name, rank) ** power
        if not math.isclose(scale, alpha / rank**power, rel_tol=1e-6):
            return True
    return False


# initializations that leave the base's weights as they are; PiSSA and OLoRA subtract the initial
# update from them
PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
SUBTRACTED_INITS = ("pissa", "olora")


def initial_update(config: dict[str, Any], folder: Path) -> str | None:
    """Return the initialization whose update PEFT subtracts from the base when it opens an adapter;
    None: nothing is.

    Raises ValueError for one that changes the base in a way that cannot be computed from the
    adapter's files.
    """
    init = config.get("init_lora_weights", True)
    if init in PLAIN_INITS:
        return None
    if init in SUBTRACTED_INITS:
        return init
    reason = (
        f"init_lora_weights {init!r} changes the weights of the base in a way that litft cannot "
        "repeat"
    )
    remedy = "merge the adapter in PEFT, or save it with path_initial_model_for_weight_conversion"
    raise ValueError(f"{folder / ADAPTER_CONFIG}: {reason}; {remedy}")


# variants of LoRA with another forward pass, and their defaults
_OTHER_VARIANTS = {
    "peft_type": "LORA",
    "layer_replication": None,
    "lora_bias": False,
    "alora_invocation_tokens": None,
    "use_qalora": False,
    "use_bdlora": None,
    "velora_config": None,
    "monteclora_config": None,
    "kasa_config": None,
    "arrow_config": None,
}


def _is_token_id(token: Any) -> bool:
    # no vocabulary has so many tokens
    return type(token) is int and 0 <= token < 10**7


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def check_lora_config(config: dict[str, Any], folder: Path) -> None:
    """Raise ValueError if an adapter's config is not one of LoRA or DoRA, or a field is invalid."""
    invalid = []
    for name, default in _OTHER_VARIANTS.items():
        if config.get(name) not in (default, None, [], {}):
            invalid.append(f"{name} {config[name]!r}")
    if invalid:
        raise ValueError(
            f"{folder / ADAPTER_CONFIG}: {', '.join(invalid)} is not supported; litft reads LoRA "
            "and DoRA"
        )
    missing = [name for name in ("r", "lora_alpha") if name not in config]
    if missing:
        raise ValueError(
            f"{folder / ADAPTER_CONFIG} lacks {', '.join(missing)}; is it a LoRA adapter in PEFT "
            "format?"
        )

    # the patterns come first, as their values are checked below
    alpha_pattern = config.get("alpha_pattern") or {}
    rank_pattern = config.get("rank_pattern") or {}
    target_parameters = config.get("target_parameters") or []
    for name, pattern in (("alpha_pattern", alpha_pattern), ("rank_pattern", rank_pattern)):
        if not isinstance(pattern, dict):
            raise ValueError(
                f"{folder / ADAPTER_CONFIG}: {name} {pattern!r} is not valid; save the adapter "
                "again"
            )
    values = {"lora_alpha": config["lora_alpha"], **alpha_pattern}
    for name, value in values.items():
        # an alpha of 0 is valid: it switches an adapter off
        if not is_positive(value) and value != 0:
            invalid.append(f"{name} {value!r}")
    ranks = {"r": config["r"], **rank_pattern}
    for name, value in ranks.items():
        if type(value) is not int or value < 0:
            invalid.append(f"{name} {value!r}")
    for name in ("target_modules", "exclude_modules", "layers_pattern"):
        value = config.get(name) or []
        if not isinstance(value, str) and not _are_texts(value):
            invalid.append(f"{name} {value!r}")
    if config.get("bias", "none") not in ("none", "lora_only", "all"):
        invalid.append(f"bias {config['bias']!r}")
    for name in ("use_rslora", "use_dora"):
        if not isinstance(config.get(name, False), bool):
            invalid.append(f"{name} {config[name]!r}")
    if not _are_texts(target_parameters):
        invalid.append(f"target_parameters {target_parameters!r}")
    saved = config.get("modules_to_save")
    if saved is not None and not _are_texts(saved):
        invalid.append(f"modules_to_save {saved!r}")
    # the expressions are matched later, and must compile
    for name, pattern in (("alpha_pattern", alpha_pattern), ("rank_pattern", rank_pattern)):
        for key in pattern:
            try:
                regex.compile(key)
            except (regex.error, TypeError):
                invalid.append(f"{name} {key!r}")
    if invalid:
        raise ValueError(
            f"{folder / ADAPTER_CONFIG}: {', '.join(invalid)} is not valid; save the adapter again"
        )


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of an adapter folder, by the names in its file."""
    with _named_errors(folder):
        return load_file(folder / ADAPTER_WEIGHTS)


def adapter_tensor_names(folder: Path) -> list[str]:
    """Return the names of the tensors in an adapter folder's file; only its header is read."""
    with _named_errors(folder), safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
        return list(file.keys())


@contextmanager
def _named_errors(folder: Path) -> Iterator[None]:
    """Raise ValueError for an adapter's file of tensors that is not there or not readable."""
    path = folder / ADAPTER_WEIGHTS
    try:
        yield
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(
            f"{folder} lacks {ADAPTER_WEIGHTS}; copy it next to {ADAPTER_CONFIG}"
        ) from None
    except SafetensorError as error:
        raise ValueError(
            f"{path} is truncated or not a safetensors file ({error}); copy it again"
        ) from None


def note_step(folder: Path, step: int) -> None:
    """Note in litft's record of a folder of weights, an adapter's or a full model's, after how many
    steps of its run they were written."""
    path = folder / ADAPTER_RECORD
    record = read_object(path) if path.is_file() else {}
    path.write_text(json.dumps(record | {"step": step}, indent=2) + "\n", "utf-8")


def noted_step(folder: Path) -> int | None:
    """Return the step that `note_step` has noted; None for weights at the end of a run."""
    try:
        step = read_object(folder / ADAPTER_RECORD).get("step")
    except (OSError, ValueError):
        return None
    if isinstance(step, int):
        return step
    return None
