"""Falcon 7B, 40B and 180B (arXiv 2311.16867), Falcon 2 11B; Falcon 3 uses llama.py."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Drop, Rule
from litft.families import llama
from litft.families.family import Family
from litft.families.phi3 import fused_qkv
from litft.model.config import Config, NormConfig


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' FalconConfig."""
    if hf.get("alibi", False):
        raise ValueError(
            "config.json: alibi true is not supported; use a Falcon model with rotary embeddings"
        )
    is_new_architecture = hf.get("new_decoder_architecture", False)
    heads = hf["num_attention_heads"]
    kv_heads = hf.get("num_kv_heads") or heads
    # before the new architecture: one key head for all query heads, or one for each
    if not is_new_architecture:
        kv_heads = 1 if hf.get("multi_query", True) else heads
    hidden_dim = hf.get("ffn_hidden_size") or 4 * hf["hidden_size"]
    overrides = dict(
        num_key_value_heads=kv_heads,
        intermediate_size=hidden_dim,
        head_dim=None,
        hidden_act=hf.get("activation", "gelu"),
    )
    base = llama.config(
        {
            "tie_word_embeddings": True,
            **hf,
            **overrides,
        }
    )
    parallel = hf.get("parallel_attn", True)
    bias = hf.get("bias", False)
    # a single norm serves both attention and MLP
    num_norms = hf.get("num_ln_in_parallel_attn") or (2 if is_new_architecture else 1)
    return replace(
        base,
        norm=NormConfig("layer", hf.get("layer_norm_epsilon", 1e-5), bias=True),
        gated=False,
        parallel=parallel,
        shared_norm=parallel and num_norms == 1,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def rules(config: Config) -> list[Rule]:
    """Return the rules; in the fused q/k/v, each key/value head follows the query heads that share
    it."""
    layers = "transformer.h.{}."
    per_group = config.n_heads // config.n_kv_heads
    names = {
        "attention.o_proj": "self_attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
        "attention_norm": "input_layernorm",
        "mlp_norm": "ln_mlp" if config.parallel else "post_attention_layernorm",
    }
    # with two norms side by side, each has a name of its own
    if config.parallel and not config.shared_norm:
        names["attention_norm"] = "ln_attn"
    sizes = (per_group * config.head_dim, config.head_dim, config.head_dim)
    fused = fused_qkv(f"{layers}self_attention.query_key_value", sizes, config.n_kv_heads)
    # frequencies, which old files have
    drop = Drop(f"{layers}self_attention.rotary_emb.inv_freq")
    outer = llama.embedding_and_head(config, "transformer.", "word_embeddings", "ln_f")
    return [*outer, *llama.rename_modules(names, layers), *fused, drop]


FAMILY = Family(
    model_types=("falcon",),
    config=config,
    rules=rules,
)
