"""GGUF files of Gemma 1, 2 and 3."""

from typing import Any

from litft.checkpoints.rules import Rename, Rule, Shift
from litft.export.gguf.families import llama
from litft.export.gguf.families.family import GgufFamily
from litft.model.config import Config

GGUF = {
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3_text": ("gemma3", "Gemma3ForCausalLM"),
}


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp, which stores norm weights plus 1."""
    post_norms = {
        "attention_post_norm": "post_attention_norm",
        "mlp_post_norm": "post_ffw_norm",
    }
    rules = llama.gguf_names(
        config,
        llama.GGUF_ATTENTION
        | llama.GGUF_QK_NORMS
        | llama.GGUF_MLP
        | llama.GGUF_NORMS
        | post_norms,
    )
    # of two rules for a tensor the first one applies, so these replace the plain ones below
    norms = []
    for rule in rules:
        if isinstance(rule, Rename) and rule.name.endswith("norm.weight"):
            norms.append(rule)
    return [*(Shift(rule.hf_name, rule.name, 1.0) for rule in norms), *rules]


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Add the fields that llama.cpp infers from the architecture; the largest models have another
    attention scale."""
    is_gemma1 = hf["model_type"] == "gemma"
    is_gemma3 = hf["model_type"] == "gemma3_text"
    activation = {"hidden_activation": "gelu_pytorch_tanh"}
    if is_gemma1:
        return {**hf, **activation, "hidden_act": "gelu_pytorch_tanh"}
    # Gemma 3 27B, Gemma 2 27B
    is_largest = hf["num_hidden_layers"] == (62 if is_gemma3 else 46)
    if is_largest:
        scalar = hf["hidden_size"] // hf["num_attention_heads"]
    else:
        scalar = hf["head_dim"]
    if is_gemma3:
        local = {"rope_local_base_freq": 1e4, "sliding_window_pattern": 6}
    else:
        local = {}
    return {**local, **hf, **activation, "query_pre_attn_scalar": scalar}


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    config=gguf_config,
)
