"""GGUF files of MiniMax M2."""

from typing import Any

from litft.checkpoints.rules import Rule
from litft.export.gguf.families import deepseek, llama
from litft.export.gguf.families.family import GgufFamily
from litft.model.config import Config

GGUF = {"minimax_m2": ("minimax-m2", "MiniMaxM2ForCausalLM")}
GGUF_FIELDS = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "intermediate_size",
    "expert_gating_func": "scoring_func",
    "rope.dimension_count": "rotary_dim",
}


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names."""
    return [*deepseek.gguf_mixture_rules(), *llama.gguf_names(config)]


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return the sizes of the experts."""
    return deepseek.gguf_experts(config, GGUF_FIELDS)


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the function of its router."""
    return {
        name: value for name, value in hf.items() if name != "partial_rotary_factor"
    } | {"scoring_func": "sigmoid"}


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    config=gguf_config,
    metadata=gguf_metadata,
    fields=GGUF_FIELDS,
)
