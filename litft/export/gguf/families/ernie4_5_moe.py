"""GGUF files of ERNIE 4.5 mixtures."""

from typing import Any

from litft.checkpoints.rules import Rule
from litft.export.gguf.families import deepseek, llama, mixtral
from litft.export.gguf.families.family import GgufFamily
from litft.model.config import Config

GGUF = {"ernie4_5_moe": ("ernie4_5-moe", "Ernie4_5_MoeForCausalLM")}
GGUF_FIELDS = {
    "expert_count": "moe_num_experts",
    "expert_used_count": "moe_k",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "moe_num_shared_experts",
    "leading_dense_block_count": "moe_layer_start_index",
    "interleave_moe_layer_step": "moe_layer_interval",
}


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names."""
    return [*deepseek.gguf_mixture_rules(), *llama.gguf_names(config)]


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return the sizes of the experts; raise ValueError for dense layers after the first
    mixture."""
    metadata = deepseek.gguf_experts(config, GGUF_FIELDS) | mixtral.gguf_sizes(
        config, ["expert_shared_feed_forward_length"]
    )
    if not all(
        layer.experts for layer in config.layers[metadata["leading_dense_block_count"] :]
    ):
        raise ValueError(
            "llama.cpp reads no dense layers of ernie4_5_moe after the first mixture; keep the "
            "Hugging Face folder"
        )
    # all layers after the first mixture are mixtures
    return metadata | {"interleave_moe_layer_step": 1}


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    metadata=gguf_metadata,
    fields=GGUF_FIELDS,
)
