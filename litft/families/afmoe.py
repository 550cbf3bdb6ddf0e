"""Trinity (Arcee, AFMoE, 2025): gated attention, RoPE in layers with a window, sigmoid routing with
a correction bias."""

import math
from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rename, Rule
from litft.families import deepseek, llama, mixtral
from litft.families.family import Family
from litft.model.config import Config

NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' AfmoeConfig."""
    defaults = dict(
        head_dim=128,
        num_experts=64,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        num_shared_experts=2,
    )
    hf = {
        **defaults,
        "sliding_window": 1024,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 16384,
        **hf,
    }
    base = llama.config(hf)
    every = hf.get("global_attn_every_n_layers", 4)
    windows = llama.layer_windows(hf, lambda index: (index + 1) % every != 0)
    layers = list(llama.local_rope_layers(base, windows))
    # the same mixture under other names
    experts = deepseek.routed_experts(
        {
            **hf,
            "norm_topk_prob": True,
            "routed_scaling_factor": hf.get("route_scale", 1.0),
            # transformers' router has no groups, whatever the file says
            "n_group": None,
        }
    )
    num_dense = hf.get("num_dense_layers", 1)
    embed_scale = math.sqrt(base.dim) if hf.get("mup_enabled") else 1.0
    return replace(
        base,
        layers=deepseek.sparse_layers(
            {"first_k_dense_replace": num_dense}, layers, experts
        ),
        norm_position="both",
        qk_norm=base.norm,
        attention_gate=True,
        mlp_bias=False,
        embed_scale=embed_scale,
        noise_after="lookup",
    )


def rules(config: Config) -> list[Rule]:
    """Return the rules for Llama's names, with four norms a layer and the output gate."""
    bias = Rename("model.layers.{}.mlp.expert_bias", "blocks.{}.mlp.correction_bias")
    names = {"mlp.router": "mlp.router.gate", "attention.gate_proj": "self_attn.gate_proj"}
    return [
        *llama.rename_modules(names),
        *deepseek.mixture_rules(config, bias=bias),
        *llama.rules(config, norms=NORMS),
    ]


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for PEFT's names of the experts."""
    return mixtral.fused_experts(config, "model.layers.{}.mlp.experts.")


FAMILY = Family(
    model_types=("afmoe",),
    config=config,
    rules=rules,
    peft_rules=peft_rules,
)
