"""GGUF files of ERNIE 4.5, dense."""

from litft.export.gguf.families.family import GgufFamily
from litft.export.gguf.families.llama import gguf_names as gguf_rules

GGUF = {"ernie4_5": ("ernie4_5", "Ernie4_5ForCausalLM")}


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
)
