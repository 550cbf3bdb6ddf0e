"""GLM-4.5 to 4.7 (arXiv 2508.06471), dots.llm1, Solar Open, Sarvam and K-EXAONE: DeepSeek V3's
experts with grouped attention."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rename, Rule, Split
from litft.families import deepseek, exaone4, llama
from litft.families.family import Family
from litft.model.config import Config

# transformers' defaults, where they differ from those of `llama` and `deepseek`
DEFAULTS: dict[str, dict[str, Any]] = {
    "glm4_moe": dict(
        num_key_value_heads=8,
        num_experts_per_tok=8,
        n_routed_experts=128,
        moe_intermediate_size=1408,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
    ),
    "dots1": dict(
        num_key_value_heads=32,
        n_shared_experts=None,
        moe_intermediate_size=1408,
        first_k_dense_replace=0,
        norm_topk_prob=False,
        sliding_window=4096,
    ),
    "exaone_moe": dict(
        num_key_value_heads=32,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=1024,
        routed_scaling_factor=2.5,
        rms_norm_eps=1e-5,
    ),
}
DEFAULTS["solar_open"] = DEFAULTS["glm4_moe"] | dict(
    head_dim=128,
    moe_intermediate_size=1280,
    intermediate_size=1280,
    first_k_dense_replace=0,
)
DEFAULTS["sarvam_moe"] = dict(
    num_key_value_heads=4,
    head_dim=64,
    num_experts=128,
    num_experts_per_tok=6,
    moe_intermediate_size=1024,
    routed_scaling_factor=2.5,
    max_position_embeddings=131072,
    rms_norm_eps=1e-6,
    use_qk_norm=True,
)
# share of a head that is rotated, and base of RoPE
ROPE = {"glm4_moe": (0.5, 1e4), "solar_open": (1.0, 1e6), "sarvam_moe": (1.0, 8e6)}
# litft's module names -> those of Sarvam's files, within a layer
SARVAM = {
    "attention.o_proj": "attention.dense",
    "attention.q_norm": "attention.query_layernorm",
    "attention.k_norm": "attention.key_layernorm",
}


QK_NORMS = {
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
}


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' classes for these model
    types."""
    model_type = hf["model_type"]
    hf = {"attention_bias": hf.get("use_qkv_bias", False), **DEFAULTS[model_type], **hf}
    is_glm = model_type in ROPE
    rope_fraction, theta = ROPE.get(model_type, (None, 1e4))
    base = llama.config(hf, theta, rope_fraction)
    # only files of GLM and Solar say whether queries and keys have norms
    has_qk_norm = hf.get("use_qk_norm", False) if is_glm else True
    base = replace(base, mlp_bias=False)
    if has_qk_norm:
        base = replace(base, qk_norm=base.norm)
    if is_glm:
        base = replace(base, o_bias=False)
    layers = list(base.layers)
    # K-EXAONE has EXAONE 4's attention: windows, and full attention without RoPE
    if model_type == "exaone_moe":
        base = replace(base, qkv_bias=False, o_bias=False)
        layers = list(exaone4.layers(hf, base))
    elif model_type == "dots1":
        first_window = hf.get("max_window_layers", 62)
        windows = llama.layer_windows(hf, lambda index: index >= first_window)
        layers = list(llama.windowed_layers(base, windows))
    return replace(
        base, layers=deepseek.sparse_layers(hf, layers, deepseek.routed_experts(hf))
    )


def rules(config: Config) -> list[Rule]:
    """Return the rules for Llama's names and separately stored experts."""
    bias = deepseek.BIAS
    if config.model_type == "exaone_moe":
        # the bias is beside the router, not a part of it
        bias = Rename("model.layers.{}.mlp.e_score_correction_bias", bias.name)
    own: list[Rule] = []
    if config.model_type == "sarvam_moe":
        bias = Rename("model.layers.{}.mlp.gate.expert_bias", bias.name)
        own = _sarvam_rules(config)
    return [
        *llama.drop_mtp(config),
        *own,
        *deepseek.mixture_rules(config, bias=bias),
        *llama.rules(config),
    ]


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for PEFT's names, which are transformers' names in memory: there, the bias
    is a part of the router."""
    if config.model_type == "sarvam_moe":
        names = {**llama.ATTENTION, **QK_NORMS}
        return [
            deepseek.BIAS,
            *deepseek.peft_rules(config),
            Rename("model.embed_tokens.weight", "embed.weight"),
            *llama.rename_modules(names),
        ]
    return [deepseek.BIAS, *deepseek.peft_rules(config)]


def _sarvam_rules(config: Config) -> list[Rule]:
    """Return the rules for the published names of Sarvam, which transformers 5 writes, too."""
    layer = "model.layers.{}."
    parts = tuple(f"blocks.{{}}.attention.{name}_proj.weight" for name in "qkv")
    widths = (config.n_heads * config.head_dim, *(config.n_kv_heads * config.head_dim,) * 2)
    return [
        Rename("model.word_embeddings.weight", "embed.weight"),
        Split(f"{layer}attention.query_key_value.weight", parts, widths),
        *llama.rename_modules(SARVAM, layer),
    ]


FAMILY = Family(
    model_types=("glm4_moe", "solar_open", "sarvam_moe", "dots1", "exaone_moe"),
    config=config,
    rules=rules,
    peft_rules=peft_rules,
)
