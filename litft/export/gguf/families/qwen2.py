"""GGUF files of Qwen 1.5, 2 and 2.5, QwQ."""

from litft.export.gguf.families.family import GgufFamily
from litft.export.gguf.families.llama import gguf_names as gguf_rules

GGUF = {"qwen2": ("qwen2", "Qwen2ForCausalLM"), "qwen3": ("qwen3", "Qwen3ForCausalLM")}


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
)
