"""ERNIE 4.5, dense (Baidu, 2025): Llama with interleaved RoPE and one flag for all biases."""

from dataclasses import replace
from typing import Any

from litft.families import llama
from litft.families.family import Family
from litft.families.llama import rules
from litft.model.config import Config


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' Ernie4_5Config."""
    defaults = dict(
        num_key_value_heads=2, head_dim=128, rms_norm_eps=1e-5, tie_word_embeddings=True
    )
    bias = bool(hf.get("use_bias"))
    base = llama.config(
        {**defaults, "max_position_embeddings": 131072, **hf}, rope_theta=500000.0
    )
    return replace(base, rope_interleaved=True, qkv_bias=bias, o_bias=bias, mlp_bias=bias)


FAMILY = Family(
    model_types=("ernie4_5",),
    config=config,
    rules=rules,
)
