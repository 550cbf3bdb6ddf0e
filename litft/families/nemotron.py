"""Nemotron 3 and 4, Minitron (arXiv 2402.16819), Arcee AFM and Jais 2: Llama with an ungated MLP
and squared ReLU."""

from dataclasses import replace
from typing import Any

from litft.families import llama
from litft.families.family import Family
from litft.families.llama import rules
from litft.model.config import Config, NormConfig

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
    rope_fraction = 0.5 if model_type == "nemotron" else None
    base = llama.config(hf, rope_fraction=rope_fraction)
    norms = {
        # stores weight - 1
        "nemotron": NormConfig("layer", hf.get("norm_eps", 1e-5), offset=1.0, bias=True),
        "arcee": base.norm,
        "jais2": NormConfig("layer", hf.get("layer_norm_eps", 1e-5), bias=True),
    }
    return replace(base, gated=False, norm=norms[model_type])


FAMILY = Family(
    model_types=("nemotron", "arcee", "jais2"),
    config=config,
    rules=rules,
)
