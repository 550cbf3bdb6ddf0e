"""GGUF files of StableLM 3B-4e1t, StableLM Zephyr, StableLM 2, Stable Code."""

from typing import Any

from litft.checkpoints.rules import Rule
from litft.export.gguf.families import llama
from litft.export.gguf.families.family import GgufFamily
from litft.model.config import Config

GGUF = {"stablelm": ("stablelm", "StableLmForCausalLM")}
GGUF_FIELDS = {
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "use_parallel_residual": "use_parallel_residual",
}
GGUF_TENSORS = {"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"}


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names."""
    return llama.gguf_names(config)


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return whether attention and MLP are parallel."""
    return {"use_parallel_residual": config.parallel}


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    metadata=gguf_metadata,
    fields=GGUF_FIELDS,
    tensors=GGUF_TENSORS,
)
