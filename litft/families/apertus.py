"""Apertus 8B and 70B (arXiv 2509.14233): an ungated MLP with xIELU, norms of queries and keys,
Llama 3's RoPE."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rename, Rule
from litft.families import llama
from litft.families.family import Family
from litft.model.config import Config

# transformers' names first; some files have Llama's
NORMS = {"attention_norm": "{attention_layernorm|input_layernorm}"}
NORMS |= {"mlp_norm": "{feedforward_layernorm|post_attention_layernorm}"}
ROPE = dict(
    rope_type="llama3", rope_theta=12e6, factor=8.0, original_max_position_embeddings=8192
)
ROPE |= dict(low_freq_factor=1.0, high_freq_factor=4.0)


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' ApertusConfig."""
    hf = {
        "hidden_act": "xielu",
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        **hf,
    }
    if not llama.names_rope(hf):
        # as in transformers, also beside a rope_theta
        hf["rope_parameters"] = ROPE
    base = llama.config(hf, rope_theta=12e6)
    return replace(base, gated=False, mlp_bias=False, qk_norm=base.norm)


def rules(config: Config) -> list[Rule]:
    """Return the rules for Llama's names, with other norms and the activation's scalars."""
    # xIELU trains the first two, the others are constants of its own
    scalars = ("alpha_p", "alpha_n", "beta", "eps")
    hf_prefix = "model.layers.{}.mlp.act_fn."
    prefix = "blocks.{}.mlp.activation."
    activation = [Rename(hf_prefix + name, prefix + name) for name in scalars]
    return [*llama.rules(config, norms=NORMS), *activation]


FAMILY = Family(
    model_types=("apertus", "apertus1p5_text"),
    config=config,
    rules=rules,
)
