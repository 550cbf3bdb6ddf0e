"""Qwen 1.5 and 2 MoE (arXiv 2407.10671), with a gated shared expert, and Qwen 3 MoE (arXiv
2505.09388), without one."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rename, Rule, Split
from litft.families import llama, mixtral
from litft.families.family import Family, ShapeOf
from litft.model.config import Config, ExpertsConfig

DEFAULTS = {
    "qwen2_moe": dict(
        num_key_value_heads=16,
        max_window_layers=28,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        num_experts_per_tok=4,
        num_experts=60,
        qkv_bias=True,
    ),
    "qwen3_moe": dict(
        num_key_value_heads=4,
        moe_intermediate_size=768,
        num_experts_per_tok=8,
        num_experts=128,
    ),
}


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' Qwen2MoeConfig and
    Qwen3MoeConfig."""
    has_shared_expert = hf["model_type"] == "qwen2_moe"
    hf = {
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        **DEFAULTS[hf["model_type"]],
        **hf,
    }
    # files have the size of the window even where it is switched off
    if not hf.get("use_sliding_window", False):
        hf["sliding_window"] = None
    if not has_shared_expert:
        # Qwen 3 MoE has the same attention in all layers
        hf["layer_types"] = None
    base = llama.config(hf)
    windows = llama.layer_windows(
        hf,
        lambda index: (
            not has_shared_expert or (index % 2 == 0 and index < hf["max_window_layers"])
        ),
    )
    by_layer = layer_experts(hf, has_shared_expert)
    layers = []
    for layer, experts in zip(llama.windowed_layers(base, windows), by_layer, strict=True):
        layers.append(replace(layer, experts=experts))
    base = replace(base, layers=tuple(layers))
    if has_shared_expert:
        return replace(base, qkv_bias=hf["qkv_bias"], o_bias=False)
    return replace(base, qk_norm=base.norm)


def layer_experts(
    hf: dict[str, Any], has_shared_expert: bool
) -> list[ExpertsConfig | None]:
    """Return the experts of each layer, None for dense layers."""
    shared_dim = hf["shared_expert_intermediate_size"] if has_shared_expert else 0
    experts = ExpertsConfig(
        hf.get("num_local_experts", hf["num_experts"]),  # the name in transformers 5
        hf["num_experts_per_tok"],
        llama.one_size(hf, "moe_intermediate_size"),
        renormalize=hf.get("norm_topk_prob", False),
        shared_dim=shared_dim,
        shared_gate=has_shared_expert,
    )
    # layers are dense if they are listed, or between two multiples of the step
    dense_layers = hf.get("mlp_only_layers") or []
    step = hf.get("decoder_sparse_step", 1)
    by_layer: list[ExpertsConfig | None] = []
    for number in range(hf["num_hidden_layers"]):
        is_sparse = (
            number not in dense_layers and (number + 1) % step == 0 and experts.count
        )
        by_layer.append(experts if is_sparse else None)
    return by_layer


def rules(config: Config, model: str = "model.") -> list[Rule]:
    """Return the rules for Llama's names, with separately stored experts. model: the prefix of all
    names but the head's."""
    layers = f"{model}layers.{{}}."
    names = {"mlp.router": "mlp.gate", "mlp.shared_gate": "mlp.shared_expert_gate"}
    names |= llama.mlp_names("mlp.shared", "mlp.shared_expert")
    stacks = mixtral.stacked_experts(
        config, f"{layers}mlp.experts.{{}}.", llama.PROJECTIONS
    )
    return [*llama.rules(config, model), *llama.rename_modules(names, layers), *stacks]


def experts_of_qwen3_vl(config: Config, shape: ShapeOf) -> list[Rule]:
    """Return the rules for the experts of Qwen 3 VL.

    Published files store them as (E, C, 2 I) and (E, I, C), transformers 5 writes (E, 2 I, C) and
    (E, C, I).
    """
    experts = mixtral.experts_of(config)
    if experts is None:
        return []
    stored = "model.layers.{}.mlp.experts."
    first = next(number for number, layer in enumerate(config.layers) if layer.experts)
    name = f"model.language_model.layers.{first}.mlp.experts."
    # if one of the two is square, the other is not
    if shape(f"{name}down_proj") == (
        experts.count,
        config.dim,
        experts.hidden_dim,
    ) and shape(f"{name}gate_up_proj") == (
        experts.count,
        2 * experts.hidden_dim,
        config.dim,
    ):
        return mixtral.fused_experts(config, stored)
    ours = "blocks.{}.mlp.experts."
    gate_up = (f"{ours}gate_proj.weight", f"{ours}up_proj.weight")
    widths = (experts.hidden_dim, experts.hidden_dim)
    return [
        Split(f"{stored}gate_up_proj", gate_up, widths, transposed=True),
        Rename(f"{stored}down_proj", f"{ours}down_proj.weight", transposed=True),
    ]


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for PEFT's names of experts and router."""
    return mixtral.peft_rules(config)


FAMILY = Family(
    model_types=("qwen2_moe", "qwen3_moe"),
    config=config,
    rules=rules,
    peft_rules=peft_rules,
)
