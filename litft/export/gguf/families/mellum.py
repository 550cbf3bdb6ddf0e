"""GGUF files of Mellum 2."""

from typing import Any

from litft.export.gguf.families import llama, mixtral
from litft.export.gguf.families.family import GgufFamily
from litft.export.gguf.families.qwen2_moe import gguf_rules
from litft.model.config import Config

GGUF = {"mellum": ("mellum", "MellumForCausalLM")}
GGUF_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
GGUF_FIELDS = GGUF_EXPERTS | llama.GGUF_WINDOWS


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return the sizes of the experts, and which layers have windows; raise ValueError for dense
    layers."""
    if not all(layer.experts for layer in config.layers):
        raise ValueError(
            "llama.cpp's architecture mellum has experts in every layer; keep the Hugging Face "
            "folder"
        )
    return mixtral.gguf_sizes(config, GGUF_EXPERTS) | llama.gguf_windows(config)


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the rotation of each kind of layer: of one theta, scaled in full
    attention only."""
    ropes = llama.gguf_ropes(hf)
    return llama.gguf_layer_types(hf) | ropes | {"norm_topk_prob": True}


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    config=gguf_config,
    metadata=gguf_metadata,
    fields=GGUF_FIELDS,
)
