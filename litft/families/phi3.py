"""Phi-3, 3.5, 4 and 4-mini (arXiv 2404.14219, 2412.08905): Llama with fused q/k/v and gate/up,
4-mini with partial RoPE."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rule, Split
from litft.families import llama
from litft.families.family import Family
from litft.model.config import Config


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' Phi3Config."""
    hf = {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        **hf,
    }
    for field in ("rope_scaling", "rope_parameters"):
        scaling = hf.get(field) or {}
        rope_type = scaling.get("rope_type", scaling.get("type"))
        if rope_type in ("su", "yarn"):  # longrope in the first files of Phi-3
            hf[field] = {**scaling, "rope_type": "longrope", "type": "longrope"}
    base = llama.config(hf, rope_fraction=1.0)
    layers = llama.changed_layers(base, window=hf.get("sliding_window") or None)
    return replace(base, layers=layers, qkv_bias=False, o_bias=False, mlp_bias=False)


def rules(config: Config) -> list[Rule]:
    """Return the rules for Llama's names, with fused q/k/v and gate/up."""
    # rows of the queries, and of keys and values each
    q = config.n_heads * config.head_dim
    kv = config.n_kv_heads * config.head_dim
    names = {"attention.o_proj": "self_attn.o_proj", "mlp.down_proj": "mlp.down_proj"}
    return [
        *llama.embedding_and_head(config),
        *llama.rename_modules(names | llama.NORMS),
        Split(
            "model.layers.{}.self_attn.qkv_proj.weight", qkv_names("weight"), (q, kv, kv)
        ),
        *gate_up_rules(config),
    ]


def qkv_names(leaf: str) -> tuple[str, str, str]:
    """Return the litft names of the tensors in a fused q/k/v Linear; leaf: weight or bias."""
    attention = "blocks.{}.attention."
    return (
        f"{attention}q_proj.{leaf}",
        f"{attention}k_proj.{leaf}",
        f"{attention}v_proj.{leaf}",
    )


def fused_qkv(hf_name: str, sizes: tuple[int, ...], groups: int = 1) -> list[Rule]:
    """Return the rules for a fused q/k/v Linear with a bias; sizes, groups: as in `Split`."""
    return [
        Split(f"{hf_name}.weight", qkv_names("weight"), sizes, groups),
        Split(f"{hf_name}.bias", qkv_names("bias"), sizes, groups),
    ]


def gate_up_rules(
    config: Config, hf_name: str = "model.layers.{}.mlp.gate_up_proj.weight"
) -> list[Rule]:
    """Return the rule for an MLP Linear in which up follows gate."""
    names = ("blocks.{}.mlp.gate_proj.weight", "blocks.{}.mlp.up_proj.weight")
    return [Split(hf_name, names, (config.hidden_dim,) * 2)]


FAMILY = Family(
    model_types=("phi3",),
    config=config,
    rules=rules,
)
