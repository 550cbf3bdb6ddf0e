"""GGUF files of GLM-4 9B and 32B."""

from litft.checkpoints.rules import Rule, Split
from litft.export.gguf.families import llama
from litft.export.gguf.families.family import GgufFamily
from litft.model.config import Config

GGUF = {"glm4": ("glm4", "Glm4ForCausalLM")}
GGUF_TENSORS = {"attention_bias": "attn_q.bias"}


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names, with gate and up fused."""
    names = {
        "attention_post_norm": "post_attention_norm",
        "mlp_post_norm": "post_ffw_norm",
        "mlp.down_proj": "ffn_down",
    }
    gate_up = tuple(f"blocks.{{}}.mlp.{name}_proj.weight" for name in ("gate", "up"))
    fused = Split("blk.{}.ffn_up.weight", gate_up, (config.hidden_dim,) * 2)
    return [
        fused,
        *llama.gguf_names(config, llama.GGUF_ATTENTION | llama.GGUF_NORMS | names),
    ]


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    tensors=GGUF_TENSORS,
)
