"""GGUF files of StarCoder2."""

from litft.checkpoints.rules import Rule
from litft.export.gguf.families import llama
from litft.export.gguf.families.family import GgufFamily
from litft.model.config import Config

GGUF = {"starcoder2": ("starcoder2", "Starcoder2ForCausalLM")}
GGUF_FIELDS = {"attention.layer_norm_epsilon": "norm_epsilon"}


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names."""
    return llama.gguf_names(config)


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    fields=GGUF_FIELDS,
)
