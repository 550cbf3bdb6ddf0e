"""Granite 4 (IBM, 2025): Mamba-2 in most layers, attention without RoPE in the others, with or
without experts."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rename, Rule, Split
from litft.families import bamba, granite, llama
from litft.model.config import Config

MODEL_TYPES = ("granitemoehybrid",)
GGUF = {"granitemoehybrid": ("granitehybrid", "GraniteMoeHybridForCausalLM")}
GGUF_FIELDS = granite.GGUF_FIELDS | bamba.GGUF_MAMBA


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers'
    GraniteMoeHybridConfig."""
    hf = {"shared_intermediate_size": 1024, **hf}
    base = granite.config(hf)
    # without experts, the MLP is what the files call the shared expert
    if not base.layers[0].experts:
        base = replace(base, hidden_dim=hf["shared_intermediate_size"])
    mamba = bamba.mamba_config(hf, base.norm.eps)
    has_rope = hf.get("position_embedding_type") == "rope"
    if has_rope:
        attention = base.layers[0]
    else:
        attention = replace(base.layers[0], rope=None)
    # older files have other names of the two kinds
    kinds = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}
    is_mamba = llama.layer_kinds(hf, kinds, lambda index: True)
    layers = tuple(attention.with_mixer(mamba) if kind else attention for kind in is_mamba)
    return replace(base, layers=layers)


def rules(config: Config) -> list[Rule]:
    """Return the rules; without experts, the shared expert is the MLP."""
    mamba = bamba.mamba_rules(config, "model.layers.{}.mamba.")
    if config.layers[0].experts:
        return [*mamba, *granite.rules(config)]
    shared = "model.layers.{}.shared_mlp."
    parts = tuple(f"blocks.{{}}.mlp.{name}_proj.weight" for name in ("gate", "up"))
    fused = Split(f"{shared}input_linear.weight", parts, (config.hidden_dim,) * 2)
    down = Rename(f"{shared}output_linear.weight", "blocks.{}.mlp.down_proj.weight")
    return [*mamba, fused, down, *granite.rules(config)]


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for PEFT's names of experts and router."""
    return granite.peft_rules(config)


def gguf_architecture(config: Config) -> str:
    """Return llama.cpp's architecture, which is that of Granite 3 for models without Mamba-2
    layers."""
    if bamba.mixer_of(config):
        return GGUF["granitemoehybrid"][0]
    return granite.GGUF["granitemoeshared" if config.layers[0].experts else "granite"][0]


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names."""
    return [*bamba.gguf_mamba_rules(config), *granite.gguf_rules(config)]


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return the scales, and the sizes of the experts and of the Mamba-2 layers."""
    return granite.gguf_metadata(config) | bamba.gguf_mamba(config)


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the kinds of layers; without experts, the MLP is the shared
    expert."""
    # llama.cpp says by the number of key heads which layers have attention
    heads = hf["num_key_value_heads"]
    width = hf["mamba_width"]
    hf |= {
        "layer_types": ["attention" if count else "mamba" for count in heads],
        "num_key_value_heads": max(heads),
        "position_embedding_type": "rope" if hf.get("has_rope", True) else "nope",
        "mamba_d_head": width // hf["mamba_n_heads"],
        "mamba_expand": width // hf["hidden_size"],
        "num_local_experts": hf.get("num_local_experts", 0),
    }
    if not hf["num_local_experts"]:
        hf["shared_intermediate_size"] = hf["intermediate_size"]
    return {name: value for name, value in hf.items() if name not in ("mamba_width", "has_rope")}
