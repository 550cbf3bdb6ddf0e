"""Mixtral 8x7B and 8x22B: Mistral's attention over a mixture of experts (arXiv 2401.04088)."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rename, Rule, Split, Stack
from litft.families import llama, mistral
from litft.families.family import Family
from litft.model.config import Config, ExpertsConfig


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' MixtralConfig."""
    hf = {
        "sliding_window": None,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        **hf,
    }
    # attention is Mistral's, whose config tells its variants apart by their model type
    base = mistral.config({**hf, "model_type": "mistral"}, rope_theta=1e6)
    experts = ExpertsConfig(
        hf["num_local_experts"],
        hf["num_experts_per_tok"],
        base.hidden_dim,
        renormalize=True,
    )
    layers = llama.changed_layers(base, experts=experts)
    return replace(base, model_type=hf["model_type"], layers=layers)


def rules(config: Config) -> list[Rule]:
    """Return the rules; the tensors of each expert are stored separately, as w1 (gate), w3 (up) and
    w2 (down)."""
    stacks = stacked_experts(
        config,
        "model.layers.{}.block_sparse_moe.experts.{}.",
        {"gate": "w1", "up": "w3", "down": "w2"},
    )
    router = Rename(
        "model.layers.{}.block_sparse_moe.gate.weight", "blocks.{}.mlp.router.weight"
    )
    return [*llama.rules(config), router, *stacks]


def stacked_experts(config: Config, hf_prefix: str, names: dict[str, str]) -> list[Rule]:
    """Return rules for experts that are stored separately. A dense model has none.

    names: maps gate, up and down to the checkpoint's names.
    """
    experts = experts_of(config)
    if experts is None or not experts.count:
        return []
    stacks: list[Rule] = []
    for name, hf_name in names.items():
        stacked = f"blocks.{{}}.mlp.experts.{name}_proj.weight"
        stacks.append(Stack(f"{hf_prefix}{hf_name}.weight", stacked, experts.count))
    return stacks


def experts_of(config: Config) -> ExpertsConfig | None:
    """Return the experts of the first mixture, which has as many as all others, of the same size;
    None for a dense model."""
    for layer in config.layers:
        if layer.experts:
            return layer.experts
    return None


def fused_experts(
    config: Config,
    hf_prefix: str,
    down: str = "down_proj",
    gate_up: str = "gate_up_proj",
    prefix: str = "blocks.{}.mlp.experts.",
) -> list[Rule]:
    """Return rules for stacked experts with fused gate and up, as in transformers 5: (E, 2 I, C)
    and (E, C, I).

    A dense model has none.
    """
    experts = experts_of(config)
    if experts is None:
        return []
    gate_up_names = (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
    return [
        Split(f"{hf_prefix}{gate_up}", gate_up_names, (experts.hidden_dim,) * 2),
        Rename(f"{hf_prefix}{down}", f"{prefix}down_proj.weight"),
    ]


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for PEFT's names of experts and router, which are transformers' names in
    memory."""
    # transformers 5 stacks experts in memory, whatever the files have
    router = Rename("model.layers.{}.mlp.gate.weight", "blocks.{}.mlp.router.weight")
    return [router, *fused_experts(config, "model.layers.{}.mlp.experts.")]


FAMILY = Family(
    model_types=("mixtral",),
    config=config,
    rules=rules,
    peft_rules=peft_rules,
)
