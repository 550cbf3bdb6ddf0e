"""GGUF files of SmolLM3."""

from litft.export.gguf.families.family import GgufFamily
from litft.export.gguf.families.llama import gguf_rules

# llama.cpp skips RoPE in every fourth layer
GGUF = {"smollm3": ("smollm3", "SmolLM3ForCausalLM")}


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
)
