"""Seed-OSS 36B (ByteDance, 2025), InternLM 3 and Helium 1: Llama with other biases or RoPE
layouts."""

from dataclasses import replace
from typing import Any

from litft.families import llama
from litft.families.family import Family
from litft.families.llama import rules
from litft.model.config import Config

DEFAULTS: dict[str, dict[str, Any]] = {
    "seed_oss": dict(
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=524288,
        attention_bias=True,
    ),
    "internlm3": dict(
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
    ),
    "helium": dict(
        num_key_value_heads=20,
        head_dim=128,
        max_position_embeddings=4096,
        rms_norm_eps=1e-8,
    ),
}


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of SeedOssConfig, InternLM3Config or
    HeliumConfig."""
    model_type = hf["model_type"]
    hf = {**DEFAULTS.get(model_type, {}), **hf}
    # published files have other names for the two flags
    if model_type == "internlm3":
        hf = {
            "attention_bias": hf.get("qkv_bias", False),
            "mlp_bias": hf.get("bias", False),
            **hf,
        }
    rope_theta = 1e5 if model_type == "helium" else 1e4
    base = llama.config(hf, rope_theta=rope_theta)
    if model_type == "seed_oss":
        return replace(base, o_bias=hf.get("attention_out_bias", False))
    if model_type == "helium":
        return replace(base, rope_interleaved=True, o_bias=False)
    return base


FAMILY = Family(
    model_types=("seed_oss", "internlm3", "helium"),
    config=config,
    rules=rules,
)
