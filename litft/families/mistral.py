"""Mistral 7B to Small 3.2, Ministral, Mathstral: Llama with a sliding window and without biases
(arXiv 2310.06825).

Ministral 3 scales queries by position. It and Mistral Small 3.1 are published as multimodal models
(mistral3).
"""

from dataclasses import replace
from typing import Any

from litft.families import llama
from litft.families.family import Family
from litft.model.config import Config

# Ministral 3's RoPE if the file does not specify it
YARN = dict(
    rope_type="yarn",
    rope_theta=1e6,
    factor=16.0,
    original_max_position_embeddings=16384,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
)


def config(hf: dict[str, Any], rope_theta: float = 10000.0) -> Config:
    """Read config.json; missing fields have the defaults of MistralConfig, MinistralConfig or
    Ministral3Config."""
    is_ministral3 = hf["model_type"] == "ministral3"
    # the defaults of Ministral 3: no window, and a longer context
    window = None if is_ministral3 else 4096
    max_positions = 262144 if is_ministral3 else 131072
    hf = {
        "num_key_value_heads": 8,
        "max_position_embeddings": max_positions,
        "sliding_window": window,
        **hf,
    }
    if is_ministral3 and not llama.names_rope(hf):
        hf["rope_parameters"] = YARN
    if hf["model_type"] != "ministral":
        # only Ministral has different kinds of layers
        hf["layer_types"] = None
    if is_ministral3:
        hf = {"head_dim": 128, "rms_norm_eps": 1e-5, **hf}
    base = llama.config(hf, rope_theta)
    windows = llama.layer_windows(hf, lambda index: True)
    layers = llama.windowed_layers(base, windows)
    return replace(base, layers=layers, qkv_bias=False, o_bias=False, mlp_bias=False)


FAMILY = Family(
    model_types=("mistral", "ministral", "ministral3"),
    config=config,
    rules=llama.rules,
)
