"""BLOOM (arXiv 2211.05100) and MPT (MosaicML, 2023): ALiBi instead of position embeddings."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rule, Split
from litft.families import llama
from litft.families.family import Family
from litft.families.phi3 import qkv_names
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
    hf = {**hf, **{names[name]: hf[name] for name in names if name in hf}}

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
        intermediate_size=4 * hf["hidden_size"], max_position_embeddings=hf.get("max_seq_len", 2048)
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
    scale = attention.get("softmax_scale")
    return replace(
        base,
        layers=tuple(replace(layer, rope=None, attention_scale=scale) for layer in base.layers),
        norm=norm,
        embed_norm=norm if is_bloom else None,
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
    layers = "transformer.h.{}." if is_bloom else "transformer.blocks.{}."
    # BLOOM's fused rows alternate by head, MPT's are three blocks
    size, groups = (config.head_dim, config.n_heads) if is_bloom else (config.dim, 1)
    if is_bloom:
        fused_name = f"{layers}self_attention.query_key_value"
    else:
        fused_name = f"{layers}attn.Wqkv"
    fused = [
        Split(f"{fused_name}.{leaf}", qkv_names(leaf), (size,) * 3, groups)
        for leaf in ("weight", "bias")
    ]
    embed, norm = ("word_embeddings", "ln_f") if is_bloom else ("wte", "norm_f")
    return [
        *llama.embedding_and_head(config, "transformer.", embed, norm),
        *llama.rename_modules({"embed_norm": "transformer.word_embeddings_layernorm"}, "", ""),
        *llama.rename_modules(NAMES[config.model_type], layers),
        *fused,
    ]


FAMILY = Family(
    model_types=("bloom", "mpt"),
    config=config,
    rules=rules,
)
