"""GGUF files of Seed-OSS 36B."""

from litft.checkpoints.rules import Rule
from litft.export.gguf.families import llama
from litft.export.gguf.families.family import GgufFamily
from litft.model.config import Config

GGUF = {"seed_oss": ("seed_oss", "SeedOssForCausalLM")}
GGUF_TENSORS = {"attention_bias": "attn_q.bias"}


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names of Seed-OSS."""
    # llama.cpp keeps the files' name of the norm before the MLP here
    norms = {"attention_norm": "attn_norm", "mlp_norm": "post_attention_norm"}
    return llama.gguf_names(config, llama.GGUF_ATTENTION | llama.GGUF_MLP | norms)


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    tensors=GGUF_TENSORS,
)
