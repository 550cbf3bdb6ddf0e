"""GGUF files of Hunyuan dense and A13B."""

from typing import Any

from litft.checkpoints.rules import Rule
from litft.export.gguf.families import llama, mixtral
from litft.export.gguf.families.family import GgufFamily
from litft.model.config import Config

GGUF = {
    "hunyuan_v1_dense": ("hunyuan-dense", "HunYuanDenseV1ForCausalLM"),
    "hunyuan_v1_moe": ("hunyuan-moe", "HunYuanMoEV1ForCausalLM"),
}
GGUF_FIELDS = {
    "expert_count": "num_experts",
    "expert_used_count": "moe_topk",
    "expert_feed_forward_length": "intermediate_size",
    "expert_shared_feed_forward_length": "intermediate_size",
}


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names."""
    return [*mixtral.gguf_expert_rules(), *llama.gguf_names(config)]


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return the sizes of the experts of the mixture."""
    if config.model_type == "hunyuan_v1_dense":
        return {}
    return mixtral.gguf_sizes(config, GGUF_FIELDS)


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    metadata=gguf_metadata,
    fields=GGUF_FIELDS,
)
