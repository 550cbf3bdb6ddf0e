"""ERNIE 4.5 mixtures (Baidu, 2025): softmax scores with a correction bias, shared experts,
interleaved RoPE."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Drop, Rule, Squeeze
from litft.families import deepseek, ernie4_5, llama
from litft.families.family import Family
from litft.model.config import Config


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' Ernie4_5_MoeConfig."""
    base = ernie4_5.config({"num_key_value_heads": 4, **hf, "head_dim": hf.get("head_dim")})
    fields = {
        "moe_intermediate_size": hf.get("moe_intermediate_size", 1536),
        "num_experts_per_tok": hf.get("moe_k", 6),
        "n_routed_experts": hf.get("moe_num_experts", 64),
        "n_shared_experts": hf.get("moe_num_shared_experts", 2),
    }
    # the smallest sum of the chosen experts' weights that they are divided by
    if hf.get("moe_norm_min", 0) > 1e-6:
        raise ValueError(
            f"config.json: moe_norm_min {hf['moe_norm_min']} is not supported; published models "
            "have 1e-12"
        )
    # DeepSeek V3's router, but the scores are a softmax
    experts = replace(deepseek.routed_experts(fields), scoring="softmax")
    interval = hf.get("moe_layer_interval", 1)
    start = hf.get("moe_layer_start_index", 1)
    end = hf.get("moe_layer_end_index", -1)
    # -1: up to the last layer
    if end == -1:
        end = len(base.layers) - 1
    kinds = []
    for number in range(len(base.layers)):
        is_sparse = (number + 1) % interval == 0 and start <= number <= end
        kinds.append("sparse" if is_sparse else "dense")
    # the head has a bias where the MLPs have one
    base = replace(base, head_bias=base.mlp_bias)
    return replace(
        base,
        layers=deepseek.sparse_layers(
            {"mlp_layer_types": kinds}, list(base.layers), experts
        ),
    )


def rules(config: Config) -> list[Rule]:
    """Return the rules for Llama's names."""
    bias = _bias("model.layers.{}.mlp.moe_statics.")
    # layers for multi-token prediction
    drop = Drop("model.mtp_{*}")
    return [drop, *deepseek.mixture_rules(config, bias=bias), *llama.rules(config)]


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for PEFT's names: in transformers' class, the bias is a part of the
    router."""
    return [_bias("model.layers.{}.mlp.gate.moe_statics."), *deepseek.peft_rules(config)]


def _bias(module: str) -> Squeeze:
    """Return the rule for the correction bias, which is stored as a matrix with one row."""
    stored = f"{module}e_score_correction_bias"
    return Squeeze(stored, "blocks.{}.mlp.correction_bias", (0,))


FAMILY = Family(
    model_types=("ernie4_5_moe",),
    config=config,
    rules=rules,
    peft_rules=peft_rules,
)
