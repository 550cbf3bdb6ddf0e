"""GLM-4 9B and 32B (arXiv 2406.12793): interleaved RoPE on half of each head; GLM-4-0414 has norms
before and after."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rule, Split
from litft.families import llama
from litft.families.phi3 import gate_up_rules
from litft.model.config import Config

MODEL_TYPES = ("glm", "glm4")
GGUF = {"glm4": ("glm4", "Glm4ForCausalLM")}
GGUF_TENSORS = {"attention_bias": "attn_q.bias"}


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' GlmConfig and
    Glm4Config."""
    defaults = dict(
        num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1.5625e-7
    )
    base = llama.config({**defaults, "attention_bias": True, **hf}, rope_fraction=0.5)
    norm_position = "both" if hf["model_type"] == "glm4" else "before"
    return replace(
        base, rope_interleaved=True, norm_position=norm_position, o_bias=False, mlp_bias=False
    )


def rules(config: Config) -> list[Rule]:
    """Return the rules for Llama's names, with gate and up fused."""
    names = llama.ATTENTION | {"mlp.down_proj": "mlp.down_proj"} | llama.NORMS
    if config.norm_position == "both":
        # GLM 4 has norms after attention and MLP as well
        names |= {
            "attention_post_norm": "post_self_attn_layernorm",
            "mlp_post_norm": "post_mlp_layernorm",
        }
    return [*llama.embedding_and_head(config), *llama.rename_modules(names), *gate_up_rules(config)]


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names, with gate and up fused."""
    names = {
        "attention_post_norm": "post_attention_norm",
        "mlp_post_norm": "post_ffw_norm",
        "mlp.down_proj": "ffn_down",
    }
    gate_up = tuple(f"blocks.{{}}.mlp.{name}_proj.weight" for name in ("gate", "up"))
    fused = Split("blk.{}.ffn_up.weight", gate_up, (config.hidden_dim,) * 2)
    return [fused, *llama.gguf_names(config, llama.GGUF_ATTENTION | llama.GGUF_NORMS | names)]
