"""Mellum 2 (JetBrains, 2026): Qwen3's mixtures with sliding windows, whose layers have a rotation
of their own."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rule
from litft.families import deepseek, llama, mixtral, qwen2_moe
from litft.families.qwen2_moe import gguf_rules, peft_rules
from litft.model.config import Config, ExpertsConfig
from litft.model.rope_config import RopeConfig

__all__ = ["MODEL_TYPES", "config", "gguf_rules", "peft_rules", "rules"]

MODEL_TYPES = ("mellum",)
GGUF = {"mellum": ("mellum", "MellumForCausalLM")}
GGUF_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
GGUF_FIELDS = GGUF_EXPERTS | llama.GGUF_WINDOWS

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
    count = hf.get("num_local_experts", hf.get("num_experts", 64))  # the name in transformers 5
    experts = ExpertsConfig(
        count,
        hf.get("num_experts_per_tok", 8),
        llama.one_size({"moe_intermediate_size": 896, **hf}, "moe_intermediate_size"),
        hf.get("norm_topk_prob", True),
    )
    # by default, all layers have full attention
    sliding = llama.sliding_layers(hf, lambda index: False)
    rotations = {
        slides: RopeConfig.from_hf({**hf, "rope_parameters": ropes[kind]}, base.head_dim)
        for kind, slides in (("full_attention", False), ("sliding_attention", True))
    }
    layers = [
        replace(
            base.layers[0], rope=rotations[slides], window=hf["sliding_window"] if slides else None
        )
        for slides in sliding
    ]
    layers = deepseek.sparse_layers({"first_k_dense_replace": 0, **hf}, layers, experts)
    return replace(base, layers=layers, qk_norm=base.norm, mlp_bias=False)


def rules(config: Config) -> list[Rule]:
    """Return the rules of Qwen3's mixtures."""
    return [*llama.drop_mtp(config), *qwen2_moe.rules(config)]


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return the sizes of the experts, and which layers have windows; raise ValueError for dense
    layers."""
    if not all(layer.experts for layer in config.layers):
        raise ValueError(
            "llama.cpp's architecture mellum has experts in every layer; keep the Hugging Face "
            "folder"
        )
    return mixtral.gguf_sizes(config, GGUF_EXPERTS) | llama.gguf_windows(config)


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the rotation of each kind of layer: of one theta, scaled in full
    attention only."""
    ropes = llama.gguf_ropes(hf)
    return llama.gguf_layer_types(hf) | ropes | {"norm_topk_prob": True}
