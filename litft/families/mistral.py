"""Mistral 7B to Small 3.2, Ministral, Mathstral: Llama's network with a sliding window and no biases (arXiv 2310.06825).

Ministral 3 scales its queries with their position; it and Mistral Small 3.1 come inside multimodal folders (mistral3).
"""

from dataclasses import replace
from typing import Any

from litft.families import llama
from litft.families.llama import gguf_rules
from litft.families.llama import wrapped_rules as rules
from litft.model.config import Config

__all__ = ["MODEL_TYPES", "config", "gguf_rules", "rules", "text_config"]

MODEL_TYPES = ("mistral", "ministral", "ministral3", "mistral3")
GGUF = {"mistral": ("llama", "MistralForCausalLM")}

# Ministral 3's rotation where the file states none
YARN = dict(
    rope_type="yarn",
    rope_theta=1e6,
    factor=16.0,
    original_max_position_embeddings=16384,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
)
ARCHITECTURES = {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}


def text_config(hf: dict[str, Any]) -> dict[str, Any]:
    """The text model's own config.json, where `hf` is that of the multimodal model around it."""
    if hf["model_type"] != "mistral3":
        return hf
    kind = hf["text_config"].get("model_type", "mistral")
    if kind not in ARCHITECTURES:
        raise ValueError(f"config.json: text_config's model_type {kind!r} is not known; known: {', '.join(ARCHITECTURES)}")
    return llama.language_model(hf, kind, ARCHITECTURES[kind])


def config(hf: dict[str, Any], rope_base: float = 10000.0) -> Config:
    """Defaults are those of transformers' MistralConfig, MinistralConfig and Ministral3Config."""
    third = hf["model_type"] == "ministral3"
    window = None if third else 4096
    context = 262144 if third else 131072
    hf = {"num_key_value_heads": 8, "max_position_embeddings": context, "sliding_window": window, **hf}
    if third and not (hf.get("rope_parameters") or hf.get("rope_scaling")):
        hf["rope_parameters"] = YARN
    if hf["model_type"] != "ministral":
        hf["layer_types"] = None  # its layers are all alike
    plain = llama.config({"head_dim": 128, "rms_norm_eps": 1e-5, **hf} if third else hf, rope_base)
    layers = tuple(replace(plain.layers[0], window=window) for window in llama.windows(hf, lambda index: True))
    return replace(plain, layers=layers, qkv_bias=False, o_bias=False, mlp_bias=False)
