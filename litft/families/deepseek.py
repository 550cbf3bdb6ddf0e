"""DeepSeek V2 and V3 (arXiv 2405.04434, 2412.19437), Moonlight, GLM-4.7-Flash, MiniCPM3, Youtu:
latent attention.

Their mixtures select experts by sigmoid scores within groups, with a correction bias; other
families use `routed_experts`.
"""

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import KeysAndValues, Rename, Rule
from litft.families import llama, mixtral
from litft.model.config import Config, ExpertsConfig, LatentConfig, LayerConfig, NormConfig

MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")
GGUF = {
    "deepseek_v2": ("deepseek2", "DeepseekV2ForCausalLM"),
    "deepseek_v3": ("deepseek2", "DeepseekV3ForCausalLM"),
    "glm4_moe_lite": ("deepseek2", "Glm4MoeLiteForCausalLM"),
}
# llama.cpp's numbers of the functions that score experts
SOFTMAX = 1
SIGMOID = 2
# metadata of mixtures with the fields of `routed_experts`
GGUF_EXPERTS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_gating_func": "scoring_func",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
GGUF_LATENT = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "value_length",
    "attention.key_length_mla": "qk_head_dim",
    "attention.value_length_mla": "v_head_dim",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
}
GGUF_FIELDS = GGUF_EXPERTS | GGUF_LATENT

# transformers' defaults, where they differ from those of the functions below
DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": dict(
        first_k_dense_replace=0, n_routed_experts=64, n_shared_experts=2, moe_intermediate_size=1407
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


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' classes for these model
    types."""
    model_type = hf["model_type"]
    hf = {"kv_lora_rank": 512, "q_lora_rank": 1536, **DEFAULTS[model_type], **hf}
    latent = latent_config(hf)
    # latent attention computes keys and values for every head; RoPE rotates a part of a head
    base = llama.config({**hf, "num_key_value_heads": None, "head_dim": latent.rope_dim})
    layer = replace(
        base.layers[0], latent=latent, attention_scale=latent.head_dim**-0.5 * yarn_scale(hf)
    )
    base = replace(base, rope_interleaved=hf.get("rope_interleave", model_type != "minicpm3"))
    # models without experts
    if model_type in ("minicpm3", "youtu"):
        base = replace(base, layers=(layer,) * len(base.layers))
        if model_type == "minicpm3":
            return _with_mup_scales(base, hf)
        return base
    # V2 scores by softmax, without a correction, and ranks a group by its best expert; V3 by the
    # sum of its two best ones
    if model_type == "deepseek_v2":
        default = {"scoring": "softmax", "correction_bias": False, "renormalize": False}
    else:
        default = {}
    # greedy: the best experts of all, although the file may name groups
    if model_type == "deepseek_v2" and hf.get("topk_method", "greedy") == "greedy":
        hf["n_group"] = None
    experts = replace(routed_experts(hf), **default, group_score="max" if default else "top2")
    return replace(
        base, mlp_bias=False, layers=sparse_layers(hf, [layer] * len(base.layers), experts)
    )


def latent_config(hf: dict[str, Any]) -> LatentConfig:
    """Return the sizes of latent attention; the norms' epsilon is fixed in transformers."""
    # null: MiniCPM3's values have the size of a usual head
    value_dim = hf.get("v_head_dim", 128) or hf["hidden_size"] // hf["num_attention_heads"]
    nope = hf.get("qk_nope_head_dim", 128)
    rope = hf.get("qk_rope_head_dim", 64)
    return LatentConfig(
        hf["kv_lora_rank"], hf["q_lora_rank"], nope, rope, value_dim, NormConfig("rms", 1e-6)
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
        embed_scale=float(hf.get("scale_emb", 12)), residual_scale=depth / math.sqrt(num_layers)
    )
    # transformers divides by dim / base_dim, which is the same
    return replace(base, **scales, logit_scale=1.0 if base_dim is None else base_dim / base.dim)


def routed_experts(hf: dict[str, Any]) -> ExpertsConfig:
    """Return DeepSeek V3's experts; the fields have these names in many families."""
    hidden_dim = llama.one_size(hf, "moe_intermediate_size")
    # several shared experts are one MLP of their joint width
    shared = hf.get("n_shared_experts", hf.get("num_shared_experts", 1)) or 0
    return ExpertsConfig(
        hf.get("n_routed_experts") or hf.get("num_local_experts") or hf["num_experts"],
        hf["num_experts_per_tok"],
        hidden_dim,
        renormalize=hf.get("norm_topk_prob", True),
        shared_dim=hidden_dim * shared,
        scoring="sigmoid",
        correction_bias=True,
        groups=hf.get("n_group") or 1,
        top_groups=hf.get("topk_group") or 1 if hf.get("n_group") else 1,
        weight_scale=float(hf.get("routed_scaling_factor") or 1.0),
    )


def sparse_layers(
    hf: dict[str, Any], layers: list[LayerConfig], experts: ExpertsConfig
) -> tuple[LayerConfig, ...]:
    """Return the layers, those after the first `first_k_dense_replace` (or by `mlp_layer_types`)
    with experts."""
    num_dense = hf.get("first_k_dense_replace", 1)
    kinds = hf.get("mlp_layer_types") or [
        "dense" if n < num_dense else "sparse" for n in range(len(layers))
    ]
    if len(kinds) != len(layers) or not {"dense", "sparse"}.issuperset(kinds):
        raise ValueError(
            f"config.json: mlp_layer_types must list {len(layers)} of dense and sparse, found "
            f"{kinds!r:.200}"
        )
    return tuple(
        replace(layer, experts=experts if kind == "sparse" else None)
        for layer, kind in zip(layers, kinds, strict=True)
    )


# litft's module names -> the files', within a layer
LATENT = {f"attention.{n}_proj": f"self_attn.{n}_proj" for n in ("q_a", "q_b", "kv_b")} | {
    "attention.kv_a_proj": "self_attn.kv_a_proj_with_mqa",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
}
SHARED = {f"mlp.shared.{n}_proj": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")}
PROJECTIONS = {name: f"{name}_proj" for name in ("gate", "up", "down")}
BIAS = Rename("model.layers.{}.mlp.gate.e_score_correction_bias", "blocks.{}.mlp.correction_bias")


def rules(config: Config) -> list[Rule]:
    """Return the rules for Llama's names, those of latent attention, and separately stored
    experts."""
    return [
        *mixture_rules(config),
        *llama.rename_modules(LATENT),
        *llama.rules(config),
        *llama.drop_mtp(config),
    ]


def mixture_rules(config: Config, shared: dict[str, str] = SHARED, bias: Rule = BIAS) -> list[Rule]:
    """Return the rules of a mixture; shared: the names of the shared expert."""
    stacks = mixtral.stacked_experts(config, "model.layers.{}.mlp.experts.{}.", PROJECTIONS)
    return [*llama.rename_modules({"mlp.router": "mlp.gate"} | shared), bias, *stacks]


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for PEFT's names of experts and router."""
    return mixtral.peft_rules(config)


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names, with keys and values of latent attention in separate
    tensors."""
    latent = next(layer.latent for layer in config.layers if layer.latent)
    names = {f"attention.{n}_proj": f"attn_{n}" for n in ("q", "q_a", "q_b")} | {
        "attention.kv_a_proj": "attn_kv_a_mqa"
    }
    names |= {f"attention.{n}_norm": f"attn_{n}_norm" for n in ("q_a", "kv_a")} | {
        "attention.o_proj": "attn_output"
    }
    kv_b = "blocks.{}.attention.kv_b_proj.weight"
    return [
        KeysAndValues("blk.{}.attn_{k_b|v_b}.weight", kv_b, config.n_heads, latent.nope_dim),
        *gguf_mixture_rules(),
        *llama.gguf_names(config, names | llama.GGUF_MLP | llama.GGUF_NORMS),
    ]


def gguf_mixture_rules() -> list[Rule]:
    """Return the rules for llama.cpp's names of the router, its correction, the experts and the
    shared expert."""
    bias = Rename("blk.{}.exp_probs_b.bias", "blocks.{}.mlp.correction_bias")
    return [bias, *mixtral.gguf_expert_rules()]


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return the sizes of latent attention and of the experts; llama.cpp's cache has one head, as
    litft's has."""
    layer = config.layers[0]
    depth = len(config.layers)
    latent = layer.latent
    rope = layer.rope
    if (
        latent.query_dim is None
        and depth not in (26, 27)
        and (depth, config.vocab_size) != (48, 128256)
    ):
        reason = (
            "llama.cpp reads DeepSeek models with q_lora_rank null only if they have 26 or 27 "
            f"layers, found {depth}"
        )
        raise ValueError(f"{reason}; keep the Hugging Face folder")
    metadata = gguf_latent(latent)
    # the scale of scores is squared: see `yarn_scale`
    if rope.rope_type == "yarn":
        scale = math.sqrt(layer.attention_scale * math.sqrt(latent.head_dim))
        metadata["rope.scaling.yarn_log_multiplier"] = (scale - 1) / math.log(rope.factor)
    return metadata | gguf_experts(config)


def gguf_latent(latent: LatentConfig) -> dict[str, Any]:
    """Return the sizes of latent attention."""
    # the cache has one key for all heads: the latent vector, and the part that RoPE rotates
    width = latent.dim + latent.rope_dim
    expanded = (latent.head_dim, latent.value_dim)
    # in the order of GGUF_LATENT
    sizes = 1, width, latent.dim, *expanded, latent.dim, latent.query_dim, latent.rope_dim, None
    return {key: value for key, value in zip(GGUF_LATENT, sizes, strict=True) if value is not None}


def gguf_experts(config: Config, keys: Collection[str] = GGUF_EXPERTS) -> dict[str, Any]:
    """Return the metadata of a mixture; keys: those that the family's architecture has."""
    experts = mixtral.mixture_of(config)
    num_dense = next(n for n, layer in enumerate(config.layers) if layer.experts)
    metadata = mixtral.gguf_sizes(config, GGUF_EXPERTS) | {
        "expert_shared_count": experts.shared_dim // experts.hidden_dim,
        "expert_weights_scale": experts.weight_scale,
        "expert_weights_norm": experts.renormalize,
        "expert_gating_func": SIGMOID if experts.scoring == "sigmoid" else SOFTMAX,
        "leading_dense_block_count": num_dense,
    }
    # one group is the whole mixture, and needs no metadata
    groups = {"expert_group_count": experts.groups, "expert_group_used_count": experts.top_groups}
    metadata |= groups if experts.groups > 1 else {}
    return {key: value for key, value in metadata.items() if key in keys}


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSeek's config.json: V3 and its relatives score experts by sigmoid, V2 by
    softmax."""
    # what the file leaves out
    hf = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, **hf}
    if hf.get("scoring_func") == SIGMOID:
        hf |= {"model_type": "deepseek_v3", "architectures": [GGUF["deepseek_v3"][1]]}
    elif hf["n_group"] > 1:
        hf |= {"topk_method": "group_limited_greedy"}
    # a head's size is the sum of both parts
    hf |= {
        "qk_nope_head_dim": hf["qk_head_dim"] - hf["qk_rope_head_dim"],
        "num_key_value_heads": hf["num_attention_heads"],
    }
    # llama.cpp's multiplier has the factor 0.1 of YaRN's formula in it
    if "rope_scaling" in hf and (multiplier := hf.get("mscale_all_dim")):
        hf["rope_scaling"] |= dict.fromkeys(("mscale", "mscale_all_dim"), 10 * multiplier)

    # fields of llama.cpp, from which those above were computed
    unused = (
        "head_dim",
        "value_length",
        "qk_head_dim",
        "scoring_func",
        "mscale_all_dim",
        "partial_rotary_factor",
    )
    return {name: value for name, value in hf.items() if name not in unused}
