"""Granite 3 (IBM, 2024), dense and MoE, HyperCLOVA X: Llama with muP scales of activations and
logits (arXiv 2203.03466)."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rename, Rule, Split
from litft.families import llama, mixtral
from litft.families.family import Family
from litft.model.config import Config, ExpertsConfig


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' classes for these model
    types."""
    base = llama.config(hf)
    is_hyperclova = hf["model_type"] == "hyperclovax"
    experts = None
    # 0: the dense models of Granite 4 have the model type of its mixtures
    if hf["model_type"].startswith("granitemoe") and hf.get("num_local_experts", 8):
        experts = ExpertsConfig(
            hf.get("num_local_experts", 8),
            hf.get("num_experts_per_tok", 2),
            base.hidden_dim,
            renormalize=True,
            shared_dim=hf.get("shared_intermediate_size", 0),
        )
    # null: HyperCLOVA X has the usual scale, Granite none
    default_scale = base.head_dim**-0.5 if is_hyperclova else 1.0
    scale = float(hf.get("attention_multiplier") or default_scale)
    # HyperCLOVA X multiplies logits by it, Granite divides them by it
    logit_scale = hf.get("logits_scaling", 1.0)
    if not is_hyperclova:
        logit_scale = 1.0 / logit_scale
    has_post_norm = is_hyperclova and hf.get("use_post_norm", True)
    norm_position = "both" if has_post_norm else "before"
    return replace(
        base,
        layers=llama.changed_layers(base, experts=experts, attention_scale=scale),
        embed_scale=float(hf.get("embedding_multiplier", 1.0)),
        residual_scale=float(hf.get("residual_multiplier", 1.0)),
        logit_scale=logit_scale,
        norm_position=norm_position,
    )


def rules(config: Config) -> list[Rule]:
    """Return the rules for Llama's names; experts are two stacked tensors."""
    if not config.layers[0].experts:
        # HyperCLOVA X has these; in other models the rules match nothing
        post_norms = {"attention_post_norm": "post_norm1", "mlp_post_norm": "post_norm2"}
        return [*llama.rules(config), *llama.rename_modules(post_norms)]
    moe_prefix = "model.layers.{}.block_sparse_moe."
    router = Rename(moe_prefix + "router.layer.weight", "blocks.{}.mlp.router.weight")
    shared_prefix = "model.layers.{}.shared_mlp."
    shared_dim = config.layers[0].experts.shared_dim
    # gate and up of the shared expert are one tensor
    shared = ("blocks.{}.mlp.shared.gate_proj.weight", "blocks.{}.mlp.shared.up_proj.weight")
    return [
        *llama.rules(config),
        router,
        Split(f"{shared_prefix}input_linear.weight", shared, (shared_dim,) * 2),
        Rename(f"{shared_prefix}output_linear.weight", "blocks.{}.mlp.shared.down_proj.weight"),
        *mixtral.fused_experts(config, moe_prefix, "output_linear.weight", "input_linear.weight"),
    ]


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for PEFT's names of experts and router."""
    if not config.layers[0].experts:
        return []
    moe_prefix = "model.layers.{}.block_sparse_moe."
    router = Rename(moe_prefix + "router.weight", "blocks.{}.mlp.router.weight")
    return [router, *mixtral.fused_experts(config, moe_prefix + "experts.")]


FAMILY = Family(
    model_types=("granite", "hyperclovax", "granitemoe", "granitemoeshared"),
    config=config,
    rules=rules,
    peft_rules=peft_rules,
)
