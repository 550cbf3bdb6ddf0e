"""gpt-oss 20B and 120B (arXiv 2508.10925): attention sinks, alternating windows, clamped experts,
MXFP4 files."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Dequantize, Rename, Rule, Split
from litft.families import llama
from litft.families.family import Family
from litft.model.config import Config, ExpertsConfig

# gpt-oss's RoPE if the file does not specify it
YARN = dict(
    rope_type="yarn",
    factor=32.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=4096,
)


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' GptOssConfig."""
    defaults = dict(
        num_key_value_heads=8,
        head_dim=64,
        sliding_window=128,
        rms_norm_eps=1e-5,
        attention_bias=True,
    )
    hf = {**defaults, "max_position_embeddings": 131072, **hf}
    # the default is a scaled RoPE
    if not llama.names_rope(hf):
        hf["rope_parameters"] = {**YARN, "rope_theta": hf.get("rope_theta", 150000.0)}
    if hf.get("swiglu_alpha", 1.702) != 1.702:
        raise ValueError(
            f"config.json: swiglu_alpha {hf['swiglu_alpha']!r} is not supported; it must be 1.702"
        )
    # x sigmoid(1.702 x) is the quick form of GELU
    base = llama.config({**hf, "hidden_act": "quick_gelu"}, rope_theta=150000.0)
    experts = ExpertsConfig(
        hf.get("num_local_experts", 128),
        hf.get("num_experts_per_tok", 4),
        base.hidden_dim,
        renormalize=True,
        router_bias=True,
        bias=True,
    )
    windows = llama.layer_windows(hf, lambda index: index % 2 == 0)
    base = replace(base, layers=llama.changed_layers(base, experts=experts))
    return replace(
        base,
        layers=llama.windowed_layers(base, windows),
        sinks=True,
        mlp_bias=False,
        activation_limit=hf.get("swiglu_limit", 7.0),
    )


def rules(config: Config) -> list[Rule]:
    """Return the rules; stacked experts are (in, out), or (out, in) if quantized.

    Rows of gate and up alternate.
    """
    expert_rules = _expert_rules(config)
    quantized = []
    for rule in expert_rules:
        if rule.transposed:
            quantized.append(Dequantize(replace(rule, transposed=False)))
    return [
        *llama.rules(config),
        *llama.rename_modules({"mlp.router": "mlp.router"}),
        Rename("model.layers.{}.self_attn.sinks", "blocks.{}.attention.sinks"),
        *expert_rules,
        *quantized,
    ]


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for PEFT's names of the experts, which are those of the unquantized
    files."""
    return [*_expert_rules(config)]


def _expert_rules(config: Config) -> list[Rename | Split]:
    """Return the rules for the experts of unquantized files."""
    hf_prefix = "model.layers.{}.mlp.experts."
    prefix = "blocks.{}.mlp.experts."

    def gate_up_names(leaf: str) -> tuple[str, str]:
        return (f"{prefix}gate_proj.{leaf}", f"{prefix}up_proj.{leaf}")

    # rows of gate and up alternate: groups of one row each, as many as the MLP is wide
    return [
        Split(
            f"{hf_prefix}gate_up_proj",
            gate_up_names("weight"),
            (1, 1),
            config.hidden_dim,
            transposed=True,
        ),
        Split(
            f"{hf_prefix}gate_up_proj_bias",
            gate_up_names("bias"),
            (1, 1),
            config.hidden_dim,
        ),
        Rename(f"{hf_prefix}down_proj", f"{prefix}down_proj.weight", transposed=True),
        Rename(f"{hf_prefix}down_proj_bias", f"{prefix}down_proj.bias"),
    ]


FAMILY = Family(
    model_types=("gpt_oss",),
    config=config,
    rules=rules,
    peft_rules=peft_rules,
)
