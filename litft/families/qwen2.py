"""Qwen 1.5, 2 and 2.5, QwQ (arXiv 2407.10671), Qwen 3 (2505.09388): Llama with q/k/v biases or q/k
norms, and its names."""

from dataclasses import replace
from typing import Any

from litft.families import llama
from litft.families.family import Family
from litft.model.config import Config


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' Qwen2Config and
    Qwen3Config."""
    hf = {
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "sliding_window": 4096,
        **hf,
    }
    if hf["model_type"] == "qwen3":
        hf = {"head_dim": 128, **hf}
    # files have the size of the window even where it is switched off
    if not hf.get("use_sliding_window", False):
        hf["sliding_window"] = None
    base = llama.config(hf)
    # despite its name, the field is the number of layers without a window
    windows = llama.layer_windows(hf, lambda index: index >= hf["max_window_layers"])
    layers = llama.windowed_layers(base, windows)
    if hf["model_type"] == "qwen2":
        return replace(base, layers=layers, qkv_bias=True, o_bias=False)
    return replace(base, layers=layers, qk_norm=base.norm)


FAMILY = Family(
    model_types=("qwen2", "qwen3"),
    config=config,
    rules=llama.rules,
)
