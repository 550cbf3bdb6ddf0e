"""Qwen 1.5, 2 and 2.5, QwQ (arXiv 2407.10671), Qwen 3 (2505.09388): Llama with q/k/v biases or q/k
norms, and its names; and the language models of Qwen 2, 2.5 and 3 VL (2409.12191, 2502.13923)."""

from dataclasses import replace
from typing import Any

from litft.families import llama
from litft.families.family import Family
from litft.model.config import Config

# the language model of a multimodal one: its model_type and class alone
TEXT_MODELS = {
    "qwen2_vl": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2_5_vl": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3_vl": ("qwen3", "Qwen3ForCausalLM"),
}
# fields of the multimodal config.json that do not describe its language model
OUTER_FIELDS = ("vision_config", "text_config", "vision_token_id", "image_token_id")


def text_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the text model if `hf` is a multimodal model's, otherwise `hf`.

    Older files have the fields of the language model beside those of the vision tower.
    """
    if hf["model_type"] not in TEXT_MODELS:
        return hf
    if "text_config" not in hf:
        hf = {**hf, "text_config": {k: v for k, v in hf.items() if k not in OUTER_FIELDS}}
    model_type, architecture = TEXT_MODELS[hf["model_type"]]
    text = llama.text_model_config(hf, model_type, architecture) | {"model_type": model_type}
    # the three positions of M-RoPE are one for text, so it is RoPE
    for name in ("rope_scaling", "rope_parameters"):
        scaling = text.get(name)
        if isinstance(scaling, dict) and "mrope_section" in scaling:
            text[name] = _without_sections(scaling)
    return text


def _without_sections(scaling: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of RoPE without those of M-RoPE."""
    kept = {}
    for name, value in scaling.items():
        if name in ("mrope_section", "mrope_interleaved"):
            continue
        kept[name] = "default" if value == "mrope" else value
    return kept


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' Qwen2Config and
    Qwen3Config."""
    hf = {"max_position_embeddings": 32768, "max_window_layers": 28, "sliding_window": 4096, **hf}
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
    model_types=("qwen2", "qwen3", *TEXT_MODELS),
    config=config,
    rules=llama.multimodal_rules,
    text_config=text_config,
)
