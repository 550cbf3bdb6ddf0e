"""GGUF files of GLM-4.5 to 4.7."""

from typing import Any

from litft.checkpoints.rules import Rule
from litft.export.gguf.families import deepseek, llama, mixtral
from litft.export.gguf.families.family import GgufFamily
from litft.model.config import Config

GGUF = {
    "glm4_moe": ("glm4moe", "Glm4MoeForCausalLM"),
    "dots1": ("dots1", "Dots1ForCausalLM"),
    "exaone_moe": ("exaone-moe", "ExaoneMoeForCausalLM"),
}
GGUF_FIELDS = deepseek.GGUF_EXPERTS | llama.GGUF_WINDOWS
GGUF_TENSORS = {"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"}


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names."""
    is_glm = config.model_type == "glm4_moe"
    norms = llama.GGUF_NORMS | ({"mlp_norm": "post_attention_norm"} if is_glm else {})
    names = llama.GGUF_ATTENTION | llama.GGUF_QK_NORMS | llama.GGUF_MLP | norms
    return [*deepseek.gguf_mixture_rules(), *llama.gguf_names(config, names)]


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return the sizes of the experts, and K-EXAONE's windows; raise ValueError for what
    llama.cpp's code does not have."""
    metadata = deepseek.gguf_experts(config)
    keep = "keep the Hugging Face folder"
    if config.model_type == "dots1" and config.n_kv_heads != config.n_heads:
        raise ValueError(f"llama.cpp's architecture dots1 has no shared key heads; {keep}")
    if config.model_type == "dots1" and config.qkv_bias:
        raise ValueError(
            f"llama.cpp's architecture dots1 has no biases of attention; {keep}"
        )
    if config.model_type != "glm4_moe" and not metadata["expert_shared_count"]:
        raise ValueError(
            f"llama.cpp's architecture for {config.model_type} needs a shared expert; {keep}"
        )
    if config.model_type != "exaone_moe":
        return metadata
    return (
        metadata
        | mixtral.gguf_sizes(config, ["expert_shared_feed_forward_length"])
        | llama.gguf_windows(config)
    )


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json, in which K-EXAONE has other names for two fields."""
    hf = {
        name: value
        for name, value in llama.gguf_layer_types(hf).items()
        if name != "scoring_func"
    }
    if hf["model_type"] == "exaone_moe":
        hf |= {
            "num_experts": hf.pop("n_routed_experts"),
            "num_shared_experts": hf.pop("n_shared_experts"),
        }
    return hf


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    config=gguf_config,
    metadata=gguf_metadata,
    fields=GGUF_FIELDS,
    tensors=GGUF_TENSORS,
)
