"""GGUF files of Cohere's Command-R, R+, R7B and A, Aya."""

from typing import Any

from litft.checkpoints.rules import Rule
from litft.export.gguf.families import deepseek, llama
from litft.export.gguf.families.family import GgufFamily
from litft.model.config import Config

GGUF = {
    "cohere": ("command-r", "CohereForCausalLM"),
    "cohere2": ("cohere2", "Cohere2ForCausalLM"),
    "cohere2_moe": ("cohere2moe", "Cohere2MoeForCausalLM"),
}
GGUF_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "expert_dim",
    "expert_shared_count": "num_shared_experts",
    "expert_weights_norm": "norm_topk_prob",
    "expert_gating_func": "expert_selection_fn",
    "leading_dense_block_count": "first_k_dense_replace",
}
GGUF_TENSORS = {"use_qk_norm": "attn_q_norm.weight"}
# layers from which llama.cpp expects norms of queries and keys (Command R+)
LARGE = 64
GGUF_FIELDS = {
    "logit_scale": "logit_scale",
    "attention.layer_norm_epsilon": "layer_norm_eps",
}
GGUF_FIELDS |= GGUF_EXPERTS | llama.GGUF_WINDOWS


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names; raise ValueError for norms that it decides by the
    number of layers."""
    depth = len(config.layers)
    if config.model_type == "cohere" and bool(config.qk_norm) != (depth >= LARGE):
        reason = (
            f"llama.cpp norms queries and keys of Cohere models from {LARGE} layers on, and this "
            f"model has {depth}"
        )
        raise ValueError(f"{reason}; keep the Hugging Face folder")
    # attention and MLP share one norm
    names = (
        llama.GGUF_ATTENTION
        | llama.GGUF_QK_NORMS
        | llama.GGUF_MLP
        | {"attention_norm": "attn_norm"}
    )
    return [*deepseek.gguf_mixture_rules(), *llama.gguf_names(config, names)]


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return the scale of the logits, the sizes of a mixture's experts, and which layers have
    windows."""
    scale = {"logit_scale": float(config.logit_scale)}
    if config.model_type != "cohere2_moe":
        return scale
    dense = next((layer for layer in config.layers if not layer.experts), None)
    if dense and dense.hidden_dim:
        width = {"feed_forward_length": dense.hidden_dim}
    else:
        width = {}
    return (
        scale
        | deepseek.gguf_experts(config, GGUF_EXPERTS)
        | llama.gguf_windows(config)
        | width
    )


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of a mixture with the kinds of its layers, and the widths of its MLPs."""
    if hf["model_type"] != "cohere2_moe":
        return hf
    # llama.cpp has numbers for these functions
    if hf.get("expert_selection_fn") == deepseek.SOFTMAX:
        scoring = "softmax"
    else:
        scoring = "sigmoid"
    # the width in the metadata is that of the dense layers
    widths = {
        "prefix_dense_intermediate_size": hf["intermediate_size"],
        "intermediate_size": hf.pop("expert_dim"),
    }
    return (
        llama.gguf_layer_types(hf)
        | {"expert_selection_fn": scoring, "rms_norm_eps": hf.get("rms_norm_eps")}
        | widths
    )


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    config=gguf_config,
    metadata=gguf_metadata,
    fields=GGUF_FIELDS,
    tensors=GGUF_TENSORS,
)
