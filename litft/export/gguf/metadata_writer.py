"""The metadata of a GGUF file for a `Config`, and whether llama.cpp computes the same."""

import math
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from litft.checkpoints.conversion import mappings_to_hf
from litft.export.gguf.families import (
    gguf_architecture,
    gguf_metadata,
    gguf_rules,
)
from litft.export.gguf.metadata import (
    DEFAULT_LOCAL_THETA,
    FREQS,
    HAS_NO_HEAD,
    LONG,
    READS_FACTORS,
    SHORT,
    SUPPORTS_WINDOWS,
    UNROTATED,
    GgufArchitecture,
    rope_divisors,
)
from litft.families import read_config
from litft.model.config import Config, LayerConfig
from litft.model.rope import inverse_frequencies
from litft.model.rope_config import RopeConfig
from litft.model.transformer import GPT


def to_gguf_architecture(config: Config) -> GgufArchitecture:
    """Return the GGUF description of `config`; raise ValueError if llama.cpp would compute
    something else."""
    tensor_names = _tensor_names(config)
    name = gguf_architecture(config)
    if name in HAS_NO_HEAD and not config.tied:
        reason = (
            f"GGUF files of {config.model_type} have no separate head, but this model's head is "
            "not tied to its embedding"
        )
        raise ValueError(f"{reason}; keep the Hugging Face folder")
    if not any(layer.attention for layer in config.layers):
        raise ValueError(
            "GGUF files of models without any attention layer are not supported; keep the Hugging "
            "Face folder"
        )
    rope = _main_rope(config)
    metadata = _metadata(config, rope) | gguf_metadata(config)
    factors = _factors(rope)
    architecture = GgufArchitecture(
        name, metadata, tensor_names, config.vocab_size, config.tied, factors
    )

    # read back: what differs from the model, llama.cpp would compute differently
    unsupported = _differences(
        config,
        read_config(architecture.to_hf()),
        compare_windows=name in SUPPORTS_WINDOWS,
    )
    if factors and name not in READS_FACTORS:
        unsupported = [*unsupported, "rope"]
    if unsupported:
        reason = (
            f"llama.cpp's architecture {name} does not support this model's "
            f"{', '.join(unsupported)}"
        )
        raise ValueError(
            f"{reason}, and would compute something else; keep the model in Hugging Face's format"
        )
    return architecture


def _tensor_names(config: Config) -> frozenset[str]:
    """Return the names of llama.cpp's tensors."""
    with torch.device("meta"):
        parameters = [name for name, _ in GPT(config).named_parameters()]
    names: set[str] = set()
    for mapping in mappings_to_hf(gguf_rules(config), parameters):
        names.update(mapping.targets)
    return frozenset(names)


def _main_rope(config: Config) -> RopeConfig | None:
    """Return the rotation of full attention if it rotates, otherwise that of a window, if any."""
    rotating = []
    for layer in config.layers:
        if layer.attention and layer.rope and layer.rope.dim:
            rotating.append(layer)
    for layer in rotating:
        if layer.window is None:
            return layer.rope
    if rotating:
        return rotating[0].rope
    return None


def _metadata(config: Config, rope: RopeConfig | None) -> dict[str, Any]:
    """Return the metadata of `config`; rope: that of the layers with full attention."""
    windows = set()
    for layer in config.layers:
        if isinstance(layer.window, int):
            windows.add(layer.window)
    if config.norm.kind == "rms":
        epsilon = "attention.layer_norm_rms_epsilon"
    else:
        epsilon = "attention.layer_norm_epsilon"

    # the sizes
    metadata = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_positions,
        "embedding_length": config.dim,
        "block_count": len(config.layers),
        "feed_forward_length": config.hidden_dim,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        epsilon: config.norm.eps,
    }
    if windows:
        metadata["attention.sliding_window"] = max(windows)
    for name, cap in (("attn", config.attention_softcap), ("final", config.logit_softcap)):
        if cap:
            metadata[f"{name}_logit_softcapping"] = float(cap)
    if rope is None:
        return metadata

    # the rotation
    head_dims = dict.fromkeys(
        ("attention.key_length", "attention.value_length"), config.head_dim
    )
    metadata |= head_dims | {"rope.dimension_count": rope.dim, "rope.freq_base": rope.theta}
    rotations = (layer.rope for layer in config.layers if layer.rope and layer.rope.dim)
    local_rope = next((local for local in rotations if local.theta != rope.theta), None)
    if local_rope and local_rope.theta != DEFAULT_LOCAL_THETA:
        metadata["rope.freq_base_swa"] = local_rope.theta
    if rope.rope_type in ("linear", "yarn", "longrope"):
        metadata["rope.scaling.type"] = rope.rope_type
    if rope.rope_type in ("linear", "yarn"):
        metadata["rope.scaling.factor"] = rope.factor
    # llama.cpp's files have the length before scaling
    if rope.rope_type == "linear":
        metadata["context_length"] = rope.original_max_positions
    if rope.rope_type in ("yarn", "longrope"):
        metadata["rope.scaling.original_context_length"] = rope.original_max_positions
    if rope.rope_type == "longrope":
        metadata["rope.scaling.attn_factor"] = rope.attention_factor
    return metadata


def _factors(rope: RopeConfig | None) -> dict[str, Tensor]:
    """Return the tensors of a rotary embedding that the metadata cannot describe."""
    if rope is None or rope.rope_type not in ("llama3", "longrope", "proportional"):
        return {}
    if rope.rope_type == "proportional":
        return {FREQS: torch.where(inverse_frequencies(rope)[0] > 0, 1.0, UNROTATED)}
    if rope.rope_type == "llama3":
        return {FREQS: rope_divisors(rope)}
    return {LONG: torch.tensor(rope.long_factor), SHORT: torch.tensor(rope.short_factor)}


def _differences(config: Config, other: Config, compare_windows: bool) -> list[str]:
    """Name the properties in which `other`, read from the GGUF description of `config`, differs
    from it. compare_windows: False if llama.cpp ignores windows, of which the export warns."""
    # GGUF has one architecture for several model types; layers are compared one by one below
    skipped = {"model_type", "layers"}
    names = []

    # all fields but those that need a comparison of their own
    for f in fields(config):
        if f.name not in skipped and getattr(config, f.name) != getattr(other, f.name):
            names.append(f.name)
    pairs = list(zip(config.layers, other.layers, strict=True))
    if any(
        _scale(config, layer.attention_scale) != _scale(other, twin.attention_scale)
        for layer, twin in pairs
    ):
        names.append("attention_scale")
    if any(not _same_rotation(layer.rope, twin.rope) for layer, twin in pairs):
        names.append("rope")
    if compare_windows and any(layer.window != twin.window for layer, twin in pairs):
        names.append("sliding windows")
    for f in fields(LayerConfig):
        if f.name in ("attention_scale", "rope", "window"):
            continue
        if any(getattr(layer, f.name) != getattr(twin, f.name) for layer, twin in pairs):
            names.append(f.name)
    return names


def _scale(config: Config, stated: float | None) -> float:
    if stated is None:
        return round(config.head_dim**-0.5, 6)
    return round(stated, 6)


def _same_rotation(rope: RopeConfig | None, other: RopeConfig | None) -> bool:
    """Whether two configs rotate by the same angles, even if their types differ."""
    if rope is None or other is None:
        return rope is other
    if (rope.dim, rope.rope_type == "dynamic", rope.query_beta) != (
        other.dim,
        other.rope_type == "dynamic",
        other.query_beta,
    ):
        return False
    # longrope has one list up to this length, and another beyond it
    if (
        "longrope" in (rope.rope_type, other.rope_type)
        and rope.short_factor != rope.long_factor
        and rope.original_max_positions != other.original_max_positions
    ):
        return False
    if rope.query_beta and rope.original_max_positions != other.original_max_positions:
        return False

    # the angles decide, since different types may give the same ones
    tables = zip(inverse_frequencies(rope), inverse_frequencies(other), strict=True)
    close = all(
        torch.allclose(frequencies, twin, rtol=1e-4, atol=0) for frequencies, twin in tables
    )
    return close and math.isclose(
        rope.attention_factor, other.attention_factor, rel_tol=1e-5
    )
