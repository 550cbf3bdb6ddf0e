"""Mellum 2 (JetBrains, 2026): Qwen3's mixtures with sliding windows, whose layers have a rotation
of their own."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rule
from litft.families import deepseek, llama, qwen2_moe
from litft.families.family import Family
from litft.families.qwen2_moe import peft_rules
from litft.model.config import Config, ExpertsConfig, LayerConfig
from litft.model.rope_config import RopeConfig

DEFAULTS = dict(
    num_key_value_heads=4, head_dim=128, sliding_window=1024, max_position_embeddings=131072
)
# transformers' default bases of RoPE for each kind of layer
ROPES = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' MellumConfig."""
    hf = {**DEFAULTS, **hf}
    base = llama.config({**hf, "rope_parameters": None})
    ropes = {**ROPES, **llama.ropes_by_type(hf)}
    # the name in transformers 5
    count = hf.get("num_local_experts", hf.get("num_experts", 64))
    experts = ExpertsConfig(
        count,
        hf.get("num_experts_per_tok", 8),
        llama.one_size({"moe_intermediate_size": 896, **hf}, "moe_intermediate_size"),
        hf.get("norm_topk_prob", True),
    )
    # by default, all layers have full attention
    sliding = llama.sliding_layers(hf, lambda index: False)
    full = _rotated(base, hf, ropes["full_attention"])
    local = _rotated(base, hf, ropes["sliding_attention"])
    local = replace(local, window=hf["sliding_window"])
    layers = [local if slides else full for slides in sliding]
    layers = deepseek.sparse_layers({"first_k_dense_replace": 0, **hf}, layers, experts)
    return replace(base, layers=layers, qk_norm=base.norm, mlp_bias=False)


def _rotated(base: Config, hf: dict[str, Any], parameters: dict[str, Any]) -> LayerConfig:
    """Return a layer with the RoPE of these parameters."""
    rope = RopeConfig.from_hf({**hf, "rope_parameters": parameters}, base.head_dim)
    return replace(base.layers[0], rope=rope)


def rules(config: Config) -> list[Rule]:
    """Return the rules of Qwen3's mixtures."""
    return [*llama.drop_mtp(config), *qwen2_moe.rules(config)]


FAMILY = Family(
    model_types=("mellum",),
    config=config,
    rules=rules,
    peft_rules=peft_rules,
)
