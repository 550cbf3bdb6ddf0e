"""Mistral 7B and its kin: Llama's network with a sliding window and no biases (arXiv 2310.06825)."""

from dataclasses import replace
from typing import Any

from litft.config import Config
from litft.families import llama
from litft.families.llama import rules

__all__ = ["MODEL_TYPES", "config", "rules"]

MODEL_TYPES = ("mistral",)


def config(hf: dict[str, Any]) -> Config:
    """Defaults are those of transformers' MistralConfig: 8 key/value heads and a window of 4,096 unless stated."""
    plain = llama.config({"num_key_value_heads": 8, "max_position_embeddings": 131072, **hf})
    window = hf.get("sliding_window", 4096)
    layers = tuple(replace(layer, window=window) for layer in plain.layers)
    return replace(plain, layers=layers, qkv_bias=False, o_bias=False, mlp_bias=False)
