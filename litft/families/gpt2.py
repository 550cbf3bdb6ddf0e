"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm, fused q/k/v stored transposed."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.conversion import Drop, Rename, Rule, Split
from litft.families import llama
from litft.families.phi3 import qkv
from litft.model.config import Config, NormConfig

MODEL_TYPES = ("gpt2",)
GGUF = {"gpt2": ("gpt2", "GPT2LMHeadModel")}


def config(hf: dict[str, Any]) -> Config:
    """Defaults are those of transformers' GPT2Config."""
    if hf.get("add_cross_attention"):
        raise ValueError("config.json: add_cross_attention true is not supported; litft reads decoders alone")
    plain = llama.config(standard_names({"n_positions": 1024, "activation_function": "gelu_new", **hf}))
    scale = plain.head_dim**-0.5 if hf.get("scale_attn_weights", True) else 1.0
    by_depth = hf.get("scale_attn_by_inverse_layer_idx", False)
    layers = tuple(
        replace(layer, rope=None, attention_scale=scale / (depth + 1) if by_depth else scale)
        for depth, layer in enumerate(plain.layers)
    )
    return replace(
        plain,
        layers=layers,
        norm=NormConfig("layer", hf.get("layer_norm_epsilon", 1e-5), bias=True),
        gated=False,
        learned_positions=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )


def standard_names(hf: dict[str, Any]) -> dict[str, Any]:
    """A config.json in GPT-2's words in everyone else's."""
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


LAYERS = "{transformer.|}h.{}."  # files written from the bare model lack the prefix
LINEARS = {"attention.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
NORMS = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}


def ends(config: Config) -> list[Rule]:
    """Embeddings, the last norm, the head, and the masks that old files store."""
    positions = llama.named({"embed_positions": "{transformer.|}wpe"}, "", "")
    masks = [Drop(f"{LAYERS}attn.{name}") for name in ("bias", "masked_bias")]
    return [*llama.ends(config, "{transformer.|}", "wte", "ln_f"), *positions, *masks]


def rules(config: Config) -> list[Rule]:
    """Its Linears are Conv1D, stored (in, out)."""
    weights = [Rename(f"{LAYERS}{t}.weight", f"blocks.{{}}.{o}.weight", transposed=True) for o, t in LINEARS.items()]
    sizes = (config.dim,) * 3
    fused = [
        Split(f"{LAYERS}attn.c_attn.weight", qkv("weight"), sizes, transposed=True),
        Split(f"{LAYERS}attn.c_attn.bias", qkv("bias"), sizes),
    ]
    return [*ends(config), *weights, *llama.named(LINEARS | NORMS, LAYERS), *fused]


def gguf_rules(config: Config) -> list[Rule]:
    """llama.cpp keeps q, k, v in one, and all Linears (out, in)."""
    names = {"attention.o_proj": "attn_output", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"} | llama.GGUF_NORMS
    fused = [Split(f"blk.{{}}.attn_qkv.{leaf}", qkv(leaf), (config.dim,) * 3) for leaf in ("weight", "bias")]
    return [*llama.named({"embed_positions": "position_embd"}, "", ""), *llama.gguf_names(config, names), *fused]


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """In GPT-2's words."""
    words = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
    words |= {"n_inner": "intermediate_size", "n_positions": "max_position_embeddings"}
    kept = {name: value for name, value in hf.items() if name not in (*words.values(), "num_key_value_heads", "rope_theta")}
    return {**kept, **{own: hf[name] for own, name in words.items()}, "activation_function": "gelu_new"}
