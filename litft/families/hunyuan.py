"""Hunyuan dense and A13B (Tencent, arXiv 2505.15431): norms of rotated queries and keys; a mixture
with a shared expert."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rename, Rule
from litft.families import llama, mixtral
from litft.families.family import Family
from litft.model.config import Config, ExpertsConfig

NORMS = {
    "attention.q_norm": "self_attn.query_layernorm",
    "attention.k_norm": "self_attn.key_layernorm",
}


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of HunYuanDenseV1Config and
    HunYuanMoEV1Config."""
    hf = {"rms_norm_eps": 1e-5, **hf}
    base = llama.config(_without_alpha(hf))
    base = replace(base, mlp_bias=False, qk_norm=base.norm, qk_norm_after_rope=True)
    if hf["model_type"] == "hunyuan_v1_dense":
        return base

    # files may list these numbers by layer
    counts = {name: hf.get(name, 1) for name in ("num_experts", "moe_topk")}
    for name, value in counts.items():
        if value is None:
            raise KeyError(name)
        if isinstance(value, list) and len(set(value)) == 1:  # one number a layer
            counts[name] = value[0]
        elif isinstance(value, list):
            raise ValueError(
                f"config.json: {name} must be the same in all layers, found {value!r:.200}"
            )
    experts = ExpertsConfig(
        counts["num_experts"],
        counts["moe_topk"],
        base.hidden_dim,
        renormalize=True,
        # the shared expert is as wide as one of the others
        shared_dim=base.hidden_dim,
    )
    return replace(base, layers=llama.changed_layers(base, experts=experts))


def _without_alpha(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with RoPE's base multiplied by the NTK-aware `alpha`, which stands in
    place of a factor."""
    key = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    scaling = hf.get(key) or {}
    if (
        not scaling.get("alpha")
        or scaling.get("rope_type", scaling.get("type")) != "dynamic"
    ):
        return hf
    dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    # this base makes the lowest frequency smaller by the factor alpha
    theta = scaling.get("rope_theta", hf.get("rope_theta") or 10000.0)
    theta = theta * scaling["alpha"] ** (dim / (dim - 2))
    return {**hf, key: {"rope_type": "default", "rope_theta": theta}}


def rules(config: Config) -> list[Rule]:
    """Return the rules for Llama's names, with other names of the norms and of the shared
    expert."""
    names = NORMS | llama.mlp_names("mlp.shared", "mlp.shared_mlp")
    return [
        Rename("model.layers.{}.mlp.gate.wg.weight", "blocks.{}.mlp.router.weight"),
        *llama.rename_modules(names),
        *llama.rules(config),
        *mixtral.stacked_experts(
            config, "model.layers.{}.mlp.experts.{}.", llama.PROJECTIONS
        ),
    ]


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for PEFT's names of experts."""
    return mixtral.fused_experts(config, "model.layers.{}.mlp.experts.")


FAMILY = Family(
    model_types=("hunyuan_v1_dense", "hunyuan_v1_moe"),
    config=config,
    rules=rules,
    peft_rules=peft_rules,
)
