"""EXAONE 4.0 (LG, arXiv 2507.11407): norms after attention and MLP, and RoPE only in layers with a
sliding window."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rule
from litft.families import llama
from litft.families.olmo import gguf_rules as olmo_gguf_rules
from litft.families.olmo import rules
from litft.model.config import Config, LayerConfig

__all__ = ["GGUF", "MODEL_TYPES", "config", "gguf_config", "gguf_rules", "rules"]

MODEL_TYPES = ("exaone4",)
GGUF = {"exaone4": ("exaone4", "Exaone4ForCausalLM")}


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' Exaone4Config."""
    base = llama.config({"num_key_value_heads": 32, "rms_norm_eps": 1e-5, **hf})
    base = replace(
        base, qkv_bias=False, o_bias=False, mlp_bias=False, norm_position="after", qk_norm=base.norm
    )
    return replace(base, layers=layers(hf, base))


def layers(hf: dict[str, Any], base: Config) -> tuple[LayerConfig, ...]:
    """Return the layers, every fourth of which has full attention without RoPE; without any window
    all have RoPE."""
    pattern = hf.get("sliding_window_pattern", 4)
    hf = {"sliding_window": 4096, **hf}
    if hf["sliding_window"] is None:
        return base.layers

    def is_sliding(index: int) -> bool:
        # published files have LLLG: three local layers, one global
        if isinstance(pattern, str):
            return pattern[index % len(pattern)] == "L"
        return not pattern or (index + 1) % pattern != 0

    windows = llama.layer_windows(hf, is_sliding)
    return tuple(
        replace(base.layers[0], window=window, rope=base.layers[0].rope if window else None)
        for window in windows
    )


def gguf_rules(config: Config) -> list[Rule]:
    """Return OLMo's rules; raise ValueError for windows, which llama.cpp knows from the number of
    layers."""
    if any(layer.window for layer in config.layers):
        raise ValueError(
            "GGUF files of exaone4 with sliding windows are not supported; keep the Hugging Face "
            "folder"
        )
    return olmo_gguf_rules(config)


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Add that all layers have full attention, unless the file states a window."""
    full = {"sliding_window": None, "layer_types": ["full_attention"] * hf["num_hidden_layers"]}
    if hf.get("sliding_window"):
        return hf
    return hf | full
