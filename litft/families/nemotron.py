"""Nemotron 3 and 4, Minitron (arXiv 2402.16819), Arcee AFM and Jais 2: Llama with an ungated MLP
and squared ReLU."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rule, Shift
from litft.families import llama
from litft.families.llama import rules
from litft.model.config import Config, NormConfig

__all__ = ["GGUF", "GGUF_FIELDS", "MODEL_TYPES", "config", "gguf_rules", "rules"]

MODEL_TYPES = ("nemotron", "arcee", "jais2")
GGUF = {
    "nemotron": ("nemotron", "NemotronForCausalLM"),
    "arcee": ("arcee", "ArceeForCausalLM"),
    "jais2": ("jais2", "Jais2ForCausalLM"),
}
GGUF_FIELDS = {"attention.layer_norm_epsilon": "norm_eps"}

DEFAULTS: dict[str, dict[str, Any]] = {
    "nemotron": dict(max_position_embeddings=4096),
    "arcee": dict(max_position_embeddings=4096, rms_norm_eps=1e-5),
    "jais2": dict(max_position_embeddings=8192, attention_bias=True, mlp_bias=True),
}


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of NemotronConfig, ArceeConfig or
    Jais2Config."""
    model_type = hf["model_type"]
    hf = {"hidden_act": "relu2", **DEFAULTS[model_type], **hf}
    base = llama.config(hf, rope_fraction=0.5 if model_type == "nemotron" else None)
    norms = {
        # stores weight - 1
        "nemotron": NormConfig("layer", hf.get("norm_eps", 1e-5), offset=1.0, bias=True),
        "arcee": base.norm,
        "jais2": NormConfig("layer", hf.get("layer_norm_eps", 1e-5), bias=True),
    }
    return replace(base, gated=False, norm=norms[model_type])


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp, which stores Nemotron's norm weights plus 1."""
    if config.model_type == "arcee":
        return llama.gguf_rules(config)
    if config.model_type == "jais2":
        return llama.gguf_names(config)
    norms = [
        Shift(f"blk.{{}}.{stored}.weight", f"blocks.{{}}.{name}.weight", 1.0)
        for name, stored in llama.GGUF_NORMS.items()
    ]
    return [*norms, Shift("output_norm.weight", "norm.weight", 1.0), *llama.gguf_names(config)]


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json, in which Jais 2 has another name for a field."""
    if hf["model_type"] == "jais2":
        return hf | {"layer_norm_eps": hf.pop("norm_eps")}
    return hf
