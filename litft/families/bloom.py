"""BLOOM (arXiv 2211.05100) and MPT (MosaicML, 2023): ALiBi instead of position embeddings."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rule
from litft.families import llama
from litft.families.family import Family
from litft.families.phi3 import fused_qkv
from litft.model.config import Config, NormConfig
from litft.model.positions import alibi_slopes

# litft's module names -> the files', within a layer
NAMES = {
    "bloom": {
        "attention.o_proj": "self_attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    }
    | llama.NORMS,
    "mpt": {
        "attention.o_proj": "attn.out_proj",
        "mlp.up_proj": "ffn.up_proj",
        "mlp.down_proj": "ffn.down_proj",
        "attention_norm": "norm_1",
        "mlp_norm": "norm_2",
    },
}


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' BloomConfig and
    MptConfig."""
    is_bloom = hf["model_type"] == "bloom"
    if hf.get("apply_residual_connection_post_layernorm"):
        raise ValueError(
            "config.json: apply_residual_connection_post_layernorm true is not supported"
        )

    # older names of BLOOM's fields, and MPT's
    names = {
        "n_embed": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
    }
    names |= {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
    }
    renamed = {}
    for name in names:
        if hf.get(name) is not None:
            renamed[names[name]] = hf[name]
    hf = {**hf, **renamed}

    # other values of MPT's settings are other networks
    attention = hf.get("attn_config") or {}
    unsupported = {
        "alibi": True,
        "qk_ln": False,
        "prefix_lm": False,
        "attn_type": "multihead_attention",
    }
    for name, value in unsupported.items():
        if attention.get(name, value) != value:
            raise ValueError(
                f"config.json: attn_config.{name} {attention[name]!r} is not supported; it must be "
                f"{value!r}"
            )
    sizes = dict(
        intermediate_size=4 * hf["hidden_size"],
        max_position_embeddings=hf.get("max_seq_len", 2048),
    )
    activation = "gelu_pytorch_tanh" if is_bloom else "gelu"
    base = llama.config(
        {
            "tie_word_embeddings": True,
            **hf,
            **sizes,
            "hidden_act": activation,
            "num_key_value_heads": None,
        }
    )
    norm = NormConfig("layer", hf.get("layer_norm_epsilon", 1e-5), bias=is_bloom)
    embed_norm = norm if is_bloom else None
    scale = attention.get("softmax_scale")
    return replace(
        base,
        layers=llama.changed_layers(base, rope=None, attention_scale=scale),
        norm=norm,
        embed_norm=embed_norm,
        gated=False,
        alibi=alibi_slopes(base.n_heads, attention.get("alibi_bias_max", 8)),
        qkv_clip=attention.get("clip_qkv"),
        # MPT has no biases at all
        qkv_bias=is_bloom,
        o_bias=is_bloom,
        mlp_bias=is_bloom,
    )


def rules(config: Config) -> list[Rule]:
    """Return the rules; q, k and v are fused, in BLOOM by head."""
    is_bloom = config.model_type == "bloom"
    # BLOOM's fused rows alternate by head, MPT's are three blocks
    if is_bloom:
        # as published, names lack the prefix
        layers = "{transformer.|}h.{}."
        sizes = (config.head_dim,) * 3
        fused = fused_qkv(f"{layers}self_attention.query_key_value", sizes, config.n_heads)
        outer = llama.embedding_and_head(
            config, "{transformer.|}", "word_embeddings", "ln_f"
        )
    else:
        layers = "transformer.blocks.{}."
        fused = fused_qkv(f"{layers}attn.Wqkv", (config.dim,) * 3)
        outer = llama.embedding_and_head(config, "transformer.", "wte", "norm_f")
    return [
        *outer,
        *llama.rename_modules(
            {"embed_norm": "{transformer.|}word_embeddings_layernorm"}, "", ""
        ),
        *llama.rename_modules(NAMES[config.model_type], layers),
        *fused,
    ]


FAMILY = Family(
    model_types=("bloom", "mpt"),
    config=config,
    rules=rules,
)
