"""LFM2 and LFM2 MoE (Liquid AI, arXiv 2511.23404): gated short convolutions and some layers of
attention."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rename, Rule, Squeeze
from litft.families import deepseek, llama, mixtral
from litft.families.family import Family
from litft.model.config import Config, NormConfig, ShortConvConfig

# litft's module names -> the files', within a layer
NAMES = llama.ATTENTION | {
    "attention.o_proj": "self_attn.out_proj",
    "attention.q_norm": "self_attn.q_layernorm",
    "attention.k_norm": "self_attn.k_layernorm",
    "attention_norm": "operator_norm",
    "mixer.in_proj": "conv.in_proj",
    "mixer.out_proj": "conv.out_proj",
    "mlp_norm": "ffn_norm",
    "mlp.router": "feed_forward.gate",
}
PROJECTIONS = {"gate": "w1", "up": "w3", "down": "w2"}


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' Lfm2Config and
    Lfm2MoeConfig."""
    hf = {
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "max_position_embeddings": 128000,
        **hf,
    }
    # of mixtures
    hf = {"moe_intermediate_size": 1792, "num_experts": 32, "num_experts_per_tok": 4, **hf}
    # published files have other names
    hf["tie_word_embeddings"] = hf.get("tie_embedding", hf["tie_word_embeddings"])
    is_mixture = hf["model_type"] == "lfm2_moe"
    hidden_dim = hf.get("block_ff_dim") or llama.one_size(hf, "intermediate_size")

    # two thirds of the width: a gated MLP then has as many weights as one without a gate
    if not is_mixture and hf.get("block_auto_adjust_ff_dim", True):
        multiple = hf.get("block_multiple_of", 256)
        hidden_dim = int(2 * hidden_dim / 3)
        hidden_dim = int((hf.get("block_ffn_dim_multiplier") or 1.0) * hidden_dim)
        hidden_dim = multiple * -(-hidden_dim // multiple)
    eps = hf.get("norm_eps", 1e-5)
    base = llama.config(
        {**hf, "intermediate_size": hidden_dim, "rms_norm_eps": eps, "hidden_act": "silu"},
        rope_theta=1e6,
    )
    conv = ShortConvConfig(base.dim, hf.get("conv_L_cache", 3), hf.get("conv_bias", False))
    # without either field, every layer has full attention
    attention = hf.get("full_attn_idxs")
    is_conv = llama.layer_kinds(
        hf,
        {"full_attention": False, "conv": True},
        lambda index: attention is not None and index not in attention,
    )
    # (attention, convolution)
    kinds = (base.layers[0], base.layers[0].with_mixer(conv))
    layers = [kinds[convolves] for convolves in is_conv]
    if is_mixture:
        experts = deepseek.routed_experts({**hf, "n_shared_experts": 0})
        experts = replace(experts, correction_bias=hf.get("use_expert_bias", True))
        layers = deepseek.sparse_layers(
            {"first_k_dense_replace": hf.get("num_dense_layers", 2)}, layers, experts
        )
    return replace(
        base,
        layers=tuple(layers),
        norm=NormConfig("rms", eps),
        qk_norm=base.norm,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
    )


def rules(config: Config) -> list[Rule]:
    """Return the rules, which rename."""
    names = dict(NAMES)
    for name, hf_name in PROJECTIONS.items():
        names[f"mlp.{name}_proj"] = f"feed_forward.{hf_name}"
    layers = "model.layers.{}."
    stacks = mixtral.stacked_experts(
        config, f"{layers}feed_forward.experts.{{}}.", PROJECTIONS
    )
    return [
        *llama.embedding_and_head(config, norm="embedding_norm"),
        *llama.rename_modules(names),
        Squeeze(f"{layers}conv.conv.weight", "blocks.{}.mixer.conv.weight", (1,)),
        Rename(f"{layers}conv.conv.bias", "blocks.{}.mixer.conv.bias"),
        Rename(f"{layers}feed_forward.expert_bias", "blocks.{}.mlp.correction_bias"),
        *stacks,
    ]


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for PEFT's names of experts."""
    return mixtral.fused_experts(config, "model.layers.{}.feed_forward.experts.")


FAMILY = Family(
    model_types=("lfm2", "lfm2_moe"),
    config=config,
    rules=rules,
    peft_rules=peft_rules,
)
