"""StarCoder2 (arXiv 2402.19173): grouped-query attention, LayerNorm, an ungated MLP, biases, a
sliding window."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rule
from litft.families import llama
from litft.families.family import Family
from litft.model.config import Config, NormConfig


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' Starcoder2Config."""
    defaults = dict(
        hidden_act="gelu_pytorch_tanh", num_key_value_heads=2, tie_word_embeddings=True
    )
    base = llama.config({**defaults, "max_position_embeddings": 4096, **hf})
    bias = hf.get("use_bias", True)
    return replace(
        base,
        layers=llama.changed_layers(base, window=hf.get("sliding_window") or None),
        norm=NormConfig("layer", hf.get("norm_epsilon", 1e-5), bias=True),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def rules(config: Config) -> list[Rule]:
    """Return the rules, which only rename."""
    names = (
        llama.ATTENTION
        | {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
        | llama.NORMS
    )
    return [*llama.embedding_and_head(config), *llama.rename_modules(names)]


FAMILY = Family(
    model_types=("starcoder2",),
    config=config,
    rules=rules,
)
