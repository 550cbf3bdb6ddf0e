"""GGUF files of Granite 3."""

from typing import Any

from litft.checkpoints.rules import Rule
from litft.export.gguf.families import llama, mixtral
from litft.export.gguf.families.family import GgufFamily
from litft.model.config import Config

GGUF = {
    "granite": ("granite", "GraniteForCausalLM"),
    "granitemoe": ("granitemoe", "GraniteMoeForCausalLM"),
    "granitemoeshared": ("granitemoe", "GraniteMoeSharedForCausalLM"),
}
GGUF_FIELDS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_feed_forward_length": "shared_intermediate_size",
}


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names."""
    return [*mixtral.gguf_expert_rules(), *llama.gguf_rules(config)]


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return the scales, and the sizes of the experts."""
    scales = (
        config.layers[0].attention_scale,
        config.embed_scale,
        config.residual_scale,
        1 / config.logit_scale,
    )
    if config.layers[0].experts:
        sizes = mixtral.gguf_sizes(config, GGUF_FIELDS)
    else:
        sizes = {}
    # the scales are the first entries of the table
    return dict(zip(GGUF_FIELDS, scales, strict=False)) | sizes


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json; a mixture with a shared expert has a class of its own."""
    if hf["model_type"] == "granitemoe" and "shared_intermediate_size" in hf:
        return hf | {
            "model_type": "granitemoeshared",
            "architectures": [GGUF["granitemoeshared"][1]],
        }
    return hf


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    config=gguf_config,
    metadata=gguf_metadata,
    fields=GGUF_FIELDS,
)
