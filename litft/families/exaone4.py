"""EXAONE 4.0 (LG, arXiv 2507.11407): norms after attention and MLP, and RoPE only in layers with a
sliding window."""

from dataclasses import replace
from typing import Any

from litft.families import llama
from litft.families.family import Family
from litft.families.olmo import rules
from litft.model.config import Config, LayerConfig


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' Exaone4Config."""
    base = llama.config({"num_key_value_heads": 32, "rms_norm_eps": 1e-5, **hf})
    base = replace(
        base,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        norm_position="after",
        qk_norm=base.norm,
    )
    return replace(base, layers=layers(hf, base))


def layers(hf: dict[str, Any], base: Config) -> tuple[LayerConfig, ...]:
    """Return the layers, every fourth of which has full attention without RoPE; without any window
    all have RoPE."""
    pattern = hf.get("sliding_window_pattern", 4)
    # a missing window is that of transformers' Exaone4Config; null means none
    hf = {"sliding_window": 4096, **hf}
    if not hf["sliding_window"]:
        return base.layers

    def is_sliding(index: int) -> bool:
        # published files have LLLG: three local layers, one global
        if pattern and isinstance(pattern, str):
            return pattern[index % len(pattern)] == "L"
        # null or 0: no layer has full attention
        return not pattern or (index + 1) % pattern != 0

    windows = llama.layer_windows(hf, is_sliding)
    return llama.local_rope_layers(base, windows)


FAMILY = Family(
    model_types=("exaone4",),
    config=config,
    rules=rules,
)
