"""GGUF files of Phi-1, 1.5 and 2."""

from litft.checkpoints.rules import Rule
from litft.export.gguf.families import llama
from litft.export.gguf.families.family import GgufFamily
from litft.model.config import Config

GGUF = {"phi": ("phi2", "PhiForCausalLM")}
GGUF_FIELDS = {"attention.layer_norm_epsilon": "layer_norm_eps"}


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names; raise ValueError for norms of queries and keys, which
    it does not have."""
    if config.qk_norm:
        raise ValueError(
            "llama.cpp's architecture phi2 does not support this model's qk_norm; keep the model "
            "in Hugging Face's format"
        )
    return llama.gguf_names(
        config, llama.GGUF_ATTENTION | llama.GGUF_MLP | {"attention_norm": "attn_norm"}
    )


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    fields=GGUF_FIELDS,
)
