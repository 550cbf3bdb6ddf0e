"""Persimmon 8B (Adept, 2023): GPT-NeoX's fused projections, squared ReLU and norms of queries and
keys."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Drop, Rule
from litft.families import llama
from litft.families.family import Family
from litft.families.phi3 import fused_qkv
from litft.model.config import Config, NormConfig

# litft's module names -> the files', within a layer
NAMES = {
    "attention.o_proj": "self_attn.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
NAMES |= {
    "attention.q_norm": "self_attn.q_layernorm",
    "attention.k_norm": "self_attn.k_layernorm",
}
NAMES |= llama.NORMS


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' PersimmonConfig."""
    hf = {
        "hidden_act": "relu2",
        "max_position_embeddings": 16384,
        **hf,
        "num_key_value_heads": None,
        "head_dim": None,
    }
    base = llama.config(hf, rope_fraction=0.5)
    norm = NormConfig("layer", hf.get("layer_norm_eps", 1e-5), bias=True)
    qk_norm = norm if hf.get("qk_layernorm", True) else None
    return replace(
        base,
        norm=norm,
        qk_norm=qk_norm,
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )


def rules(config: Config) -> list[Rule]:
    """Return the rules; q, k and v are interleaved by head."""
    layers = "model.layers.{}."
    sizes = (config.head_dim,) * 3
    fused = fused_qkv(f"{layers}self_attn.query_key_value", sizes, config.n_heads)
    outer = llama.embedding_and_head(config, norm="final_layernorm")
    return [
        *outer,
        *llama.rename_modules(NAMES, layers),
        *fused,
        # frequencies, which old files have
        Drop(f"{layers}self_attn.rotary_emb.inv_freq"),
    ]


FAMILY = Family(
    model_types=("persimmon",),
    config=config,
    rules=rules,
)
