"""DeepSeek V2 and V3 (arXiv 2405.04434, 2412.19437), Moonlight, GLM-4.7-Flash, MiniCPM3, Youtu,
Mistral 4: latent attention.

Their mixtures select experts by sigmoid scores within groups, with a correction bias; other
families use `routed_experts`.
"""

import math
from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rename, Rule
from litft.families import llama, mixtral
from litft.families.family import Family
from litft.model.config import Config, ExpertsConfig, LatentConfig, LayerConfig, NormConfig

# transformers' defaults, where they differ from those of the functions below
DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": dict(
        first_k_dense_replace=0,
        n_routed_experts=64,
        n_shared_experts=2,
        moe_intermediate_size=1407,
    ),
    "deepseek_v3": dict(
        first_k_dense_replace=3,
        n_routed_experts=256,
        n_group=8,
        topk_group=4,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        routed_scaling_factor=2.5,
        max_position_embeddings=4096,
    ),
    "sarvam_mla": dict(
        first_k_dense_replace=1,
        n_routed_experts=128,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        routed_scaling_factor=2.5,
        q_lora_rank=None,
        max_position_embeddings=4096,
    ),
    "glm4_moe_lite": dict(
        n_routed_experts=64,
        num_experts_per_tok=4,
        moe_intermediate_size=1536,
        routed_scaling_factor=1.8,
        q_lora_rank=768,
        qk_nope_head_dim=192,
        v_head_dim=256,
        rms_norm_eps=1e-5,
        max_position_embeddings=202752,
    ),
    "mistral4": dict(
        first_k_dense_replace=0,
        n_routed_experts=128,
        num_experts_per_tok=4,
        moe_intermediate_size=2048,
        kv_lora_rank=256,
        q_lora_rank=1024,
        qk_nope_head_dim=64,
        max_position_embeddings=1048576,
    ),
    "minicpm3": dict(
        kv_lora_rank=256,
        q_lora_rank=768,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=None,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        max_position_embeddings=32768,
    ),
    "youtu": dict(tie_word_embeddings=True, max_position_embeddings=131072),
}

# Mistral 4's RoPE if the file does not specify it
MISTRAL4_YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=128.0,
    original_max_position_embeddings=8192,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
)


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' classes for these model
    types."""
    model_type = hf["model_type"]
    hf = {"kv_lora_rank": 512, "q_lora_rank": 1536, **DEFAULTS[model_type], **hf}
    if model_type == "mistral4":
        hf = _with_rope_of_mistral4(hf)
    latent = latent_config(hf)
    # transformers would rotate `head_dim` entries
    head_dim = hf.get("head_dim")
    if head_dim not in (None, latent.rope_dim, latent.head_dim):
        raise ValueError(
            f"config.json: head_dim {head_dim} contradicts qk_rope_head_dim {latent.rope_dim} and "
            f"qk_nope_head_dim {latent.nope_dim}; remove head_dim"
        )
    # latent attention computes keys and values for every head; RoPE rotates a part of a head
    base = llama.config({**hf, "num_key_value_heads": None, "head_dim": latent.rope_dim})
    layer = replace(
        base.layers[0],
        latent=latent,
        attention_scale=latent.head_dim**-0.5 * yarn_scale(hf),
    )
    base = replace(
        base, rope_interleaved=hf.get("rope_interleave", model_type != "minicpm3")
    )
    # models without experts
    if model_type in ("minicpm3", "youtu"):
        base = replace(base, layers=(layer,) * len(base.layers))
        if model_type == "minicpm3":
            return _with_mup_scales(base, hf)
        return base
    # V2 scores by softmax, without a correction, and ranks a group by its best expert; V3 by the
    # sum of its two best ones
    if model_type == "deepseek_v2":
        default = {
            "scoring": "softmax",
            "correction_bias": False,
            "renormalize": False,
            "group_score": "max",
        }
    else:
        default = {"group_score": "top2"}
    # Mistral 4: by softmax, without a correction, otherwise as V3
    if model_type == "mistral4":
        default |= {"scoring": "softmax", "correction_bias": False}
    # greedy: the best experts of all, although the file may name groups
    if model_type == "deepseek_v2" and hf.get("topk_method", "greedy") == "greedy":
        hf["n_group"] = None
    experts = replace(routed_experts(hf), **default)
    return replace(
        base, mlp_bias=False, layers=sparse_layers(hf, [layer] * len(base.layers), experts)
    )


def _with_rope_of_mistral4(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with Mistral 4's default RoPE, and without the share of a whole head that
    is rotated: the rotated part of latent attention is rotated whole."""
    if not llama.names_rope(hf):
        hf = {**hf, "rope_parameters": MISTRAL4_YARN}
    kept = {}
    for name, value in hf.items():
        if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            value = {
                key: part for key, part in value.items() if key != "partial_rotary_factor"
            }
        if name != "partial_rotary_factor":
            kept[name] = value
    return kept


def latent_config(hf: dict[str, Any]) -> LatentConfig:
    """Return the sizes of latent attention; the norms' epsilon is fixed in transformers."""
    # null: MiniCPM3's values have the size of a usual head
    value_dim = hf.get("v_head_dim", 128) or hf["hidden_size"] // hf["num_attention_heads"]
    nope = hf.get("qk_nope_head_dim", 128)
    rope = hf.get("qk_rope_head_dim", 64)
    return LatentConfig(
        hf["kv_lora_rank"],
        hf["q_lora_rank"],
        nope,
        rope,
        value_dim,
        NormConfig("rms", 1e-6),
    )


def yarn_scale(hf: dict[str, Any]) -> float:
    """Return the factor of attention scores for scaled RoPE with `mscale_all_dim`."""
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    is_scaled = (
        scaling.get("rope_type", scaling.get("type", "default")) != "default"
        and scaling.get("factor", 1) > 1
    )
    mscale = scaling.get("mscale_all_dim") or 0
    if mscale and is_scaled:
        # squared: once for the queries, once for the keys
        return (0.1 * mscale * math.log(scaling["factor"]) + 1) ** 2
    return 1.0


def _with_mup_scales(base: Config, hf: dict[str, Any]) -> Config:
    """Return MiniCPM3's config, with the scales of arXiv 2404.06395."""
    num_layers = len(base.layers)
    base_dim = hf.get("dim_model_base", 256)
    # null: no scale, as the quotient below is 1
    if hf.get("scale_depth", 1.4) is None:
        depth = math.sqrt(num_layers)
    else:
        depth = hf.get("scale_depth", 1.4)
    scales = dict(
        embed_scale=float(hf.get("scale_emb", 12)),
        residual_scale=depth / math.sqrt(num_layers),
    )
    # transformers divides by dim / base_dim, which is the same
    logit_scale = 1.0 if base_dim is None else base_dim / base.dim
    return replace(base, **scales, logit_scale=logit_scale)


def routed_experts(hf: dict[str, Any]) -> ExpertsConfig:
    """Return DeepSeek V3's experts; the fields have these names in many families."""
    hidden_dim = llama.one_size(hf, "moe_intermediate_size")
    # several shared experts are one MLP of their joint width
    shared = hf.get("n_shared_experts", hf.get("num_shared_experts", 1)) or 0
    if hf.get("n_group"):
        top_groups = hf.get("topk_group") or 1
    else:
        top_groups = 1
    return ExpertsConfig(
        hf.get("n_routed_experts") or hf.get("num_local_experts") or hf["num_experts"],
        hf["num_experts_per_tok"],
        hidden_dim,
        renormalize=hf.get("norm_topk_prob", True),
        shared_dim=hidden_dim * shared,
        scoring="sigmoid",
        correction_bias=True,
        groups=hf.get("n_group") or 1,
        top_groups=top_groups,
        weight_scale=float(hf.get("routed_scaling_factor") or 1.0),
    )


def sparse_layers(
    hf: dict[str, Any], layers: list[LayerConfig], experts: ExpertsConfig
) -> tuple[LayerConfig, ...]:
    """Return the layers, those after the first `first_k_dense_replace` (or by `mlp_layer_types`)
    with experts."""
    num_dense = hf.get("first_k_dense_replace", 1)
    kinds = hf.get("mlp_layer_types")
    if not kinds:
        kinds = ["dense" if n < num_dense else "sparse" for n in range(len(layers))]
    if len(kinds) != len(layers) or not {"dense", "sparse"}.issuperset(kinds):
        raise ValueError(
            f"config.json: mlp_layer_types must list {len(layers)} of dense and sparse, found "
            f"{kinds!r:.200}"
        )
    with_experts = []
    for layer, kind in zip(layers, kinds, strict=True):
        layer_experts = experts if kind == "sparse" else None
        with_experts.append(replace(layer, experts=layer_experts))
    return tuple(with_experts)


# litft's module names -> the files', within a layer
LATENT = {
    "attention.q_a_proj": "self_attn.q_a_proj",
    "attention.q_b_proj": "self_attn.q_b_proj",
    "attention.kv_b_proj": "self_attn.kv_b_proj",
    "attention.kv_a_proj": "self_attn.kv_a_proj_with_mqa",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
}
SHARED = llama.mlp_names("mlp.shared", "mlp.shared_experts")
BIAS = Rename(
    "model.layers.{}.mlp.gate.e_score_correction_bias", "blocks.{}.mlp.correction_bias"
)


def rules(config: Config) -> list[Rule]:
    """Return the rules for Llama's names, those of latent attention, and separately stored
    experts."""
    return [
        *llama.drop_mtp(config),
        *mixture_rules(config),
        *llama.rename_modules(LATENT),
        *llama.rules(config),
    ]


def mixture_rules(
    config: Config, shared: dict[str, str] = SHARED, bias: Rule = BIAS
) -> list[Rule]:
    """Return the rules of a mixture; shared: the names of the shared expert."""
    stored = "model.layers.{}.mlp.experts."
    experts = mixtral.experts_of(config)
    # Mistral 4's are stored in stacks; no other family with latent attention scores its experts so
    has_latent = any(layer.latent for layer in config.layers)
    scores = (experts.scoring, experts.group_score) if experts else ()
    if has_latent and scores == ("softmax", "top2"):
        stacks = mixtral.fused_experts(config, stored)
    else:
        stacks = mixtral.stacked_experts(config, f"{stored}{{}}.", llama.PROJECTIONS)
    return [*llama.rename_modules({"mlp.router": "mlp.gate"} | shared), bias, *stacks]


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for PEFT's names of experts and router."""
    return mixtral.peft_rules(config)


FAMILY = Family(
    model_types=(
        *("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
        *("minicpm3", "mistral4", "sarvam_mla", "youtu"),
    ),
    config=config,
    rules=rules,
    peft_rules=peft_rules,
)
