"""Kimi Linear 48B-A3B (arXiv 2510.26692): Kimi Delta Attention, every fourth layer latent attention
without RoPE."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rename, Rule, Squeeze
from litft.families import deepseek, llama, mixtral
from litft.families.family import Family
from litft.model.config import Config, DeltaNetConfig

NAMES = {
    "mixer.query_proj": "self_attn.q_proj",
    "mixer.key_proj": "self_attn.k_proj",
    "mixer.value_proj": "self_attn.v_proj",
    "mixer.beta_proj": "self_attn.b_proj",
    "mixer.decay_a_proj": "self_attn.f_a_proj",
    "mixer.decay_proj": "self_attn.f_b_proj",
    "mixer.gate_a_proj": "self_attn.g_a_proj",
    "mixer.gate_proj": "self_attn.g_b_proj",
    "mixer.norm": "self_attn.o_norm",
    "mixer.out_proj": "self_attn.o_proj",
}
CONVS = {"query": "q", "key": "k", "value": "v"}
FORGET_GATE = {"decay_a_proj": "f_a_proj", "decay_proj": "f_b_proj"}
MOE = "model.layers.{}.block_sparse_moe."
# fields of transformers' class -> those of published files
FIELDS = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "n_routed_experts": "num_experts",
}


# of transformers' KimiLinearConfig
DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "num_experts_per_tok": 8,
    "n_routed_experts": 256,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1024,
    "routed_scaling_factor": 2.446,
    "max_position_embeddings": 1048576,
}


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' KimiLinearConfig."""
    hf = _with_defaults(hf)
    linear = hf.get("linear_attn_config") or {}
    num_layers = hf["num_hidden_layers"]
    latent = deepseek.latent_config(hf)
    base = llama.config({**hf, "num_key_value_heads": None, "head_dim": latent.rope_dim})
    delta = _delta(hf, base.norm.eps)
    # the file counts layers from 1, the default rule of transformers from 0
    full = [index - 1 for index in linear.get("full_attn_layers", ())] or range(
        4, num_layers, 4
    )
    is_linear = llama.linear_layers(hf, lambda n: n not in full)
    # no RoPE: the delta nets show the order of the tokens
    attention = replace(base.layers[0], latent=latent, rope=None)
    layers = [attention.with_mixer(delta) if kind else attention for kind in is_linear]
    layers = deepseek.sparse_layers(hf, layers, deepseek.routed_experts(hf))
    return replace(base, mlp_bias=False, layers=layers)


def _with_defaults(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with those that are missing, and with the names of transformers' class."""
    # published files have other names
    published = {}
    for name, old in FIELDS.items():
        if hf.get(old) is not None:
            published[name] = hf[old]
    return {**DEFAULTS, **published, **hf}


def _delta(hf: dict[str, Any], eps: float) -> DeltaNetConfig:
    """Return Kimi Delta Attention's sizes, from either form of the file."""
    linear = hf.get("linear_attn_config") or {}
    heads = linear.get("num_heads", hf.get("linear_num_heads", 32))
    head_dim = linear.get("head_dim", hf.get("linear_head_dim", 128))
    conv_width = linear.get("short_conv_kernel_size", hf.get("linear_conv_kernel_dim", 4))
    # keys and values have the same heads, of the same size
    return DeltaNetConfig(heads, heads, head_dim, head_dim, conv_width, eps, row_decay=True)


def rules(config: Config) -> list[Rule]:
    """Return the rules; the files call every MLP block_sparse_moe."""
    mlp = llama.mlp_names("mlp", "block_sparse_moe")
    mlp |= llama.mlp_names("mlp.shared", "block_sparse_moe.shared_experts")
    mlp["mlp.router"] = "block_sparse_moe.gate"
    linear = llama.layers_with(config, lambda layer: layer.mixer)
    mixer = "blocks.{}.mixer."
    layers = f"{linear}self_attn."
    projections = {"gate": "w1", "up": "w3", "down": "w2"}
    convs = []
    for name, hf_name in CONVS.items():
        stored = f"{layers}{hf_name}_conv1d.weight"
        convs.append(Squeeze(stored, f"{mixer}{name}_conv.weight", (1,)))
    return [
        *llama.rename_modules(NAMES, linear),
        *llama.rename_modules(mlp | deepseek.LATENT),
        *convs,
        # (1, 1, heads, 1) in the files
        Squeeze(f"{layers}A_log", f"{mixer}log_rate", (0, 1, 3)),
        Rename(f"{layers}dt_bias", f"{mixer}decay_bias"),
        Rename(f"{MOE}gate.e_score_correction_bias", "blocks.{}.mlp.correction_bias"),
        *mixtral.stacked_experts(config, f"{MOE}experts.{{}}.", projections),
        *llama.rules(config),
    ]


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for PEFT's names: transformers renames these modules after loading."""
    linear = llama.layers_with(config, lambda layer: layer.mixer)
    # what differs from the files' names: the gates of the decay, and the MLPs
    forget = {}
    for name, hf_name in FORGET_GATE.items():
        forget[f"mixer.{name}"] = f"self_attn.forget_gate.{hf_name}"
    return [
        deepseek.BIAS,
        *deepseek.peft_rules(config),
        *llama.rename_modules(forget, linear),
        *llama.rename_modules(llama.MLP | deepseek.SHARED),
    ]


FAMILY = Family(
    model_types=("kimi_linear",),
    config=config,
    rules=rules,
    peft_rules=peft_rules,
)
