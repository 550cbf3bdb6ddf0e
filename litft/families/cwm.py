"""Code World Model 32B (Meta, arXiv 2510.02387): Llama 3 with a sliding window in three of four
layers."""

from dataclasses import replace
from typing import Any

from litft.families import llama
from litft.families.family import Family
from litft.families.llama import rules
from litft.model.config import Config

# CWM's RoPE if the file does not specify it
ROPE = dict(
    rope_type="llama3",
    factor=16.0,
    original_max_position_embeddings=8192,
    low_freq_factor=1.0,
)
ROPE |= dict(high_freq_factor=4.0)


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' CwmConfig."""
    defaults = dict(
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
    )
    hf = {**defaults, "sliding_window": 8192, **hf}
    if not llama.names_rope(hf):
        # whatever rope_theta says
        hf["rope_parameters"] = {**ROPE, "rope_theta": 1e6}
    base = llama.config(hf, rope_theta=1e6)
    # the first of every four layers has full attention
    windows = llama.layer_windows(hf, lambda index: index % 4 != 0)
    layers = llama.windowed_layers(base, windows)
    return replace(base, layers=layers, qkv_bias=False, o_bias=False)


FAMILY = Family(
    model_types=("cwm",),
    config=config,
    rules=rules,
)
