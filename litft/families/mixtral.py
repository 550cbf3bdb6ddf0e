"""Mixtral 8x7B and 8x22B: Mistral's attention over a mixture of experts (arXiv 2401.04088)."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.conversion import Rename, Rule, Split, Stack
from litft.families import llama, mistral
from litft.model.config import Config, ExpertsConfig

MODEL_TYPES = ("mixtral",)


def config(hf: dict[str, Any]) -> Config:
    """Defaults are those of transformers' MixtralConfig."""
    hf = {"sliding_window": None, "rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2, **hf}
    plain = mistral.config({**hf, "model_type": "mistral"}, rope_base=1e6)
    experts = ExpertsConfig(hf["num_local_experts"], hf["num_experts_per_tok"], plain.hidden_dim, renormalize=True)
    layers = tuple(replace(layer, experts=experts) for layer in plain.layers)
    return replace(plain, model_type=hf["model_type"], layers=layers)


def rules(config: Config) -> list[Rule]:
    """Each expert is stored by itself, as w1 (gate), w3 (up) and w2 (down)."""
    stacks = stacked(config, "model.layers.{}.block_sparse_moe.experts.{}.", {"gate": "w1", "up": "w3", "down": "w2"})
    router = Rename("model.layers.{}.block_sparse_moe.gate.weight", "blocks.{}.mlp.router.weight")
    return [*llama.rules(config), router, *stacks]


def stacked(config: Config, hf_name: str, names: dict[str, str]) -> list[Rule]:
    """Experts that are stored one by one."""
    count = next(layer.experts.count for layer in config.layers if layer.experts)
    return [Stack(f"{hf_name}{t}.weight", f"blocks.{{}}.mlp.experts.{o}_proj.weight", count) for o, t in names.items()]


def fused(config: Config, hf_name: str, down: str = "down_proj", gate_up: str = "gate_up_proj") -> list[Rule]:
    """Experts as transformers 5 holds them in memory, (E, 2 I, C) and (E, C, I): what PEFT's keys name."""
    experts = next(layer.experts for layer in config.layers if layer.experts)
    ours = "blocks.{}.mlp.experts."
    sides = (f"{ours}gate_proj.weight", f"{ours}up_proj.weight")
    return [
        Split(f"{hf_name}{gate_up}", sides, (experts.hidden_dim,) * 2),
        Rename(f"{hf_name}{down}", f"{ours}down_proj.weight"),
    ]


def peft_rules(config: Config) -> list[Rule]:
    """How PEFT names the experts and what chooses them."""
    router = Rename("model.layers.{}.mlp.gate.weight", "blocks.{}.mlp.router.weight")
    return [router, *fused(config, "model.layers.{}.mlp.experts.")]
