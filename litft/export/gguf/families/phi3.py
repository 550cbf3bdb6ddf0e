"""GGUF files of Phi-3, 3.5, 4 and 4-mini."""

from litft.checkpoints.rules import Rule, Split
from litft.export.gguf.families import llama
from litft.export.gguf.families.family import GgufFamily
from litft.families.phi3 import gate_up_rules, qkv_names
from litft.model.config import Config

GGUF = {"phi3": ("phi3", "Phi3ForCausalLM")}


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp, which fuses q/k/v and gate/up too."""
    q = config.n_heads * config.head_dim
    kv = config.n_kv_heads * config.head_dim
    names = {"attention.o_proj": "attn_output", "mlp.down_proj": "ffn_down"}
    return [
        *llama.gguf_names(config, names | llama.GGUF_NORMS),
        Split("blk.{}.attn_qkv.weight", qkv_names("weight"), (q, kv, kv)),
        *gate_up_rules(config, "blk.{}.ffn_up.weight"),
    ]


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
)
