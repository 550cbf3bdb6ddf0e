"""GGUF files of Llama 1 to 3.3 and models with the same architecture."""

from typing import Any

from litft.checkpoints.rules import Drop, Interleave, Rule
from litft.export.gguf.families.family import GgufFamily
from litft.families.llama import embedding_and_head, rename_modules
from litft.model.config import Config

GGUF = {
    "llama": ("llama", "LlamaForCausalLM"),
    "iquestcoder": ("llama", "LlamaForCausalLM"),
}
GGUF_TENSORS = {"attention_bias": "attn_output.bias", "mlp_bias": "ffn_up.bias"}
# litft's module names -> llama.cpp's, within a layer
GGUF_ATTENTION = {f"attention.{n}_proj": f"attn_{n}" for n in "qkv"} | {
    "attention.o_proj": "attn_output"
}
GGUF_QK_NORMS = {f"attention.{n}_norm": f"attn_{n}_norm" for n in "qk"}
GGUF_MLP = {f"mlp.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")}
GGUF_NORMS = {"attention_norm": "attn_norm", "mlp_norm": "ffn_norm"}


def gguf_names(
    config: Config,
    layer: dict[str, str] = GGUF_ATTENTION | GGUF_QK_NORMS | GGUF_MLP | GGUF_NORMS,
) -> list[Rule]:
    """Return the rules for llama.cpp's names; its rope tensors are dropped, because the metadata is
    read instead."""
    return [
        *embedding_and_head(config, "", "token_embd", "output_norm", "output"),
        *rename_modules(layer, "blk.{}."),
        Drop("rope_{*}.weight"),
    ]


# GGUF's metadata -> the field of config.json that it decides
GGUF_WINDOWS = {"attention.sliding_window_pattern": "layer_types"}


def gguf_windows(config: Config) -> dict[str, Any]:
    """Return the metadata that lists the layers with a sliding window; raise ValueError if there
    are none."""
    pattern = [layer.window is not None for layer in config.layers]
    if not any(pattern):
        raise ValueError(
            f"llama.cpp's architecture for {config.model_type} needs windows; keep the Hugging "
            "Face folder"
        )
    return {"attention.sliding_window_pattern": pattern}


def gguf_layer_types(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the names of the kinds of layers, if the metadata lists which have a
    window."""
    # from the metadata that GGUF_WINDOWS names
    pattern = hf.get("layer_types")
    if pattern is None:
        return hf
    # a number: each so-many-th layer has full attention
    if isinstance(pattern, int):
        pattern = [
            pattern == 0 or n % pattern < pattern - 1
            for n in range(hf["num_hidden_layers"])
        ]
    return hf | {
        "layer_types": [
            "sliding_attention" if slides else "full_attention" for slides in pattern
        ]
    }


def gguf_ropes(hf: dict[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` of config.json for both kinds of layers; only that of full attention
    is scaled."""
    # llama.cpp has one base for both kinds of layers here
    local = {"rope_type": "default", "rope_theta": hf["rope_theta"]}
    return {
        "rope_parameters": {
            "full_attention": local | hf.pop("rope_scaling", {}),
            "sliding_attention": local,
        }
    }


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names.

    It rotates neighbouring entries, so rows of q and k are in another order.
    """
    heads = {"q": config.n_heads, "k": config.n_kv_heads}
    # queries and keys only: values are not rotated
    interleaved = []
    for n, count in heads.items():
        for leaf in ("weight", "bias"):
            interleaved.append(
                Interleave(
                    f"blk.{{}}.attn_{n}.{leaf}",
                    f"blocks.{{}}.attention.{n}_proj.{leaf}",
                    count,
                )
            )
    return [*interleaved, *gguf_names(config)]


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json; llama.cpp's architecture is the same for Llama and Mixtral."""
    if hf["model_type"] == "llama" and hf.get("num_local_experts"):
        return hf | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    return hf


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    config=gguf_config,
    tensors=GGUF_TENSORS,
)
