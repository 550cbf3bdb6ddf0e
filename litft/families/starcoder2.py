"""StarCoder2 (arXiv 2402.19173): grouped heads, LayerNorm, a plain MLP, biases everywhere, a window."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.conversion import Rule
from litft.families import llama
from litft.model.config import Config, NormConfig

MODEL_TYPES = ("starcoder2",)


def config(hf: dict[str, Any]) -> Config:
    """Defaults are those of transformers' Starcoder2Config."""
    defaults = dict(hidden_act="gelu_pytorch_tanh", num_key_value_heads=2, tie_word_embeddings=True)
    plain = llama.config({**defaults, "max_position_embeddings": 4096, **hf})
    bias = hf.get("use_bias", True)
    return replace(
        plain,
        layers=tuple(replace(layer, window=hf.get("sliding_window") or None) for layer in plain.layers),
        norm=NormConfig("layer", hf.get("norm_epsilon", 1e-5), bias=True),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def rules(config: Config) -> list[Rule]:
    """Plain renames."""
    names = llama.ATTENTION | {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"} | llama.NORMS
    return [*llama.ends(config), *llama.named(names)]
