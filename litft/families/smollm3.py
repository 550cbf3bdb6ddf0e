"""SmolLM3 (Hugging Face, 2025): Llama with every fourth layer unrotated (NoPE, arXiv 2501.18795)."""

from dataclasses import replace
from typing import Any

from litft.families import llama
from litft.families.llama import rules
from litft.model.config import Config

__all__ = ["MODEL_TYPES", "config", "rules"]

MODEL_TYPES = ("smollm3",)


def config(hf: dict[str, Any]) -> Config:
    """Defaults are those of transformers' SmolLM3Config."""
    hf = {"num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True, **hf}
    plain = llama.config(hf, rope_base=2e6)
    interval = hf.get("no_rope_layer_interval", 4)
    rotated = hf.get("no_rope_layers") or [int((n + 1) % interval != 0) for n in range(len(plain.layers))]
    if len(rotated) != len(plain.layers) or any(value not in (0, 1) for value in rotated):
        raise ValueError(f"config.json: no_rope_layers must be {len(plain.layers)} times 0 or 1, found {rotated!r:.300}")
    if not hf.get("use_sliding_window", False):
        hf["sliding_window"] = None
    windows = llama.windows(hf, lambda index: not rotated[index])
    layers = tuple(
        replace(layer, window=window, rope=layer.rope if turns else None)
        for layer, window, turns in zip(plain.layers, windows, rotated, strict=True)
    )
    return replace(plain, layers=layers)
