"""GGUF files of DeepSeek V2 and V3."""

import math
from collections.abc import Collection
from typing import Any

from litft.checkpoints.rules import KeysAndValues, Rename, Rule
from litft.export.gguf.families import llama, mixtral
from litft.export.gguf.families.family import GgufFamily
from litft.model.config import Config, LatentConfig

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
        KeysAndValues(
            "blk.{}.attn_{k_b|v_b}.weight", kv_b, config.n_heads, latent.nope_dim
        ),
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
    # each layer of these architectures has both
    assert latent is not None
    assert rope is not None
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
    metadata = gguf_latent(config, latent)
    # the scale of scores is squared: see `yarn_scale`
    multiplier = 0.0
    if rope.rope_type == "yarn":
        # YaRN sets it
        assert layer.attention_scale is not None
        scale = math.sqrt(layer.attention_scale * math.sqrt(latent.head_dim))
        multiplier = (scale - 1) / math.log(rope.factor)
        metadata["rope.scaling.yarn_log_multiplier"] = multiplier
    if rope.rope_type != "default" and multiplier <= 0:
        raise ValueError(
            "llama.cpp scales the scores of latent attention with every scaled RoPE, and this "
            f"model ({rope.rope_type} without mscale_all_dim) does not; keep the Hugging Face "
            "folder"
        )
    return metadata | gguf_experts(config)


def gguf_latent(config: Config, latent: LatentConfig) -> dict[str, Any]:
    """Return the sizes of latent attention; raise ValueError if the norms of its vectors have
    another epsilon than the others, which llama.cpp reads for both."""
    if abs(config.norm.eps - latent.norm.eps) > 1e-5:
        raise ValueError(
            "llama.cpp computes the norms of latent attention with rms_norm_eps "
            f"{config.norm.eps}, and the model with {latent.norm.eps}; keep the Hugging Face folder"
        )
    # the cache has one key for all heads: the latent vector, and the part that RoPE rotates
    width = latent.dim + latent.rope_dim
    expanded = (latent.head_dim, latent.value_dim)
    # in the order of GGUF_LATENT
    sizes = (
        1,
        width,
        latent.dim,
        *expanded,
        latent.dim,
        latent.query_dim,
        latent.rope_dim,
        None,
    )
    return {
        key: value
        for key, value in zip(GGUF_LATENT, sizes, strict=True)
        if value is not None
    }


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
    if experts.groups > 1:
        if experts.group_score == "max":
            raise ValueError(
                "llama.cpp ranks groups of experts by their two best scores, and this model by the "
                "best one (topk_method group_limited_greedy); keep the Hugging Face folder"
            )
        metadata["expert_group_count"] = experts.groups
        metadata["expert_group_used_count"] = experts.top_groups
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


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    config=gguf_config,
    metadata=gguf_metadata,
    fields=GGUF_FIELDS,
)
