"""GGUF files of GPT-2."""

from typing import Any

from litft.checkpoints.rules import Rule, Split
from litft.export.gguf.families import llama
from litft.export.gguf.families.family import GgufFamily
from litft.families import llama as llama_family
from litft.families.phi3 import qkv_names
from litft.model.config import Config

GGUF = {"gpt2": ("gpt2", "GPT2LMHeadModel")}


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp, which fuses q, k and v and stores all Linears as (out,
    in)."""
    names = {
        "attention.o_proj": "attn_output",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    } | llama.GGUF_NORMS
    fused = [
        Split(f"blk.{{}}.attn_qkv.{leaf}", qkv_names(leaf), (config.dim,) * 3)
        for leaf in ("weight", "bias")
    ]
    return [
        *llama_family.rename_modules({"embed_positions": "position_embd"}, "", ""),
        *llama.gguf_names(config, names),
        *fused,
    ]


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with GPT-2's field names."""
    fields = {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
    }
    fields |= {"n_inner": "intermediate_size", "n_positions": "max_position_embeddings"}
    # fields that GPT-2 has under another name, or does not have
    others = {}
    for name, value in hf.items():
        if name not in (*fields.values(), "num_key_value_heads", "rope_theta"):
            others[name] = value
    return {
        **others,
        **{gpt2_name: hf[name] for gpt2_name, name in fields.items()},
        "activation_function": "gelu_new",
    }


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    config=gguf_config,
)
