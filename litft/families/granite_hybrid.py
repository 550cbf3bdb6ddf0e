"""Granite 4 (IBM, 2025): Mamba-2 in most layers, attention without RoPE in the others, with or
without experts."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rename, Rule
from litft.families import bamba, granite, llama
from litft.families.family import Family
from litft.families.phi3 import gate_up_rules
from litft.model.config import Config


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
    kinds = {
        "mamba": True,
        "linear_attention": True,
        "attention": False,
        "full_attention": False,
    }
    is_mamba = llama.layer_kinds(hf, kinds, lambda index: True)
    layers = tuple(attention.with_mixer(mamba) if kind else attention for kind in is_mamba)
    return replace(base, layers=layers)


def rules(config: Config) -> list[Rule]:
    """Return the rules; without experts, the shared expert is the MLP."""
    mamba = bamba.mamba_rules(config, "model.layers.{}.mamba.")
    if config.layers[0].experts:
        return [*mamba, *granite.rules(config)]
    shared = "model.layers.{}.shared_mlp."
    fused = gate_up_rules(config, f"{shared}input_linear.weight")
    down = Rename(f"{shared}output_linear.weight", "blocks.{}.mlp.down_proj.weight")
    return [*mamba, *fused, down, *granite.rules(config)]


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for PEFT's names of experts and router."""
    return granite.peft_rules(config)


FAMILY = Family(
    model_types=("granitemoehybrid",),
    config=config,
    rules=rules,
    peft_rules=peft_rules,
)
