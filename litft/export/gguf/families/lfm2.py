"""GGUF files of LFM2 and LFM2 MoE."""

from typing import Any

from litft.checkpoints.rules import Rule
from litft.export.gguf.families import deepseek, llama
from litft.export.gguf.families.family import GgufFamily
from litft.families import llama as llama_family
from litft.model.config import Config, ShortConvConfig

GGUF = {"lfm2": ("lfm2", "Lfm2ForCausalLM"), "lfm2_moe": ("lfm2moe", "Lfm2MoeForCausalLM")}
GGUF_LAYERS = {
    "attention.head_count_kv": "num_key_value_heads",
    "shortconv.l_cache": "conv_L_cache",
}
GGUF_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "leading_dense_block_count": "num_dense_layers",
    "expert_gating_func": "scoring_func",
}
GGUF_FIELDS = GGUF_LAYERS | GGUF_EXPERTS


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names."""
    mixer = {
        f"mixer.{name}": f"shortconv.{name}" for name in ("in_proj", "out_proj", "conv")
    }
    names = (
        llama.GGUF_ATTENTION
        | llama.GGUF_QK_NORMS
        | llama.GGUF_MLP
        | llama.GGUF_NORMS
        | mixer
    )
    # llama.cpp's name of the norm before the head
    outer = llama_family.rename_modules({"norm": "token_embd_norm"}, "", "")
    return [*deepseek.gguf_mixture_rules(), *outer, *llama.gguf_names(config, names)]


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return the number of key heads of each layer, 0 for convolutions, their width, and the sizes
    of the experts."""
    # 3: transformers' default, where no layer has a convolution
    width = 3
    for layer in config.layers:
        if isinstance(layer.mixer, ShortConvConfig):
            width = layer.mixer.width
            break
    heads = [0 if layer.mixer else config.n_kv_heads for layer in config.layers]
    metadata = dict(zip(GGUF_LAYERS, (heads, width), strict=True))
    if config.model_type == "lfm2_moe":
        metadata |= deepseek.gguf_experts(config, GGUF_EXPERTS)
    return metadata


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Add the kinds of layers, and other names of fields."""
    heads = hf["num_key_value_heads"]
    if not isinstance(heads, list):
        heads = [heads] * hf["num_hidden_layers"]
    kinds = ["full_attention" if count else "conv" for count in heads]

    # the width in a GGUF file is the adjusted one
    adjusted = dict(
        block_auto_adjust_ff_dim=False,
        norm_eps=hf["rms_norm_eps"],
        tie_embedding=hf["tie_word_embeddings"],
    )
    hf = {name: value for name, value in hf.items() if name != "scoring_func"}
    return hf | adjusted | {"layer_types": kinds, "num_key_value_heads": max(heads)}


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    config=gguf_config,
    metadata=gguf_metadata,
    fields=GGUF_FIELDS,
)
