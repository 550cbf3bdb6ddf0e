"""GGUF files of Nemotron 3 and 4, Minitron."""

from typing import Any

from litft.checkpoints.rules import Rule, Shift
from litft.export.gguf.families import llama
from litft.export.gguf.families.family import GgufFamily
from litft.model.config import Config

GGUF = {
    "nemotron": ("nemotron", "NemotronForCausalLM"),
    "arcee": ("arcee", "ArceeForCausalLM"),
    "jais2": ("jais2", "Jais2ForCausalLM"),
}
GGUF_FIELDS = {"attention.layer_norm_epsilon": "norm_eps"}


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp, which stores Nemotron's norm weights plus 1."""
    if config.model_type == "arcee":
        return llama.gguf_rules(config)
    if config.model_type == "jais2":
        return llama.gguf_names(config)
    norms = [
        Shift(f"blk.{{}}.{stored}.weight", f"blocks.{{}}.{name}.weight", 1.0)
        for name, stored in llama.GGUF_NORMS.items()
    ]
    return [
        *norms,
        Shift("output_norm.weight", "norm.weight", 1.0),
        *llama.gguf_names(config),
    ]


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json, in which Jais 2 has another name for a field."""
    if hf["model_type"] == "jais2":
        return hf | {"layer_norm_eps": hf.pop("norm_eps")}
    return hf


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    config=gguf_config,
    fields=GGUF_FIELDS,
)
