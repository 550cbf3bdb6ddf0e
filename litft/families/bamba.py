"""Bamba, Falcon-H1 (arXiv 2507.22448) and Mamba-2 (arXiv 2405.21060); other hybrids use
`mamba_config` and `mamba_rules`."""

import math
from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rename, Rule, Split, Squeeze
from litft.families import llama
from litft.families.family import Family
from litft.model.config import Config, Mamba2Config, NormConfig

# litft's module names -> the files'; the MLP has its own, unlike attention
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}
MLP = llama.mlp_names("mlp", "feed_forward")


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' BambaConfig,
    FalconH1Config and Mamba2Config."""
    if hf["model_type"] == "mamba2":
        return _pure_config(hf)
    is_falcon = hf["model_type"] == "falcon_h1"
    hf = {"mamba_d_ssm": 1024, **hf} if is_falcon else hf
    hf = {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192 if is_falcon else 262144,
        **hf,
    }
    # Bamba rotates half of each head, whatever the file says, as in transformers
    if is_falcon:
        base = llama.config(hf)
    else:
        base = llama.config({**hf, "partial_rotary_factor": 0.5}, rope_fraction=0.5)
    mamba = mamba_config(hf, base.norm.eps)
    if is_falcon:
        return _falcon_config(hf, base, mamba)
    # all other layers are Mamba-2
    attention = hf.get("attn_layer_indices") or ()
    layers = []
    for index, layer in enumerate(base.layers):
        if index not in attention:
            layer = layer.with_mixer(mamba)
        layers.append(layer)
    return replace(base, layers=tuple(layers))


def mamba_config(hf: dict[str, Any], eps: float) -> Mamba2Config:
    """Return the Mamba-2 mixer of a hybrid model, whose fields begin with mamba_."""
    heads = hf.get("mamba_n_heads", 128)
    head_dim = hf.get("mamba_d_head", "auto")
    width = hf.get("mamba_d_ssm") or hf.get("mamba_expand", 2) * hf["hidden_size"]
    bias = hf.get("mamba_proj_bias", False)
    if head_dim == "auto":
        head_dim = width // heads
    return Mamba2Config(
        heads,
        head_dim,
        hf.get("mamba_n_groups", 1),
        hf.get("mamba_d_state", 256),
        hf.get("mamba_d_conv", 4),
        eps,
        bias=bias,
        out_bias=bias,
        conv_bias=hf.get("mamba_conv_bias", True),
        step_limits=step_limits(hf),
    )


def step_limits(hf: dict[str, Any]) -> tuple[float, float]:
    """Return the limits of step sizes; JSON has no infinity, for which transformers writes an
    object."""
    limits = []
    for limit in hf.get("time_step_limit") or (0.0, math.inf):
        if isinstance(limit, dict):
            limit = limit.get("__float__")
        limits.append(limit)
    low, high = limits
    return float(low), float(high)


def _falcon_config(hf: dict[str, Any], base: Config, mamba: Mamba2Config) -> Config:
    """Return Falcon-H1's config: attention and Mamba-2 side by side in each layer, with muP
    scales."""
    key = hf.get("key_multiplier", 1.0)
    into = hf.get("attention_in_multiplier", 1.0)
    out = hf.get("attention_out_multiplier", 1.0)
    # the scale of the input is applied to whole queries,
    # keys and values below, and so to their biases, too
    if into != 1 and base.qkv_bias:
        raise ValueError(
            f"config.json: attention_in_multiplier {into!r} is not supported with attention_bias"
        )
    # Falcon-H1 scales what enters the mixer, the five parts of its projection, and what leaves it
    mamba = replace(
        mamba,
        out_bias=hf.get("projectors_bias", False),
        norm=hf.get("mamba_rms_norm", False),
        gate_first=not hf.get("mamba_norm_before_gate", True),
        input_scale=hf.get("ssm_in_multiplier", 1.0),
        output_scale=hf.get("ssm_out_multiplier", 1.0),
        scales=tuple(hf.get("ssm_multipliers") or (1.0,) * 5),
    )
    # queries and keys are linear in the attention's input
    scale = base.head_dim**-0.5 * key * into * into
    gate, down = hf.get("mlp_multipliers") or (1.0, 1.0)
    return replace(
        base,
        layers=llama.changed_layers(base, mixer=mamba, attention_scale=scale),
        # values are linear in the attention's input, too
        attention_out_scale=into * out,
        mlp_gate_scale=gate,
        mlp_out_scale=down,
        embed_scale=hf.get("embedding_multiplier", 1.0),
        noise_after="lookup",
        logit_scale=hf.get("lm_head_multiplier", 1.0),
    )


def _pure_config(hf: dict[str, Any]) -> Config:
    """Return the config of a Mamba-2 without attention and MLPs."""
    defaults = dict(
        expand=2,
        num_heads=128,
        head_dim=64,
        n_groups=8,
        state_size=128,
        conv_kernel=4,
        layer_norm_epsilon=1e-5,
    )
    hf = {**defaults, "num_hidden_layers": 64, **hf}
    eps = hf["layer_norm_epsilon"]
    bias = hf.get("use_bias", False)
    mamba = Mamba2Config(
        hf["num_heads"],
        llama.one_size(hf, "head_dim"),
        hf["n_groups"],
        hf["state_size"],
        hf["conv_kernel"],
        eps,
        bias=bias,
        out_bias=bias,
        conv_bias=hf.get("use_conv_bias", True),
        step_limits=step_limits(hf),
    )
    # what `llama.config` needs to know of attention and MLPs, which this network does not have
    unused = dict(
        num_attention_heads=1,
        num_key_value_heads=1,
        intermediate_size=1,
        max_position_embeddings=1 << 20,
    )
    base = llama.config({**hf, **unused, "head_dim": 2, "rms_norm_eps": eps})
    layer = replace(base.layers[0].with_mixer(mamba), mlp=False)
    return replace(base, layers=(layer,) * len(base.layers), norm=NormConfig("rms", eps))


def mamba_rules(config: Config, hf_prefix: str) -> list[Rule]:
    """Return the rules of Mamba-2 mixers, none without mixers; hf_prefix: the prefix of their names
    in the files."""
    mamba = mixer_of(config)
    prefix = "blocks.{}.mixer."
    if mamba is None:
        return []
    return [
        fused_projection(mamba, f"{hf_prefix}in_proj", "weight"),
        fused_projection(mamba, f"{hf_prefix}in_proj", "bias"),
        *llama.rename_modules({"out_proj": "out_proj", "norm": "norm"}, hf_prefix, prefix),
        # a depthwise convolution has a single input channel
        Squeeze(f"{hf_prefix}conv1d.weight", f"{prefix}conv.weight", (1,)),
        Rename(f"{hf_prefix}conv1d.bias", f"{prefix}conv.bias"),
        Rename(f"{hf_prefix}A_log", f"{prefix}log_rate"),
        Rename(f"{hf_prefix}dt_bias", f"{prefix}step_bias"),
        Rename(f"{hf_prefix}D", f"{prefix}skip"),
    ]


def fused_projection(mamba: Mamba2Config, stored: str, leaf: str) -> Split:
    """Return the rule for the projection to gate, convolution and step sizes, which files store as
    one."""
    # the convolution runs over the values, and the inputs and outputs of the state of each group
    width = mamba.n_heads * mamba.head_dim
    sizes = (width, width + 2 * mamba.n_groups * mamba.state_dim, mamba.n_heads)
    prefix = "blocks.{}.mixer."
    names = (
        f"{prefix}gate_proj.{leaf}",
        f"{prefix}conv_proj.{leaf}",
        f"{prefix}step_proj.{leaf}",
    )
    return Split(f"{stored}.{leaf}", names, sizes)


def rules(config: Config) -> list[Rule]:
    """Return the rules for Llama's names with another MLP, and those of Mamba-2."""
    # each block is a mixer with one norm before it
    if config.model_type == "mamba2":
        outer = llama.embedding_and_head(config, "backbone.", "embeddings", "norm_f")
        layers = "backbone.layers.{}."
        return [
            *outer,
            *mamba_rules(config, f"{layers}mixer."),
            *llama.rename_modules({"attention_norm": "norm"}, layers),
        ]
    outer = llama.embedding_and_head(config, norm="final_layernorm")
    return [
        *outer,
        *mamba_rules(config, "model.layers.{}.mamba."),
        *llama.rename_modules(llama.ATTENTION | MLP | NORMS),
    ]


def mixer_of(config: Config) -> Mamba2Config | None:
    """Return the Mamba-2 mixer that all such layers share, or None; Granite 4 Micro has attention
    only."""
    for layer in config.layers:
        if isinstance(layer.mixer, Mamba2Config):
            return layer.mixer
    return None


FAMILY = Family(
    model_types=("bamba", "falcon_h1", "mamba2"),
    config=config,
    rules=rules,
)
