"""GGUF files of Granite 4."""

from typing import Any

from litft.checkpoints.rules import Rule
from litft.export.gguf.families import bamba, granite
from litft.export.gguf.families.family import GgufFamily
from litft.families import bamba as bamba_family
from litft.model.config import Config

GGUF = {"granitemoehybrid": ("granitehybrid", "GraniteMoeHybridForCausalLM")}
GGUF_FIELDS = granite.GGUF_FIELDS | bamba.GGUF_MAMBA


def gguf_architecture(config: Config) -> str:
    """Return llama.cpp's architecture, which is that of Granite 3 for models without Mamba-2
    layers."""
    if bamba_family.mixer_of(config):
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
    return {
        name: value for name, value in hf.items() if name not in ("mamba_width", "has_rope")
    }


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    config=gguf_config,
    metadata=gguf_metadata,
    fields=GGUF_FIELDS,
    architecture=gguf_architecture,
)
