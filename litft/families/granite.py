"""Granite 3 (IBM, 2024), dense and MoE: Llama with muP scales of activations and logits (arXiv 2203.03466)."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.conversion import Rename, Rule
from litft.families import llama, mixtral
from litft.model.config import Config, ExpertsConfig

MODEL_TYPES = ("granite", "granitemoe")


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' GraniteConfig and GraniteMoeConfig."""
    base = llama.config(hf)
    experts = None
    if hf["model_type"] == "granitemoe":
        experts = ExpertsConfig(
            hf.get("num_local_experts", 8), hf.get("num_experts_per_tok", 2), base.hidden_dim, renormalize=True
        )
    scale = float(hf.get("attention_multiplier", 1.0))
    return replace(
        base,
        layers=tuple(replace(layer, experts=experts, attention_scale=scale) for layer in base.layers),
        embed_scale=float(hf.get("embedding_multiplier", 1.0)),
        residual_scale=float(hf.get("residual_multiplier", 1.0)),
        logit_scale=1.0 / hf.get("logits_scaling", 1.0),
    )


def rules(config: Config) -> list[Rule]:
    """Return the rules for Llama's names; experts are two stacked tensors."""
    if config.model_type == "granite":
        return llama.rules(config)
    moe_prefix = "model.layers.{}.block_sparse_moe."
    router = Rename(moe_prefix + "router.layer.weight", "blocks.{}.mlp.router.weight")
    return [
        *llama.rules(config),
        router,
        *mixtral.fused_experts(config, moe_prefix, "output_linear.weight", "input_linear.weight"),
    ]


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for PEFT's names of experts and router."""
    if config.model_type == "granite":
        return []
    moe_prefix = "model.layers.{}.block_sparse_moe."
    router = Rename(moe_prefix + "router.weight", "blocks.{}.mlp.router.weight")
    return [router, *mixtral.fused_experts(config, moe_prefix + "experts.")]
