"""OPT (arXiv 2205.01068), BioGPT and XGLM (arXiv 2112.10668): learned or sinusoidal positions,
counted from 2."""

import math
from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Drop, Rule
from litft.families import llama
from litft.families.family import Family
from litft.model.config import Config, NormConfig

# the same names mean norms before attention and MLP, or after the sums
NORMS = {"attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"}
POST_NORMS = {
    "attention_post_norm": "self_attn_layer_norm",
    "mlp_post_norm": "final_layer_norm",
}


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' OPTConfig, BioGptConfig
    and XGLMConfig."""
    model_type = hf["model_type"]
    if hf.get("add_cross_attention"):
        raise ValueError(
            "config.json: add_cross_attention true is not supported; use a decoder-only model"
        )

    # names of other model types, and of older files
    names = {
        "d_model": "hidden_size",
        "num_layers": "num_hidden_layers",
        "attention_heads": "num_attention_heads",
    }
    names |= {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"}
    defaults = {
        "hidden_act": "relu" if model_type == "opt" else "gelu",
        "tie_word_embeddings": True,
        "max_position_embeddings": 1024 if model_type == "biogpt" else 2048,
    }
    renamed = {names[name]: hf[name] for name in names if name in hf}
    base = llama.config({**defaults, **hf, **renamed, "num_key_value_heads": None})
    embed_dim = hf.get("word_embed_proj_dim")
    if embed_dim not in (None, base.dim):
        raise ValueError(
            f"config.json: word_embed_proj_dim {embed_dim!r} is not supported; it must equal "
            "hidden_size"
        )
    bias = hf.get("enable_bias", True)
    scales = model_type != "opt" and hf.get("scale_embedding", True)
    embed_scale = math.sqrt(base.dim) if scales else 1.0
    # OPT 350M has its norms after the sums, and none before the head
    is_pre_norm = hf.get("do_layer_norm_before", True)
    norm_position = "before" if is_pre_norm else "residual"
    weight = hf.get("layer_norm_elementwise_affine", True)
    return replace(
        base,
        layers=llama.changed_layers(base, rope=None),
        norm=NormConfig("layer", 1e-5, weight=weight, bias=weight),
        norm_position=norm_position,
        final_norm=is_pre_norm and not hf.get("_remove_final_layer_norm", False),
        gated=False,
        learned_positions=model_type != "xglm",
        sinusoidal_positions=model_type == "xglm",
        # as in fairseq, the first positions of the table are for padding
        position_offset=2,
        zero_position=_zero_position(hf),
        embed_scale=embed_scale,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def _zero_position(hf: dict[str, Any]) -> int | None:
    """Return the row of XGLM's table of sines that is 0, if a token of a text has it.

    It is the row of the padding token's id, as in fairseq, where rows are counted from there.
    """
    padding = hf.get("pad_token_id", 1)
    has_table = hf["model_type"] == "xglm"
    if has_table and isinstance(padding, int) and padding >= 2:
        return padding
    return None


def rules(config: Config) -> list[Rule]:
    """Return the rules, which only rename."""
    # some files of OPT lack the prefix
    model = {"opt": "{model.|}decoder.", "biogpt": "biogpt.", "xglm": "model."}[
        config.model_type
    ]
    if config.model_type == "opt":
        final_norm = "final_layer_norm"
    else:
        final_norm = "layer_norm"
    if config.model_type == "biogpt":
        head = "output_projection"
    else:
        head = "lm_head"
    layers = {
        "attention.o_proj": "self_attn.out_proj",
        "mlp.up_proj": "fc1",
        "mlp.down_proj": "fc2",
    }
    layers |= NORMS if config.norm_position == "before" else POST_NORMS
    return [
        *llama.embedding_and_head(config, model, norm=final_norm, head=head),
        *llama.rename_modules({"embed_positions": f"{model}embed_positions"}, "", ""),
        *llama.rename_modules(llama.ATTENTION | layers, f"{model}layers.{{}}."),
        # XGLM's table of sines, which is computed
        Drop(f"{model}embed_positions.weights"),
    ]


FAMILY = Family(
    model_types=("opt", "biogpt", "xglm"),
    config=config,
    rules=rules,
)
