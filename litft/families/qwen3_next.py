"""Qwen3-Next and Qwen3.5 (2025): three of four layers are Gated DeltaNets, attention is gated,
norms are stored minus 1."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Drop, Rename, Rule, Split
from litft.families import llama, mixtral, qwen2_moe
from litft.families.family import Family
from litft.families.qwen2_moe import peft_rules
from litft.model.config import Config, DeltaNetConfig

# multimodal model types -> the class of their language model
TEXT_MODELS = {"qwen3_5": "Qwen3_5ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForCausalLM"}
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3_next": dict(num_key_value_heads=2, num_experts=512, num_experts_per_tok=10),
    "qwen3_5_text": dict(num_key_value_heads=4, num_experts=0),
    "qwen3_5_moe_text": dict(
        num_key_value_heads=2, num_experts=256, num_experts_per_tok=8, intermediate_size=1
    ),
}
MODEL = "{model.|model.language_model.}"


def text_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the text model if `hf` is a multimodal model's, otherwise `hf`."""
    model_type = hf["model_type"]
    architecture = TEXT_MODELS.get(model_type)
    if architecture:
        return llama.text_model_config(hf, f"{model_type}_text", architecture)
    return hf


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' classes for these model
    types."""
    model_type = hf["model_type"]
    hf = {"head_dim": 256, "max_position_embeddings": 32768, **DEFAULTS[model_type], **hf}
    shared = dict(
        moe_intermediate_size=512, shared_expert_intermediate_size=512, norm_topk_prob=True
    )
    base = llama.config(hf, rope_fraction=0.25)
    hf = {**shared, **hf}
    # Qwen3.5's routers always normalize, whatever the file says
    if model_type.startswith("qwen3_5"):
        hf["norm_topk_prob"] = True
    # Qwen3.5's dense models have 0 experts
    if hf["num_experts"]:
        experts = qwen2_moe.layer_experts(hf, True)
    else:
        experts = [None] * len(base.layers)
    delta = DeltaNetConfig(
        hf.get("linear_num_value_heads", 32),
        hf.get("linear_num_key_heads", 16),
        hf.get("linear_key_head_dim", 128),
        hf.get("linear_value_head_dim", 128),
        hf.get("linear_conv_kernel_dim", 4),
        base.norm.eps,
    )
    interval = hf.get("full_attention_interval", 4)
    # norms multiply by 1 + weight, except those of the delta nets
    norm = replace(base.norm, offset=1.0)
    is_linear = llama.linear_layers(hf, lambda n: (n + 1) % interval != 0)
    layers = []
    for layer, linear, mixture in zip(base.layers, is_linear, experts, strict=True):
        if linear:
            layer = layer.with_mixer(delta)
        layers.append(replace(layer, experts=mixture))
    base = replace(base, layers=tuple(layers), norm=norm, qk_norm=norm)
    return replace(base, attention_gate=True, mlp_bias=False)


def rules(config: Config) -> list[Rule]:
    """Return the rules; queries and gates alternate by head, Qwen3-Next fuses the projections by
    key head."""
    delta = delta_of(config)
    prefix = "blocks.{}.mixer."
    q_gate = ("blocks.{}.attention.q_proj.weight", "blocks.{}.attention.gate_proj.weight")
    widths = _projected_widths(delta)
    convs = (
        f"{prefix}query_conv.weight",
        f"{prefix}key_conv.weight",
        f"{prefix}value_conv.weight",
    )
    layers = f"{MODEL}layers.{{}}."
    linear = f"{layers}linear_attn."
    return [
        Split(
            f"{layers}self_attn.q_proj.weight",
            q_gate,
            (config.head_dim,) * 2,
            config.n_heads,
        ),
        *_projection_rules(config, linear, prefix),
        Split(f"{linear}conv1d.weight", convs, widths, squeezed=1),
        Rename(f"{linear}A_log", f"{prefix}log_rate"),
        Rename(f"{linear}dt_bias", f"{prefix}decay_bias"),
        *llama.rename_modules({"mixer.out_proj": "out_proj", "mixer.norm": "norm"}, linear),
        *qwen2_moe.rules(config, MODEL),
        # the published layout of Qwen3.5; transformers 5 writes every expert
        *mixtral.fused_experts(config, f"{layers}mlp.experts."),
        Drop("model.visual.{*}"),
    ]


def _projected_widths(delta: DeltaNetConfig) -> tuple[int, int, int]:
    """Return the widths of all queries, keys and values of a linear layer."""
    key_width = delta.n_key_heads * delta.key_dim
    return key_width, key_width, delta.n_heads * delta.value_dim


def _projection_rules(config: Config, linear: str, prefix: str) -> list[Rule]:
    """Return the rules of a linear layer's projections; linear, prefix: the beginnings of their
    names in a file and here."""
    delta = delta_of(config)
    parts = [f"{prefix}{name}_proj.weight" for name in ("query", "key", "value", "gate")]
    if config.model_type == "qwen3_next":
        # for each key head: its query, its key, then the values and gates of its value heads
        values = delta.n_heads // delta.n_key_heads
        sizes = (
            delta.key_dim,
            delta.key_dim,
            values * delta.value_dim,
            values * delta.value_dim,
        )
        decays = (f"{prefix}beta_proj.weight", f"{prefix}decay_proj.weight")
        return [
            Split(f"{linear}in_proj_qkvz.weight", tuple(parts), sizes, delta.n_key_heads),
            Split(
                f"{linear}in_proj_ba.weight", decays, (values, values), delta.n_key_heads
            ),
        ]
    names = {
        "mixer.gate_proj": "in_proj_z",
        "mixer.beta_proj": "in_proj_b",
        "mixer.decay_proj": "in_proj_a",
    }
    return [
        Split(f"{linear}in_proj_qkv.weight", tuple(parts[:3]), _projected_widths(delta)),
        *llama.rename_modules(names, linear),
    ]


def delta_of(config: Config) -> DeltaNetConfig:
    """Return the config of the delta nets; raise ValueError if there are none."""
    for layer in config.layers:
        if isinstance(layer.mixer, DeltaNetConfig):
            return layer.mixer
    raise ValueError(
        "config.json: layer_types has no linear_attention; for attention alone, use a Qwen3 model"
    )


FAMILY = Family(
    model_types=(
        "qwen3_next",
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "qwen3_5",
        "qwen3_5_moe",
    ),
    config=config,
    rules=rules,
    text_config=text_config,
    peft_rules=peft_rules,
    has_text_class=True,
)
