"""Mixtral 8x7B and 8x22B: Mistral's attention over a mixture of experts (arXiv 2401.04088)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rename, Rule, Split, Stack
from litft.families import llama, mistral
from litft.model.config import Config, ExpertsConfig

MODEL_TYPES = ("mixtral",)
GGUF = {"mixtral": ("llama", "MixtralForCausalLM")}
GGUF_FIELDS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}


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
        hf["num_local_experts"], hf["num_experts_per_tok"], base.hidden_dim, renormalize=True
    )
    layers = tuple(replace(layer, experts=experts) for layer in base.layers)
    return replace(base, model_type=hf["model_type"], layers=layers)


def rules(config: Config) -> list[Rule]:
    """Return the rules; the tensors of each expert are stored separately, as w1 (gate), w3 (up) and
    w2 (down)."""
    stacks = stacked_experts(
        config,
        "model.layers.{}.block_sparse_moe.experts.{}.",
        {"gate": "w1", "up": "w3", "down": "w2"},
    )
    router = Rename("model.layers.{}.block_sparse_moe.gate.weight", "blocks.{}.mlp.router.weight")
    return [*llama.rules(config), router, *stacks]


def stacked_experts(config: Config, hf_prefix: str, names: dict[str, str]) -> list[Rule]:
    """Return rules for experts that are stored separately. A dense model has none.

    names: maps gate, up and down to the checkpoint's names.
    """
    # the number is that of the first mixture: all have as many
    count = next((layer.experts.count for layer in config.layers if layer.experts), 0)
    if not count:
        return []
    return [
        Stack(f"{hf_prefix}{hf_name}.weight", f"blocks.{{}}.mlp.experts.{name}_proj.weight", count)
        for name, hf_name in names.items()
    ]


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
    experts = next((layer.experts for layer in config.layers if layer.experts), None)
    if experts is None:
        return []
    gate_up_names = (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
    return [
        Split(f"{hf_prefix}{gate_up}", gate_up_names, (experts.hidden_dim,) * 2),
        Rename(f"{hf_prefix}{down}", f"{prefix}down_proj.weight"),
    ]


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names."""
    return [*gguf_expert_rules(), *llama.gguf_rules(config)]


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return the number of experts."""
    return gguf_sizes(config, GGUF_FIELDS)


# llama.cpp's metadata of experts -> fields of ExpertsConfig
SIZES = {
    "expert_count": "count",
    "expert_used_count": "top_k",
    "expert_feed_forward_length": "hidden_dim",
    "expert_shared_feed_forward_length": "shared_dim",
}


def gguf_sizes(config: Config, keys: Iterable[str]) -> dict[str, int]:
    """Return the sizes of the experts among these keys of metadata; no shared expert has no
    size."""
    experts = mixture_of(config)
    sizes = {}
    for key in keys:
        if key in SIZES:
            sizes[key] = getattr(experts, SIZES[key])
    return {key: size for key, size in sizes.items() if size}


def mixture_of(config: Config) -> ExpertsConfig:
    """Return the experts that all sparse layers share; raise ValueError without them, which
    llama.cpp requires."""
    experts = next((layer.experts for layer in config.layers if layer.experts), None)
    if experts is None:
        reason = (
            f"llama.cpp's architecture for {config.model_type} needs experts, but this model has "
            "none"
        )
        raise ValueError(f"{reason}; keep the Hugging Face folder")
    return experts


def gguf_expert_rules() -> list[Rule]:
    """Return the rules for llama.cpp's names of the router, the stacked experts and the shared
    expert."""
    names = {"mlp.router": "ffn_gate_inp"}
    for part in ("gate", "up", "down"):
        names |= {
            f"mlp.experts.{part}_proj": f"ffn_{part}_exps",
            f"mlp.shared.{part}_proj": f"ffn_{part}_shexp",
        }
    return llama.rename_modules(names, "blk.{}.")


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for PEFT's names of experts and router, which are transformers' names in
    memory."""
    # transformers 5 stacks experts in memory, whatever the files have
    router = Rename("model.layers.{}.mlp.gate.weight", "blocks.{}.mlp.router.weight")
    return [router, *fused_experts(config, "model.layers.{}.mlp.experts.")]
