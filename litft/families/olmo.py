"""OLMo 1, 2, 3, OLMoE and FlexOlmo (arXiv 2402.00838, 2501.00656, 2409.02060, 2507.07024).

OLMo 1 has weightless norms; OLMo 2, 3 and FlexOlmo have norms after attention and MLP.
"""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rename, Rule
from litft.families import llama, mixtral
from litft.families.family import Family
from litft.model.config import Config, ExpertsConfig, NormConfig
from litft.model.rope_config import RopeConfig


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of OlmoConfig, Olmo2Config, Olmo3Config or
    OlmoeConfig."""
    model_type = hf["model_type"]
    nested = llama.ropes_by_type(hf)
    is_flex = model_type == "flex_olmo"
    max_positions = 4096 if model_type in ("olmoe", "flex_olmo") else 2048
    hf = {
        "rms_norm_eps": 1e-6 if is_flex else 1e-5,
        "sliding_window": 4096,
        "max_position_embeddings": max_positions,
        **hf,
    }
    theta = 5e5 if is_flex or model_type == "olmo3" else 1e4
    if model_type == "olmo3":
        _check_olmo3_ropes(hf, nested)
    # with one set for each kind of layer, `_olmo3_layer` reads them
    if nested:
        base = llama.config({**hf, "rope_parameters": None, "rope_scaling": None}, theta)
    else:
        base = llama.config(hf, theta)
    base = replace(base, mlp_bias=False, qkv_clip=hf.get("clip_qkv"))
    if model_type == "olmo":
        # OLMo 1 has norms without any weight
        return replace(base, norm=NormConfig("layer", 1e-5, weight=False))
    base = replace(base, qk_norm=base.norm, qk_norm_over="all")
    if model_type in ("olmoe", "flex_olmo"):
        defaults = dict(num_experts=64, num_experts_per_tok=8)
        if is_flex:
            base = replace(base, norm_position="after", qkv_clip=None)
            defaults = dict(num_experts=7, num_experts_per_tok=5)
        hf = {**defaults, **hf}
        experts = ExpertsConfig(
            hf["num_experts"],
            hf["num_experts_per_tok"],
            base.hidden_dim,
            renormalize=hf.get("norm_topk_prob", False),
        )
        return replace(base, layers=llama.changed_layers(base, experts=experts))
    # OLMo 2 and 3 ignore clip_qkv
    base = replace(base, norm_position="after", qkv_clip=None)
    if model_type == "olmo2":
        return base
    windows = llama.layer_windows(hf, lambda index: (index + 1) % 4 != 0)
    return replace(
        base, layers=tuple(_olmo3_layer(base, hf, nested, window) for window in windows)
    )


def _check_olmo3_ropes(hf: dict[str, Any], nested: dict[str, Any]) -> None:
    """Raise ValueError for scaled `rope_parameters` of all layers: OLMo 3 scales only those with
    full attention, and transformers ignores such parameters."""
    llama.check_rope_type(hf)
    parameters = hf.get("rope_parameters") or {}
    rope_type = parameters.get("rope_type", "default")
    if not nested and rope_type != "default":
        raise ValueError(
            f"config.json: rope_parameters with rope_type {rope_type!r} name no kind of layer; put "
            "them under full_attention, or into rope_scaling"
        )


def _olmo3_layer(
    base: Config, hf: dict[str, Any], nested: dict[str, Any], window: int | None
) -> Any:
    """Return a layer of OLMo 3, which scales RoPE only in layers with full attention."""
    layer = base.layers[0]
    # as written by transformers 5; older files have one base, and scale only full attention
    if nested:
        if window is None:
            # rope_scaling is added by hand
            full = nested.get("full_attention") or {}
            parameters = {**full, **(hf.get("rope_scaling") or {})}
        else:
            parameters = nested.get("sliding_attention")
        hf = {**hf, "rope_scaling": None}
        rope = RopeConfig.from_hf({**hf, "rope_parameters": parameters}, base.head_dim, 5e5)
    else:
        if window is None:
            rope = layer.rope
        else:
            rope = RopeConfig.from_hf({**hf, "rope_scaling": None}, base.head_dim, 5e5)
    return replace(layer, window=window, rope=rope)


def rules(config: Config) -> list[Rule]:
    """Return the rules for Llama's names; OLMo 2 and 3 have norms after attention and MLP, OLMoE
    separate experts."""
    norms = llama.NORMS
    if config.norm_position == "after":
        # OLMo 2 and 3 have norms after attention and MLP only
        norms = {
            "attention_post_norm": "post_attention_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
    dense_rules = [
        *llama.embedding_and_head(config),
        *llama.rename_modules(llama.ATTENTION | llama.QK_NORMS | llama.MLP | norms),
    ]
    if not config.layers[0].experts:
        return dense_rules
    router = Rename("model.layers.{}.mlp.gate.weight", "blocks.{}.mlp.router.weight")
    return [
        *dense_rules,
        router,
        *mixtral.stacked_experts(
            config, "model.layers.{}.mlp.experts.{}.", llama.PROJECTIONS
        ),
    ]


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for PEFT's names of experts and router."""
    return mixtral.peft_rules(config)


FAMILY = Family(
    model_types=("olmo", "olmo2", "olmo3", "olmoe", "flex_olmo"),
    config=config,
    rules=rules,
    peft_rules=peft_rules,
)
