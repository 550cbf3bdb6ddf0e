"""GGUF files of EXAONE 4.0."""

from typing import Any

from litft.checkpoints.rules import Rule
from litft.export.gguf.families.family import GgufFamily
from litft.export.gguf.families.olmo import gguf_rules as olmo_gguf_rules
from litft.model.config import Config

GGUF = {"exaone4": ("exaone4", "Exaone4ForCausalLM")}


def gguf_rules(config: Config) -> list[Rule]:
    """Return OLMo's rules; raise ValueError for windows, which llama.cpp knows from the number of
    layers."""
    if any(layer.window for layer in config.layers):
        raise ValueError(
            "GGUF files of exaone4 with sliding windows are not supported; keep the Hugging Face "
            "folder"
        )
    # those of the 32B, whose windows llama.cpp knows by that number
    if len(config.layers) == 64:
        raise ValueError(
            "llama.cpp gives exaone4 with 64 layers sliding windows, and this model has none; keep "
            "the Hugging Face folder"
        )
    return olmo_gguf_rules(config)


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Add that all layers have full attention, unless the file states a window."""
    full = {
        "sliding_window": None,
        "layer_types": ["full_attention"] * hf["num_hidden_layers"],
    }
    if hf.get("sliding_window"):
        return hf
    return hf | full


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    config=gguf_config,
)
