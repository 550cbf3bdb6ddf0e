"""GGUF files of Mistral Small 4: DeepSeek V3's network, whose queries are scaled by position."""

import math
from typing import Any

from litft.export.gguf.families import deepseek
from litft.export.gguf.families.family import GgufFamily
from litft.model.config import Config

SCALE = "attention.temperature_scale"
LENGTH = "attention.temperature_length"


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return the sizes of latent attention and of the experts, and the scale of queries."""
    metadata = deepseek.gguf_metadata(config)
    rope = config.layers[0].rope
    # 0.1 of mscale_all_dim
    multiplier = metadata.get("rope.scaling.yarn_log_multiplier", 0.1)
    if not math.isclose(multiplier, 0.1, rel_tol=1e-4):
        raise ValueError(
            f"llama.cpp reads mscale_all_dim {10 * multiplier:.4g} of Mistral Small 4 as 1; keep "
            "the Hugging Face folder"
        )
    if rope is not None and rope.query_beta:
        metadata[SCALE] = rope.query_beta
        metadata[LENGTH] = rope.original_max_positions
    return metadata


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json, with all that describes RoPE in one field, as in transformers 5."""
    hf = {**hf}
    beta = hf.pop("llama_4_scaling_beta", None)
    # llama.cpp's name of the original length, which the file has a second time
    hf.pop("scaled_from_length", None)
    # without a function, `deepseek.gguf_config` names no other model type
    hf.pop("scoring_func", None)
    hf = deepseek.gguf_config(hf)
    rope = {
        "rope_theta": hf["rope_theta"],
        **hf.pop("rope_scaling", {"rope_type": "default"}),
    }
    if beta is not None:
        rope["llama_4_scaling_beta"] = beta
    hf.pop("topk_method", None)
    return hf | {"rope_parameters": rope}


GGUF_FAMILY = GgufFamily(
    architectures={"mistral4": ("mistral4", "Mistral4ForCausalLM")},
    rules=deepseek.gguf_rules,
    config=gguf_config,
    metadata=gguf_metadata,
    fields=deepseek.GGUF_FIELDS
    | {SCALE: "llama_4_scaling_beta", LENGTH: "scaled_from_length"},
)
