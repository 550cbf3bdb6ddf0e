"""GPT-NeoX (arXiv 2204.06745): Pythia, RedPajama-INCITE, Dolly v2, StableLM-alpha, open-calm."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Drop, Rule
from litft.families import llama
from litft.families.family import Family
from litft.families.phi3 import fused_qkv
from litft.model.config import Config, NormConfig


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' GPTNeoXConfig."""
    theta = hf.get("rotary_emb_base", 10000.0)
    fraction = hf.get("rotary_pct", 0.25)
    # the family has rotary_emb_base and rotary_pct instead
    overrides = dict(num_key_value_heads=None, rope_theta=None, partial_rotary_factor=None)
    base = llama.config({"hidden_act": "gelu", **hf, **overrides}, theta, fraction)
    return replace(
        base,
        norm=NormConfig("layer", hf.get("layer_norm_eps", 1e-5), bias=True),
        gated=False,
        parallel=hf.get("use_parallel_residual", True),
        qkv_bias=hf.get("attention_bias", True),
        o_bias=hf.get("attention_bias", True),
        mlp_bias=True,
    )


def rules(config: Config) -> list[Rule]:
    """Return the rules; q, k and v are interleaved by head.

    The output head is embed_out in the files, lm_head in PEFT.
    """
    layers = "gpt_neox.layers.{}."
    names = {
        "attention.o_proj": "attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    }
    sizes = (config.head_dim,) * 3
    fused = fused_qkv(f"{layers}attention.query_key_value", sizes, config.n_heads)
    # causal masks and frequencies, which old files have
    buffers = [
        Drop(f"{layers}attention.bias"),
        Drop(f"{layers}attention.masked_bias"),
        Drop(f"{layers}attention.rotary_emb.inv_freq"),
    ]
    outer = llama.embedding_and_head(
        config, "gpt_neox.", "embed_in", "final_layer_norm", "{embed_out|lm_head}"
    )
    return [*outer, *llama.rename_modules(names | llama.NORMS, layers), *fused, *buffers]


def peft_rules(config: Config) -> list[Rule]:
    """Return the rule for PEFT's name of the output head."""
    return llama.rename_modules({"lm_head": "{lm_head|embed_out}"}, "", "")


FAMILY = Family(
    model_types=("gpt_neox",),
    config=config,
    rules=rules,
    peft_rules=peft_rules,
)
