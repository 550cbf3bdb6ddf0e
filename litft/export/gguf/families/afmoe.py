"""GGUF files of Trinity."""

from typing import Any

from litft.checkpoints.rules import Rule
from litft.export.gguf.families import deepseek, llama
from litft.export.gguf.families.family import GgufFamily
from litft.model.config import Config

GGUF = {"afmoe": ("afmoe", "AfmoeForCausalLM")}
GGUF_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "num_shared_experts",
    "expert_weights_norm": "route_norm",
    "expert_weights_scale": "route_scale",
    "leading_dense_block_count": "num_dense_layers",
}
GGUF_FIELDS = GGUF_EXPERTS | llama.GGUF_WINDOWS
# llama.cpp rotates no queries and keys in each fourth layer
STEP = 4


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names."""
    names = {
        "attention.gate_proj": "attn_gate",
        "attention_post_norm": "post_attention_norm",
        "mlp_post_norm": "post_ffw_norm",
    }
    names |= llama.GGUF_ATTENTION | llama.GGUF_QK_NORMS | llama.GGUF_MLP | llama.GGUF_NORMS
    return [*deepseek.gguf_mixture_rules(), *llama.gguf_names(config, names)]


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return the sizes of the experts, and which layers have windows; raise ValueError for a
    pattern unlike Trinity's."""
    if any(
        (layer.window is None) != ((n + 1) % STEP == 0)
        for n, layer in enumerate(config.layers)
    ):
        raise ValueError(
            f"llama.cpp reads afmoe with full attention in each {STEP}th layer only; keep the "
            "Hugging Face folder"
        )
    return deepseek.gguf_experts(config, GGUF_EXPERTS) | llama.gguf_windows(config)


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json; llama.cpp always scales the embedding."""
    return llama.gguf_layer_types(hf) | {"mup_enabled": True}


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    config=gguf_config,
    metadata=gguf_metadata,
    fields=GGUF_FIELDS,
)
