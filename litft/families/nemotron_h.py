"""Nemotron-H and Nemotron 3 (arXiv 2504.03624): a block is Mamba-2, attention without RoPE, an
ungated MLP, or experts."""

import math
from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rename, Rule
from litft.families import bamba, deepseek, llama, mixtral
from litft.families.family import Family
from litft.model.config import Config, Mamba2Config

# the kinds of blocks in older files, one character each
KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
NAMES = {"mamba": "linear_attention", "attention": "full_attention"}  # in older files
FIELDS = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_min": "time_step_min",
}


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' NemotronHConfig."""
    hf = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "mlp_hidden_act": "relu2",
        **hf,
    }
    # names that some files have instead
    hf |= {name: hf[old] for old, name in FIELDS.items() if old in hf}
    if hf.get("moe_latent_size") is not None:
        raise ValueError(
            f"config.json: moe_latent_size {hf['moe_latent_size']!r} is not supported"
        )
    kinds = _kinds(hf)
    eps = hf.get("layer_norm_epsilon", 1e-5)
    bias = hf.get("use_bias", False)
    hf |= dict(
        num_hidden_layers=len(kinds), hidden_act=hf["mlp_hidden_act"], rms_norm_eps=eps
    )
    base = llama.config({"intermediate_size": 21504, **hf})
    mamba = Mamba2Config(
        hf.get("mamba_num_heads", 128),
        hf.get("mamba_head_dim", 64),
        hf.get("n_groups", 8),
        hf.get("ssm_state_size", 128),
        hf.get("conv_kernel", 4),
        eps,
        bias=bias,
        out_bias=bias,
        conv_bias=hf.get("use_conv_bias", True),
        # as in transformers, whatever time_step_limit says
        step_limits=(hf.get("time_step_min", 0.001), math.inf),
    )

    # a block has only one part: a mixer, attention, an MLP or experts; none has RoPE
    layer = replace(base.layers[0], rope=None)
    layers = {
        "linear_attention": replace(layer.with_mixer(mamba), mlp=False),
        "full_attention": replace(layer, mlp=False),
        "mlp": replace(layer, attention=False),
    }
    if "moe" in kinds:
        fields = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=7688)
        shared_dim = hf.get("moe_shared_expert_intermediate_size", 7688)
        # the shared expert has a width of its own
        experts = replace(deepseek.routed_experts({**fields, **hf}), shared_dim=shared_dim)
        layers["moe"] = replace(layer, attention=False, experts=experts)
    return replace(base, layers=tuple(layers[kind] for kind in kinds), gated=False)


def _kinds(hf: dict[str, Any]) -> list[str]:
    """Return the kind of each block."""
    # older files have the kinds as one text
    types: list[str] | None = hf.get("layer_types") or hf.get("layers_block_type")
    pattern: str = hf.get("hybrid_override_pattern") or "ME*-"
    if types:
        kinds = [NAMES.get(kind, kind) for kind in types]
    else:
        kinds = [KINDS.get(character, character) for character in pattern]
    unknown = []
    for kind in kinds:
        if kind not in KINDS.values():
            unknown.append(kind)
    if unknown:
        raise ValueError(
            f"config.json: block type {unknown[0]!r} is not supported; known: "
            f"{', '.join(KINDS.values())}"
        )
    return kinds


def rules(config: Config, model: str = "backbone.") -> list[Rule]:
    """Return the rules; the files call every part of a block its mixer. model: the prefix of all
    names but the head's."""
    layers = f"{model}layers."
    # patterns of the layers of each kind
    mixers = llama.layers_with(config, lambda x: x.mixer, layers)
    attention = llama.layers_with(config, lambda x: x.attention, layers)
    dense = llama.layers_with(config, lambda x: x.mlp and not x.experts, layers)
    sparse = llama.layers_with(config, lambda x: x.experts, layers)

    # the same name means another part in each kind of block
    by_kind: list[Rule] = []
    if bamba.mixer_of(config):
        by_kind += [
            *bamba.mamba_rules(config, f"{mixers}mixer."),
            *llama.rename_modules({"attention_norm": "norm"}, mixers),
        ]
    if any(layer.attention for layer in config.layers):
        names = {f"attention.{n}_proj": f"mixer.{n}_proj" for n in "qkvo"}
        names["attention_norm"] = "norm"
        by_kind += llama.rename_modules(names, attention)
    if any(layer.mlp and not layer.experts for layer in config.layers):
        names = {"mlp.up_proj": "mixer.up_proj", "mlp.down_proj": "mixer.down_proj"}
        names["mlp_norm"] = "norm"
        by_kind += llama.rename_modules(names, dense)
    if mixtral.experts_of(config):
        # MLPs without a gate
        names = {
            "mlp.shared.up_proj": "mixer.shared_experts.up_proj",
            "mlp.shared.down_proj": "mixer.shared_experts.down_proj",
            "mlp_norm": "norm",
            "mlp.router": "mixer.gate",
        }
        projections = {"up": "up_proj", "down": "down_proj"}
        by_kind += [
            *llama.rename_modules(names, sparse),
            Rename(
                f"{sparse}mixer.gate.e_score_correction_bias",
                "blocks.{}.mlp.correction_bias",
            ),
            *mixtral.stacked_experts(config, f"{sparse}mixer.experts.{{}}.", projections),
        ]
    return [
        *by_kind,
        *llama.embedding_and_head(config, model, "embeddings", "norm_f"),
    ]


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for PEFT's names: transformers has another prefix in memory, and stacks the
    experts."""
    sparse = llama.layers_with(config, lambda x: x.experts, "model.layers.")
    stacks: list[Rule] = []
    if mixtral.experts_of(config):
        moe = "blocks.{}.mlp.experts."
        stacks = [
            Rename(f"{sparse}mixer.experts.up_proj", f"{moe}up_proj.weight"),
            Rename(f"{sparse}mixer.experts.down_proj", f"{moe}down_proj.weight"),
        ]
    return [*stacks, *rules(config, "model.")]


FAMILY = Family(
    model_types=("nemotron_h",),
    config=config,
    rules=rules,
    peft_rules=peft_rules,
)
