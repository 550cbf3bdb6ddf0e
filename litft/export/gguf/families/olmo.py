"""GGUF files of OLMo 1, 2, 3, OLMoE and FlexOlmo."""

from typing import Any

from litft.checkpoints.rules import Rule
from litft.export.gguf.families import llama, mixtral
from litft.export.gguf.families.family import GgufFamily
from litft.model.config import Config

GGUF = {
    "olmo": ("olmo", "OlmoForCausalLM"),
    "olmo2": ("olmo2", "Olmo2ForCausalLM"),
    "olmo3": ("olmo2", "Olmo3ForCausalLM"),
    "olmoe": ("olmoe", "OlmoeForCausalLM"),
}
GGUF_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
GGUF_FIELDS = {"attention.clamp_kqv": "clip_qkv"} | GGUF_EXPERTS | llama.GGUF_WINDOWS


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names; rows of OLMo 1's queries and keys are in another
    order, as Llama's."""
    if config.model_type == "olmo":
        return llama.gguf_rules(config)
    names = llama.GGUF_NORMS | {
        "attention_post_norm": "post_attention_norm",
        "mlp_post_norm": "post_ffw_norm",
    }
    names |= llama.GGUF_ATTENTION | llama.GGUF_QK_NORMS | llama.GGUF_MLP
    return [*mixtral.gguf_expert_rules(), *llama.gguf_names(config, names)]


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return the number of experts of OLMoE, OLMo 3's windows, and OLMo 1's limit of queries, keys
    and values."""
    if config.model_type == "olmo":
        if config.qkv_clip:
            return {"attention.clamp_kqv": float(config.qkv_clip)}
        return {}
    if config.model_type == "olmo3":
        return llama.gguf_windows(config)
    if config.model_type == "olmo2":
        return {}
    if config.n_kv_heads != config.n_heads:
        raise ValueError(
            "llama.cpp's architecture olmoe has no shared key heads; keep the Hugging Face folder"
        )
    return mixtral.gguf_sizes(config, GGUF_EXPERTS)


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json; llama.cpp's architecture is the same for OLMo 2 and OLMo 3, which has
    windows."""
    if hf["model_type"] == "olmo2" and hf.get("sliding_window"):
        hf |= {
            "model_type": "olmo3",
            "architectures": [GGUF["olmo3"][1]],
        } | llama.gguf_ropes(hf)
    return llama.gguf_layer_types(hf)


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    config=gguf_config,
    metadata=gguf_metadata,
    fields=GGUF_FIELDS,
)
