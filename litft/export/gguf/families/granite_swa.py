"""GGUF files of Granite with windows and sinks, dense and with experts."""

from typing import Any

from litft.checkpoints.rules import Rename, Rule, Split
from litft.export.gguf.families import granite, llama
from litft.export.gguf.families.family import GgufFamily
from litft.families import mixtral
from litft.model.config import Config

GGUF = {
    "granite_swa": ("granite_swa", "GraniteSWAForCausalLM"),
    "granitemoe_swa": ("granite_swa", "GraniteMoeSWAForCausalLM"),
}
ROPE_PATTERN = "attention.rope_pattern"  # whether each layer rotates
GGUF_FIELDS = granite.GGUF_FIELDS | llama.GGUF_WINDOWS | {ROPE_PATTERN: "rope_pattern"}


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names; gate and up of the shared expert are one tensor."""
    sinks = Rename("blk.{}.attn_sinks.weight", "blocks.{}.attention.sinks")
    experts = mixtral.experts_of(config)
    shared: list[Rule] = []
    if experts and experts.shared_dim:
        parts = (
            "blocks.{}.mlp.shared.gate_proj.weight",
            "blocks.{}.mlp.shared.up_proj.weight",
        )
        shared = [Split("blk.{}.ffn_up_shexp.weight", parts, (experts.shared_dim,) * 2)]
    return [sinks, *shared, *granite.gguf_rules(config)]


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return the scales, the sizes of the experts, and which layers have windows and RoPE."""
    metadata = granite.gguf_metadata(config) | llama.gguf_windows(config)
    rotates = [layer.rope is not None for layer in config.layers]
    if not all(rotates):
        metadata[ROPE_PATTERN] = rotates
    return metadata


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the kinds of layers; with experts, the class is another one."""
    if hf.get("num_local_experts"):
        model_type = "granitemoe_swa"
    else:
        model_type = "granite_swa"
    hf = hf | {"model_type": model_type, "architectures": [GGUF[model_type][1]]}
    pattern = hf.pop("rope_pattern", None)
    if pattern:
        hf["layer_rope_theta"] = [hf["rope_theta"] if rotates else 0 for rotates in pattern]
    return llama.gguf_layer_types(hf)


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    config=gguf_config,
    metadata=gguf_metadata,
    fields=GGUF_FIELDS,
)
