"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm, fused q/k/v stored transposed."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Drop, Rename, Rule, Split
from litft.families import llama
from litft.families.family import Family
from litft.families.phi3 import qkv_names
from litft.model.config import Config, NormConfig


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' GPT2Config."""
    if hf.get("add_cross_attention"):
        raise ValueError(
            "config.json: add_cross_attention true is not supported; use a decoder-only model"
        )
    base = llama.config(
        standard_names({"n_positions": 1024, "activation_function": "gelu_new", **hf})
    )
    if hf.get("scale_attn_weights", True):
        scale = base.head_dim**-0.5
    else:
        scale = 1.0
    by_depth = hf.get("scale_attn_by_inverse_layer_idx", False)
    layers = []
    for depth, layer in enumerate(base.layers):
        layer_scale = scale / (depth + 1) if by_depth else scale
        layers.append(replace(layer, rope=None, attention_scale=layer_scale))
    return replace(
        base,
        layers=tuple(layers),
        norm=NormConfig("layer", hf.get("layer_norm_epsilon", 1e-5), bias=True),
        gated=False,
        learned_positions=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )


def standard_names(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the field names that `llama.config` reads instead of GPT-2's."""
    return {
        "tie_word_embeddings": True,
        **hf,
        "hidden_size": hf["n_embd"],
        "intermediate_size": hf.get("n_inner") or 4 * hf["n_embd"],
        "num_hidden_layers": hf["n_layer"],
        "num_attention_heads": hf["n_head"],
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": hf["n_positions"],
        "hidden_act": hf["activation_function"],
    }


# files saved from transformers' GPT2Model lack the prefix
LAYERS = "{transformer.|}h.{}."
LINEARS = {
    "attention.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
NORMS = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}


def embedding_and_head(config: Config) -> list[Rule]:
    """Return the rules outside of layers, and those that drop the causal masks in old files."""
    positions = llama.rename_modules({"embed_positions": "{transformer.|}wpe"}, "", "")
    masks = [Drop(f"{LAYERS}attn.{name}") for name in ("bias", "masked_bias")]
    return [
        *llama.embedding_and_head(config, "{transformer.|}", "wte", "ln_f"),
        *positions,
        *masks,
    ]


def rules(config: Config) -> list[Rule]:
    """Return the rules; GPT-2's Linears are Conv1D with weights (in, out)."""
    return [*embedding_and_head(config), *conv1d_rules(config, LAYERS, NORMS)]


def conv1d_rules(config: Config, hf_prefix: str, norms: dict[str, str]) -> list[Rule]:
    """Return the rules of layers whose Linears have weights (in, out), and fused q, k and v."""
    transposed: list[Rule] = []
    for name, hf_name in LINEARS.items():
        stored = f"{hf_prefix}{hf_name}.weight"
        transposed.append(Rename(stored, f"blocks.{{}}.{name}.weight", transposed=True))
    # q, k and v are fused, one after the other
    sizes = (config.dim,) * 3
    return [
        # before the plain rules, which are then for biases and norms only
        *transposed,
        *llama.rename_modules(LINEARS | norms, hf_prefix),
        Split(
            f"{hf_prefix}attn.c_attn.weight", qkv_names("weight"), sizes, transposed=True
        ),
        Split(f"{hf_prefix}attn.c_attn.bias", qkv_names("bias"), sizes),
    ]


FAMILY = Family(
    model_types=("gpt2", "gpt-sw3"),
    config=config,
    rules=rules,
)
