"""GGUF files of Kimi Linear 48B-A3B."""

from typing import Any

from litft.checkpoints.rules import Rename, Reshape, Rule
from litft.export.gguf.families import deepseek
from litft.export.gguf.families.family import GgufFamily
from litft.families import llama
from litft.families.kimi_linear import CONVS
from litft.model.config import Config, DeltaNetConfig, LatentConfig

GGUF = {"kimi_linear": ("kimi-linear", "KimiLinearForCausalLM")}
# without RoPE, there is no YaRN
GGUF_LATENT = {
    name: key for name, key in deepseek.GGUF_LATENT.items() if "yarn" not in name
}
GGUF_DELTA = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "kda.head_dim": "linear_head_dim",
}
GGUF_FIELDS = deepseek.GGUF_EXPERTS | GGUF_LATENT | GGUF_DELTA
GGUF_NAMES = {
    "mixer.query_proj": "attn_q",
    "mixer.key_proj": "attn_k",
    "mixer.value_proj": "attn_v",
    "mixer.beta_proj": "ssm_beta",
    "mixer.decay_a_proj": "ssm_f_a",
    "mixer.decay_proj": "ssm_f_b",
    "mixer.gate_a_proj": "ssm_g_a",
    "mixer.gate_proj": "ssm_g_b",
    "mixer.norm": "ssm_norm",
    "mixer.out_proj": "attn_output",
}


def _latent_and_delta(config: Config) -> tuple[LatentConfig, DeltaNetConfig]:
    """Return what the two kinds of layers have, latent attention and a delta net; raise ValueError
    for what llama.cpp does not have."""
    latent = None
    delta = None
    shared = 0
    # those of the first layer of each kind
    for layer in reversed(config.layers):
        if isinstance(layer.mixer, DeltaNetConfig):
            delta = layer.mixer
        else:
            latent = layer.latent
        if layer.experts:
            shared = layer.experts.shared_dim
    if (
        latent is None
        or delta is None
        or not shared
        or latent.query_dim
        or delta.n_heads != config.n_heads
    ):
        reason = (
            "llama.cpp reads Kimi Linear with both kinds of layers, a shared expert, as many heads "
            "in both, no q_lora_rank"
        )
        raise ValueError(f"{reason}; keep the Hugging Face folder")
    return latent, delta


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names."""
    linear = llama.layers_with(config, lambda layer: layer.mixer, "blk.")
    mixer = "blocks.{}.mixer."
    width = _latent_and_delta(config)[1].conv_width
    return [
        *llama.rename_modules(GGUF_NAMES, linear),
        *(
            Reshape(
                f"{linear}ssm_conv1d_{n}.weight",
                f"{mixer}{name}_conv.weight",
                (1, -1, 1, width),
                (-1, width),
            )
            for name, n in CONVS.items()
        ),
        Reshape(f"{linear}ssm_a", f"{mixer}log_rate", (-1, 1), (-1,), decay=True),
        Rename(f"{linear}ssm_dt.bias", f"{mixer}decay_bias"),
        *deepseek.gguf_rules(config),
    ]


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return the sizes of both kinds of layers and of the experts."""
    latent, delta = _latent_and_delta(config)
    # latent attention has one key head, a delta net none
    kinds = [0 if layer.mixer else 1 for layer in config.layers]
    sizes = dict(zip(GGUF_DELTA, (delta.conv_width, delta.key_dim), strict=True))
    # llama.cpp always divides by the sum
    keys = deepseek.GGUF_EXPERTS.keys() - {"expert_weights_norm"}
    attention = deepseek.gguf_latent(config, latent) | {"attention.head_count_kv": kinds}
    return attention | sizes | deepseek.gguf_experts(config, keys)


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the kinds of layers and MLPs."""
    kinds = hf["num_key_value_heads"]
    depth = hf["num_hidden_layers"]
    num_dense = hf.pop("first_k_dense_replace", 0)
    hf |= {
        "layer_types": ["full_attention" if kind else "linear_attention" for kind in kinds],
        "mlp_layer_types": ["dense" if n < num_dense else "sparse" for n in range(depth)],
        "num_experts": hf.pop("n_routed_experts"),
        "qk_nope_head_dim": hf["qk_head_dim"] - hf["qk_rope_head_dim"],
        **dict.fromkeys(
            ("linear_num_heads", "num_key_value_heads"), hf["num_attention_heads"]
        ),
    }
    unused = (
        "head_dim",
        "value_length",
        "qk_head_dim",
        "scoring_func",
        "partial_rotary_factor",
    )
    return {name: value for name, value in hf.items() if name not in unused}


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    config=gguf_config,
    metadata=gguf_metadata,
    fields=GGUF_FIELDS,
)
