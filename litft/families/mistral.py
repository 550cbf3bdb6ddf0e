"""Mistral 7B, Ministral and their kin: Llama's network with a sliding window and no biases (arXiv 2310.06825)."""

from dataclasses import replace
from typing import Any

from litft.config import Config
from litft.families import llama
from litft.families.llama import rules

__all__ = ["MODEL_TYPES", "config", "rules"]

MODEL_TYPES = ("mistral", "ministral")


def config(hf: dict[str, Any]) -> Config:
    """Defaults are those of transformers' MistralConfig: 8 key/value heads and a window of 4,096 unless stated."""
    hf = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096, **hf}
    if hf["model_type"] == "mistral":
        hf["layer_types"] = None  # Mistral's layers are all alike
    plain = llama.config(hf)
    windows = llama.windows(hf, lambda index: True)
    layers = tuple(replace(plain.layers[0], window=window) for window in windows)
    return replace(plain, layers=layers, qkv_bias=False, o_bias=False, mlp_bias=False)
