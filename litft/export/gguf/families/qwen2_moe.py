"""GGUF files of Qwen 1.5 and 2 MoE."""

from typing import Any

from litft.checkpoints.rules import Reshape, Rule
from litft.export.gguf.families import llama, mixtral
from litft.export.gguf.families.family import GgufFamily
from litft.model.config import Config

GGUF = {
    "qwen2_moe": ("qwen2moe", "Qwen2MoeForCausalLM"),
    "qwen3_moe": ("qwen3moe", "Qwen3MoeForCausalLM"),
}
GGUF_FIELDS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names; experts are stacked."""
    return [*gguf_mixture_rules(), *llama.gguf_names(config)]


def gguf_mixture_rules() -> list[Rule]:
    """Return the rules for llama.cpp's names of the router, the experts, and the shared expert with
    its gate."""
    # llama.cpp stores the only row of the gate as a vector
    gate = Reshape(
        "blk.{}.ffn_gate_inp_shexp.weight",
        "blocks.{}.mlp.shared_gate.weight",
        (-1,),
        (1, -1),
    )
    return [gate, *mixtral.gguf_expert_rules()]


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return the sizes of the experts."""
    return mixtral.gguf_sizes(config, GGUF_FIELDS)


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Add what llama.cpp does without asking."""
    return hf | {"norm_topk_prob": hf["model_type"] == "qwen3_moe"}


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    config=gguf_config,
    metadata=gguf_metadata,
    fields=GGUF_FIELDS,
)
