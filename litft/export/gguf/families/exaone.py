"""GGUF files of EXAONE 3.0 and 3.5."""

from litft.export.gguf.families.family import GgufFamily
from litft.export.gguf.families.llama import gguf_names

GGUF_FAMILY = GgufFamily(
    architectures={"exaone": ("exaone", "ExaoneForCausalLM")},
    rules=gguf_names,
)
