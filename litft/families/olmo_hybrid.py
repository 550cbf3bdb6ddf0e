"""OLMo Hybrid (Ai2, 2026): three of four layers are Gated DeltaNets with norms before, the others
OLMo 3's layers."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rename, Rule, Squeeze
from litft.families import llama
from litft.families.family import Family
from litft.model.config import Config, DeltaNetConfig

# litft's names of a delta net's modules -> the files'
MIXER = {
    "query_proj": "q_proj",
    "key_proj": "k_proj",
    "value_proj": "v_proj",
    "beta_proj": "b_proj",
    "decay_proj": "a_proj",
    "gate_proj": "g_proj",
    "norm": "o_norm",
    "out_proj": "o_proj",
}


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' OlmoHybridConfig."""
    base = llama.config({"max_position_embeddings": 65536, **hf, "head_dim": None})
    heads = hf.get("linear_num_value_heads") or base.n_heads
    key_heads = hf.get("linear_num_key_heads") or base.n_heads
    key_dim = hf.get("linear_key_head_dim") or int(0.75 * base.dim / key_heads)
    delta = DeltaNetConfig(
        heads,
        key_heads,
        key_dim,
        hf.get("linear_value_head_dim") or 2 * key_dim,
        hf.get("linear_conv_kernel_dim", 4),
        1e-5,
        negative_eigenvalues=hf.get("linear_allow_neg_eigval", True),
    )
    if _has_rope(hf):
        attention = base.layers[0]
    else:
        attention = replace(base.layers[0], rope=None)
    # linear layers have norms before, attention layers after attention and MLP
    linear = replace(attention.with_mixer(delta), norm_position="before")
    last = len(base.layers) - 1
    # every fourth layer has full attention; with fewer than four layers, the last one
    is_linear = llama.linear_layers(hf, lambda n: n % 4 != 3 and (n != last or last >= 3))
    layers = tuple(linear if kind else attention for kind in is_linear)
    base = replace(base, layers=layers, norm_position="after", mlp_bias=False)
    return replace(base, qk_norm=base.norm, qk_norm_over="all")


def _has_rope(hf: dict[str, Any]) -> bool:
    """Return whether attention rotates queries and keys: not where the base is null, as in the
    released models. Parameters that are null have the default base, as in transformers."""
    parameters = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    # the base may be beside the parameters, too, where null is refused
    return parameters.get("rope_theta", 1.0) is not None


def rules(config: Config) -> list[Rule]:
    """Return the rules for Llama's names; the norms' names depend on the kind of layer."""
    linear = llama.layers_with(config, lambda layer: layer.mixer)
    mixer = f"{linear}linear_attn."
    names = {f"mixer.{name}": hf_name for name, hf_name in MIXER.items()}
    norms = {"attention_norm": "attention_layer_norm", "mlp_norm": "feedforward_layer_norm"}
    # transformers writes the norm after attention under
    # the name that it has before the MLP in other layers
    post_norm = "{feedforward_layer_norm|post_attention_layernorm}"
    post_norms = {
        "attention_post_norm": post_norm,
        "mlp_post_norm": "post_feedforward_layernorm",
    }
    convs = []
    for name, hf_name in (("query", "q"), ("key", "k"), ("value", "v")):
        stored = f"{mixer}{hf_name}_conv1d.weight"
        convs.append(Squeeze(stored, f"blocks.{{}}.mixer.{name}_conv.weight", (1,)))
    return [
        *llama.rename_modules(names, mixer),
        *convs,
        Rename(f"{mixer}A_log", "blocks.{}.mixer.log_rate"),
        Rename(f"{mixer}dt_bias", "blocks.{}.mixer.decay_bias"),
        *llama.rename_modules(norms, linear),
        *llama.rules(config, norms=post_norms),
    ]


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for the names of norms in transformers' class, which the files do not
    have."""
    linear = llama.layers_with(config, lambda layer: layer.mixer)
    full = llama.layers_with(config, lambda layer: not layer.mixer)
    before = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return [
        *llama.rename_modules(before, linear),
        *llama.rename_modules({"attention_post_norm": "post_attention_layernorm"}, full),
    ]


FAMILY = Family(
    model_types=("olmo_hybrid",),
    config=config,
    rules=rules,
    peft_rules=peft_rules,
)
