"""SmolLM3 (Hugging Face, 2025): Llama without RoPE in every fourth layer (NoPE, arXiv
2501.18795)."""

from dataclasses import replace
from typing import Any

from litft.families import llama
from litft.families.family import Family
from litft.families.llama import rules
from litft.model.config import Config


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' SmolLM3Config."""
    hf = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        **hf,
    }
    base = llama.config(hf, rope_theta=2e6)
    uses_rope = layers_with_rope(hf)
    if not hf.get("use_sliding_window", False):
        # which of the two counts depends on transformers' attention implementation
        if hf.get("sliding_window") and "sliding_attention" in (
            hf.get("layer_types") or ()
        ):
            raise ValueError(
                "config.json: layer_types has layers with a sliding window, but "
                "use_sliding_window is not true; set it to true, or remove layer_types"
            )
        hf["sliding_window"] = None
    windows = llama.layer_windows(hf, lambda index: not uses_rope[index])
    layers = []
    for layer, has_rope in zip(
        llama.windowed_layers(base, windows), uses_rope, strict=True
    ):
        if not has_rope:
            layer = replace(layer, rope=None)
        layers.append(layer)
    return replace(base, layers=tuple(layers))


def layers_with_rope(hf: dict[str, Any]) -> list[int]:
    """Return 1 for each layer with RoPE and 0 for the others; `no_rope_layers` has these values,
    despite its name."""
    interval = hf.get("no_rope_layer_interval", 4)
    num_layers = hf["num_hidden_layers"]
    # by default, each fourth layer has no RoPE
    uses_rope = hf.get("no_rope_layers")
    if not uses_rope:
        uses_rope = [int((n + 1) % interval != 0) for n in range(num_layers)]
    if len(uses_rope) != num_layers or any(value not in (0, 1) for value in uses_rope):
        raise ValueError(
            f"config.json: no_rope_layers must list {num_layers} values of 0 or 1, found "
            f"{uses_rope!r:.300}"
        )
    return uses_rope


FAMILY = Family(
    model_types=("smollm3",),
    config=config,
    rules=rules,
)
