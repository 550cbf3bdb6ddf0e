"""GGUF files of Mixtral 8x7B and 8x22B."""

from collections.abc import Iterable
from typing import Any

from litft.checkpoints.rules import Rule
from litft.export.gguf.families import llama
from litft.export.gguf.families.family import GgufFamily
from litft.families import llama as llama_family
from litft.model.config import Config, ExpertsConfig

GGUF = {"mixtral": ("llama", "MixtralForCausalLM")}
GGUF_FIELDS = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}


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
    return llama_family.rename_modules(names, "blk.{}.")


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    metadata=gguf_metadata,
    fields=GGUF_FIELDS,
)
