"""StableLM 3B-4e1t, StableLM Zephyr, StableLM 2, Stable Code (arXiv 2402.17834); StableLM-alpha
uses gpt_neox.py."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rule, Stack
from litft.families import llama
from litft.families.family import Family
from litft.model.config import Config, NormConfig


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' StableLmConfig."""
    eps = hf.get("layer_norm_eps", 1e-5)
    parallel = hf.get("use_parallel_residual", False)
    base = llama.config({"max_position_embeddings": 4096, **hf}, rope_fraction=0.25)
    qk_norm = NormConfig("layer", eps) if hf.get("qk_layernorm", False) else None
    return replace(
        base,
        norm=NormConfig("layer", eps, bias=True),
        parallel=parallel,
        shared_norm=parallel,
        qkv_bias=hf.get("use_qkv_bias", False),
        o_bias=False,
        mlp_bias=False,
        qk_norm=qk_norm,
        qk_norm_over="heads",
    )


def rules(config: Config) -> list[Rule]:
    """Return the rules, which only rename, except that the q/k norms of each head are stored
    separately."""
    # with parallel attention and MLP, both read the output of one norm
    if config.shared_norm:
        norms = {"attention_norm": "input_layernorm"}
    else:
        norms = llama.NORMS
    # a norm for each head in the files, one tensor for all heads here
    hf_prefix = "model.layers.{}.self_attn."
    prefix = "blocks.{}.attention."
    qk_norms = [
        Stack(
            f"{hf_prefix}q_layernorm.norms.{{}}.weight",
            f"{prefix}q_norm.weight",
            config.n_heads,
        ),
        Stack(
            f"{hf_prefix}k_layernorm.norms.{{}}.weight",
            f"{prefix}k_norm.weight",
            config.n_kv_heads,
        ),
    ]
    return [
        *llama.embedding_and_head(config),
        *llama.rename_modules(llama.ATTENTION | llama.MLP | norms),
        *qk_norms,
    ]


FAMILY = Family(
    model_types=("stablelm",),
    config=config,
    rules=rules,
)
