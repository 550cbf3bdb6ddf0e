"""Phi-3, 3.5, 4 and 4-mini (arXiv 2404.14219, 2412.08905): Llama with fused q/k/v and gate/up, partly rotated in 4-mini."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.conversion import Rule, Split
from litft.families import llama
from litft.model.config import Config

MODEL_TYPES = ("phi3",)
GGUF = {"phi3": ("phi3", "Phi3ForCausalLM")}


def config(hf: dict[str, Any]) -> Config:
    """Defaults are those of transformers' Phi3Config."""
    hf = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **hf}
    for field in ("rope_scaling", "rope_parameters"):
        scaling = hf.get(field) or {}
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind in ("su", "yarn"):  # what longrope was called in Phi-3's first files
            hf[field] = {**scaling, "rope_type": "longrope", "type": "longrope"}
    plain = llama.config(hf, rope_fraction=1.0)
    layers = tuple(replace(layer, window=hf.get("sliding_window") or None) for layer in plain.layers)
    return replace(plain, layers=layers, qkv_bias=False, o_bias=False, mlp_bias=False)


def rules(config: Config) -> list[Rule]:
    """q, k, v and gate, up are concatenated."""
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    names = {"attention.o_proj": "self_attn.o_proj", "mlp.down_proj": "mlp.down_proj"}
    return [
        *llama.ends(config),
        *llama.named(names | llama.NORMS),
        Split("model.layers.{}.self_attn.qkv_proj.weight", qkv("weight"), (q, kv, kv)),
        *gate_up(config),
    ]


def gguf_rules(config: Config) -> list[Rule]:
    """q, k, v and gate, up are concatenated there too."""
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    names = {"attention.o_proj": "attn_output", "mlp.down_proj": "ffn_down"}
    return [
        *llama.gguf_names(config, names | llama.GGUF_NORMS),
        Split("blk.{}.attn_qkv.weight", qkv("weight"), (q, kv, kv)),
        *gate_up(config, "blk.{}.ffn_up.weight"),
    ]


def qkv(leaf: str) -> tuple[str, str, str]:
    """Our names of what a fused q/k/v Linear holds."""
    return tuple(f"blocks.{{}}.attention.{n}_proj.{leaf}" for n in "qkv")


def gate_up(config: Config, hf_name: str = "model.layers.{}.mlp.gate_up_proj.weight") -> list[Rule]:
    """Gate and up in one Linear, one after the other."""
    ours = tuple(f"blocks.{{}}.mlp.{n}_proj.weight" for n in ("gate", "up"))
    return [Split(hf_name, ours, (config.hidden_dim,) * 2)]
