"""GLM-4 9B and 32B (arXiv 2406.12793): half of each head rotated, interleaved; GLM-4-0414 with norms on both sides."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.conversion import Rule
from litft.families import llama
from litft.families.phi3 import gate_up
from litft.model.config import Config

MODEL_TYPES = ("glm", "glm4")


def config(hf: dict[str, Any]) -> Config:
    """Defaults are those of transformers' GlmConfig and Glm4Config."""
    defaults = dict(num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1.5625e-7)
    plain = llama.config({**defaults, "attention_bias": True, **hf}, rope_fraction=0.5)
    place = "both" if hf["model_type"] == "glm4" else "before"
    return replace(plain, rope_interleaved=True, norm_position=place, o_bias=False, mlp_bias=False)


def rules(config: Config) -> list[Rule]:
    """Gate and up are concatenated; q, k and v are not."""
    names = llama.ATTENTION | {"mlp.down_proj": "mlp.down_proj"} | llama.NORMS
    if config.norm_position == "both":
        names |= {"attention_post_norm": "post_self_attn_layernorm", "mlp_post_norm": "post_mlp_layernorm"}
    return [*llama.ends(config), *llama.named(names), *gate_up(config)]
