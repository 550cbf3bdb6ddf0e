"""MiniMax M2 (2025): experts by sigmoid scores with a correction bias; norms over all heads;
partial RoPE."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rename, Rule
from litft.families import deepseek, llama, mixtral
from litft.families.family import Family
from litft.model.config import Config


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' MiniMaxM2Config."""
    defaults = dict(
        num_key_value_heads=8, head_dim=128, num_experts_per_tok=8, num_local_experts=256
    )
    hf = {**defaults, "max_position_embeddings": 196608, **hf}
    # the share of a head that is rotated
    fraction = 1.0
    if hf.get("rotary_dim"):
        fraction = hf["rotary_dim"] / llama.one_size(hf, "head_dim")
    base = llama.config(hf, 5e6, fraction)
    # the same mixture under other names; every layer has it
    experts = deepseek.routed_experts(
        {
            **hf,
            "moe_intermediate_size": base.hidden_dim,
            "n_shared_experts": 0,
            "norm_topk_prob": True,
        }
    )
    return replace(
        base,
        layers=llama.changed_layers(base, experts=experts),
        qk_norm=base.norm,
        qk_norm_over="all",
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
    )


def rules(config: Config) -> list[Rule]:
    """Return the rules for Mixtral's names."""
    bias = Rename(
        "model.layers.{}.block_sparse_moe.e_score_correction_bias",
        "blocks.{}.mlp.correction_bias",
    )
    return [bias, *mixtral.rules(config)]


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for PEFT's names of experts, router and bias."""
    bias = Rename(
        "model.layers.{}.mlp.e_score_correction_bias", "blocks.{}.mlp.correction_bias"
    )
    return [bias, *mixtral.peft_rules(config)]


FAMILY = Family(
    model_types=("minimax_m2",),
    config=config,
    rules=rules,
    peft_rules=peft_rules,
)
