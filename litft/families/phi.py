"""Phi-1, 1.5 and 2 (arXiv 2309.05463): parallel attention and MLP with one LayerNorm, partial RoPE,
biases."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rule
from litft.families import llama
from litft.families.family import Family
from litft.model.config import Config, NormConfig


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' PhiConfig."""
    base = llama.config({"hidden_act": "gelu_new", **hf}, rope_fraction=0.5)
    norm = NormConfig("layer", hf.get("layer_norm_eps", 1e-5), bias=True)
    qk_norm = norm if hf.get("qk_layernorm") else None
    return replace(
        base,
        norm=norm,
        gated=False,
        parallel=True,
        shared_norm=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
        qk_norm=qk_norm,
    )


def rules(config: Config) -> list[Rule]:
    """Return the rules, which only rename."""
    names = {f"attention.{n}_proj": f"self_attn.{n}_proj" for n in "qkv"}
    names |= {
        "attention.o_proj": "self_attn.dense",
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
    }
    # one norm serves both attention and MLP
    names |= {"attention_norm": "input_layernorm"}
    names |= {
        "attention.q_norm": "self_attn.q_layernorm",
        "attention.k_norm": "self_attn.k_layernorm",
    }
    return [
        *llama.embedding_and_head(config, norm="final_layernorm"),
        *llama.rename_modules(names),
    ]


FAMILY = Family(
    model_types=("phi",),
    config=config,
    rules=rules,
)
