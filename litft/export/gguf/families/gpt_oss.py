"""GGUF files of gpt-oss 20B and 120B."""

from typing import Any

from litft.checkpoints.rules import Rename, Rule
from litft.export.gguf.families import llama, mixtral
from litft.export.gguf.families.family import GgufFamily
from litft.model.config import Config

GGUF = {"gpt_oss": ("gpt-oss", "GptOssForCausalLM")}
GGUF_FIELDS = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "intermediate_size",
}


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names."""
    names = llama.GGUF_ATTENTION | {
        "attention_norm": "attn_norm",
        # the files' name of the norm before the MLP
        "mlp_norm": "post_attention_norm",
    }
    sinks = Rename("blk.{}.attn_sinks.weight", "blocks.{}.attention.sinks")
    return [sinks, *mixtral.gguf_expert_rules(), *llama.gguf_names(config, names)]


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return the sizes of the experts."""
    return mixtral.gguf_sizes(config, GGUF_FIELDS)


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json; gpt-oss does not round the bounds of YaRN's ramp, which no metadata
    says."""
    scaling = hf.get("rope_scaling", {"rope_type": "default"})
    if scaling["rope_type"] == "yarn":
        scaling |= {"truncate": False}
    return hf | {"rope_scaling": scaling}


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    config=gguf_config,
    metadata=gguf_metadata,
    fields=GGUF_FIELDS,
)
