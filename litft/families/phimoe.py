"""Phi-3.5-MoE (arXiv 2404.14219): Mixtral with SparseMixer routing, LayerNorm and biases."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rename, Rule
from litft.families import llama, mixtral
from litft.families.family import Family
from litft.model.config import Config, ExpertsConfig, NormConfig


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' PhimoeConfig."""
    hf = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        **hf,
    }
    key = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    scaling = dict(hf.get(key) or {})
    # the factors of short and long texts; RopeConfig has one
    short = scaling.pop("short_mscale", None)
    long = scaling.pop("long_mscale", None)
    if short != long:
        raise ValueError(
            f"config.json: short_mscale {short!r} and long_mscale {long!r} must be equal"
        )
    if short:
        hf = {**hf, key: {**scaling, "attention_factor": short}}
    base = llama.config(hf, rope_theta=1e6)
    top_k = hf.get("num_experts_per_tok", 2)
    if top_k != 2:
        raise ValueError(
            f"config.json: num_experts_per_tok {top_k} is not supported; SparseMixer selects 2"
        )
    experts = ExpertsConfig(
        hf.get("num_local_experts", 16),
        top_k,
        base.hidden_dim,
        renormalize=False,
        scoring="sparsemixer",
        jitter=hf.get("router_jitter_noise", 0.01),
    )
    window = hf.get("sliding_window")
    return replace(
        base,
        layers=llama.changed_layers(base, experts=experts, window=window),
        norm=NormConfig("layer", base.norm.eps, bias=True),
        head_bias=hf.get("lm_head_bias", False),
    )


def rules(config: Config) -> list[Rule]:
    """Return the rules for Mixtral's names."""
    return mixtral.rules(config)


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for PEFT's names of experts and router."""
    router = Rename("model.layers.{}.mlp.router.weight", "blocks.{}.mlp.router.weight")
    return [router, *mixtral.fused_experts(config, "model.layers.{}.mlp.experts.")]


FAMILY = Family(
    model_types=("phimoe",),
    config=config,
    rules=rules,
    peft_rules=peft_rules,
)
