"""GGUF files of Llama 4."""

from typing import Any

from litft.checkpoints.rules import Rule
from litft.export.gguf.families import llama, mixtral
from litft.export.gguf.families.family import GgufFamily
from litft.model.config import Config

GGUF = {"llama4_text": ("llama4", "Llama4ForCausalLM")}
GGUF_FIELDS = {
    "feed_forward_length": "intermediate_size_mlp",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "intermediate_size",
}


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names."""
    return [*mixtral.gguf_expert_rules(), *llama.gguf_names(config)]


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return the sizes of the experts, and how many layers apart they are."""
    sizes = mixtral.gguf_sizes(config, GGUF_FIELDS)
    return sizes | {
        "interleave_moe_layer_step": next(
            n for n, layer in enumerate(config.layers, 1) if layer.experts
        )
    }


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json; llama.cpp has the chunks of the published models, and knows Maverick by
    its 128 experts."""
    return hf | {"use_qk_norm": hf.get("num_local_experts") != 128}


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    config=gguf_config,
    metadata=gguf_metadata,
    fields=GGUF_FIELDS,
)
