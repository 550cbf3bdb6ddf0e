"""LFM3 (Liquid AI, 2026): LFM2's short convolutions, sliding windows, a gate for each head, norms
before and after."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rule
from litft.families import lfm2, llama
from litft.families.family import Family
from litft.model.config import Config, ShortConvConfig
from litft.model.rope_config import RopeConfig

DEFAULTS = dict(
    num_key_value_heads=4,
    head_dim=128,
    max_position_embeddings=128000,
    tie_word_embeddings=True,
)
# transformers' defaults for each kind of attention
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
    },
}
KINDS: dict[str, str] = {kind: kind for kind in (*ROPES, "conv")}
NAMES = llama.QK_NORMS | {
    "attention.o_proj": "self_attn.o_proj",
    "attention.gate_proj": "self_attn.gate_proj",
}
NAMES |= {"attention_post_norm": "post_operator_norm", "mlp_post_norm": "post_ffn_norm"}


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' Lfm3Config."""
    hf = {**DEFAULTS, "rms_norm_eps": hf.get("norm_eps", 1e-5), **hf, "hidden_act": "silu"}
    base = llama.config({**hf, "rope_parameters": None})
    conv = ShortConvConfig(base.dim, hf.get("conv_L_cache", 7), hf.get("conv_bias", False))
    # groups of four layers: conv, conv, full attention,
    # conv; except in the first, a window begins them
    default = ("conv", "conv", "full_attention", "conv")

    def default_kind(index: int) -> str:
        if index and index % 4 == 0:
            return "sliding_attention"
        return default[index % 4]

    kinds = llama.layer_kinds(hf, KINDS, default_kind)
    ropes = {**ROPES, **llama.ropes_by_type(hf)}
    layers = []
    for kind in kinds:
        layer = base.layers[0]
        if kind == "conv":
            layers.append(layer.with_mixer(conv))
            continue
        parameters = {**hf, "rope_parameters": ropes[kind]}
        rope = RopeConfig.from_hf(parameters, base.head_dim, theta=1e6)
        if kind == "sliding_attention":
            window = hf.get("sliding_window", 256)
        else:
            window = None
        layers.append(replace(layer, rope=rope, window=window))
    gate = "head" if hf.get("use_attention_gate", True) else False
    norm_position = "both" if hf.get("use_sandwich_norm", True) else "before"
    return replace(
        base,
        layers=tuple(layers),
        qk_norm=base.norm,
        mlp_bias=False,
        attention_gate=gate,
        norm_position=norm_position,
    )


def rules(config: Config) -> list[Rule]:
    """Return LFM2's rules, with the names of the gate, and of the norms that follow."""
    return [*llama.rename_modules(NAMES), *lfm2.rules(config)]


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for transformers' name of the gate in memory."""
    return llama.rename_modules({"attention.gate_proj": "self_attn.g_proj"})


FAMILY = Family(
    model_types=("lfm3",),
    config=config,
    rules=rules,
    peft_rules=peft_rules,
)
