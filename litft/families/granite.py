"""Granite 3 (IBM, 2024), dense and MoE, with and without windows, HyperCLOVA X: Llama with muP
scales of activations and logits (arXiv 2203.03466)."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rename, Rule, Split
from litft.families import llama, mixtral
from litft.families.family import Family
from litft.model.config import Config, ExpertsConfig, LayerConfig

# Granite with windows and sinks: defaults of transformers' GraniteSWAConfig and
# GraniteMoeSWAConfig
WINDOWED: dict[str, dict[str, Any]] = {
    "granite_swa": dict(
        num_key_value_heads=4,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        sliding_window=128,
    ),
    "granitemoe_swa": dict(sliding_window=128),
}


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' classes for these model
    types."""
    is_windowed = hf["model_type"] in WINDOWED
    if is_windowed:
        hf = {**WINDOWED[hf["model_type"]], **hf}
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
    layers = llama.changed_layers(base, experts=experts, attention_scale=scale)
    if is_windowed:
        layers = _windowed_layers(hf, replace(base, layers=layers))
    return replace(
        base,
        layers=layers,
        sinks=is_windowed,
        embed_scale=float(hf.get("embedding_multiplier", 1.0)),
        noise_after="lookup",
        residual_scale=float(hf.get("residual_multiplier", 1.0)),
        logit_scale=logit_scale,
        norm_position=norm_position,
    )


def _windowed_layers(hf: dict[str, Any], base: Config) -> tuple[LayerConfig, ...]:
    """Return layers of which three in four have a window; each has its own base of RoPE, 0 for
    none."""
    windows = llama.layer_windows(hf, lambda index: index % 4 != 0)
    layers = list(llama.windowed_layers(base, windows))
    thetas = layer_thetas(hf)
    if thetas is None:
        return tuple(layers)
    for number, theta in enumerate(thetas):
        rope = layers[number].rope
        assert rope is not None
        layers[number] = replace(
            layers[number], rope=replace(rope, theta=theta) if theta else None
        )
    return tuple(layers)


def layer_thetas(hf: dict[str, Any]) -> list[float] | None:
    """Return the base of RoPE of each layer, 0 for none; None where the file does not list them.

    Raises ValueError for a list of another length.
    """
    thetas = hf.get("layer_rope_theta")
    count = hf["num_hidden_layers"]
    if thetas is not None and len(thetas) != count:
        raise ValueError(
            f"config.json: layer_rope_theta must list {count} values, found {thetas!r:.300}"
        )
    return thetas


def rules(config: Config) -> list[Rule]:
    """Return the rules for Llama's names; experts are two stacked tensors."""
    if config.sinks:
        sinks = Rename("model.layers.{}.self_attn.sinks", "blocks.{}.attention.sinks")
        # their files have transformers' names in memory
        return [sinks, *peft_rules(config), *rules(replace(config, sinks=False))]
    if not config.layers[0].experts:
        # HyperCLOVA X has these; in other models the rules match nothing
        post_norms = {"attention_post_norm": "post_norm1", "mlp_post_norm": "post_norm2"}
        return [*llama.rules(config), *llama.rename_modules(post_norms)]
    moe_prefix = "model.layers.{}.block_sparse_moe."
    router = Rename(moe_prefix + "router.layer.weight", "blocks.{}.mlp.router.weight")
    shared_prefix = "model.layers.{}.shared_mlp."
    shared_dim = config.layers[0].experts.shared_dim
    # gate and up of the shared expert are one tensor
    shared = (
        "blocks.{}.mlp.shared.gate_proj.weight",
        "blocks.{}.mlp.shared.up_proj.weight",
    )
    stacks = mixtral.fused_experts(
        config, moe_prefix, "output_linear.weight", "input_linear.weight"
    )
    return [
        *llama.rules(config),
        router,
        Split(f"{shared_prefix}input_linear.weight", shared, (shared_dim,) * 2),
        Rename(
            f"{shared_prefix}output_linear.weight", "blocks.{}.mlp.shared.down_proj.weight"
        ),
        *stacks,
    ]


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for PEFT's names of experts and router."""
    if not config.layers[0].experts:
        return []
    moe_prefix = "model.layers.{}.block_sparse_moe."
    router = Rename(moe_prefix + "router.weight", "blocks.{}.mlp.router.weight")
    return [router, *mixtral.fused_experts(config, moe_prefix + "experts.")]


FAMILY = Family(
    model_types=("granite", "hyperclovax", "granitemoe", "granitemoeshared", *WINDOWED),
    config=config,
    rules=rules,
    peft_rules=peft_rules,
)
