"""GLM-4 9B and 32B (arXiv 2406.12793): interleaved RoPE on half of each head; GLM-4-0414 has norms
before and after."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rule
from litft.families import llama
from litft.families.family import Family
from litft.families.phi3 import gate_up_rules
from litft.model.config import Config


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' GlmConfig and
    Glm4Config."""
    defaults = dict(
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1.5625e-7,
    )
    base = llama.config({**defaults, "attention_bias": True, **hf}, rope_fraction=0.5)
    norm_position = "both" if hf["model_type"] == "glm4" else "before"
    return replace(
        base,
        rope_interleaved=True,
        norm_position=norm_position,
        o_bias=False,
        mlp_bias=False,
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
    return [
        *llama.embedding_and_head(config),
        *llama.rename_modules(names),
        *gate_up_rules(config),
    ]


FAMILY = Family(
    model_types=("glm", "glm4"),
    config=config,
    rules=rules,
)
