"""GGUF files of Gemma 4."""

from typing import Any

from litft.checkpoints.rules import Drop, Rename, Rule, Split
from litft.export.gguf.families import llama
from litft.export.gguf.families.family import GgufFamily
from litft.families import llama as llama_family
from litft.model.config import Config

GGUF = {
    "gemma4_text": ("gemma4", "Gemma4ForCausalLM"),
    "gemma4_unified_text": ("gemma4", "Gemma4UnifiedForCausalLM"),
}
GGUF_FIELDS = {
    "attention.sliding_window_pattern": "layer_types",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "global_head_dim",
    "attention.value_length": "global_value_dim",
    "attention.key_length_swa": "head_dim",
    "attention.value_length_swa": "value_dim",
    "rope.dimension_count_swa": "rope_dim",
    "rope.freq_base_swa": "rope_local_base_freq",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "feed_forward_length": "intermediate_size",
    "expert_count": "num_experts",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names; layers that reuse keys and values have none."""
    moe = "blocks.{}.mlp.moe."
    mixture = []
    names = {
        "token_input.input_gate": "inp_gate",
        "token_input.projection": "proj",
        "token_input.norm": "post_norm",
    }
    names |= {
        "attention_norm": "attn_norm",
        "attention_post_norm": "post_attention_norm",
        "mlp_post_norm": "post_ffw_norm",
    }

    # a mixture has a dense MLP beside the experts, each with norms of its own
    experts = config.layers[0].experts
    if experts:
        names |= {f"mlp.dense.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")} | {
            "mlp.dense_norm": "ffn_norm"
        }
        names |= {
            "mlp.dense_post_norm": "post_ffw_norm_1",
            "mlp.moe.norm": "pre_ffw_norm_2",
        }
        names |= {"mlp.moe_post_norm": "post_ffw_norm_2", "mlp.moe.router": "ffn_gate_inp"}
        gate_up = tuple(f"{moe}experts.{n}_proj.weight" for n in ("gate", "up"))
        mixture = [
            Split("blk.{}.ffn_gate_up_exps.weight", gate_up, (experts.hidden_dim,) * 2),
            Rename("blk.{}.ffn_down_exps.weight", f"{moe}experts.down_proj.weight"),
            Rename("blk.{}.ffn_gate_inp.scale", f"{moe}router_scale"),
            Rename("blk.{}.ffn_down_exps.scale", f"{moe}expert_scale"),
        ]
    else:
        names |= llama.GGUF_MLP | {"mlp_norm": "ffn_norm"}
    outer = {"embed": "token_embd", "projection": "model_proj", "norm": "proj_norm"}
    shared = llama_family.layers_with(
        config, lambda layer: layer.kv_sharing == "reuse", "blk."
    )
    return [
        *(
            [Drop(f"{shared}attn_{{k|v|k_norm}}.weight")]
            if config.layers[-1].kv_sharing == "reuse"
            else []
        ),
        *mixture,
        *llama_family.rename_modules(
            {f"per_layer.{name}": f"per_layer_{other}" for name, other in outer.items()},
            "",
            "",
        ),
        Rename("blk.{}.layer_output_scale.weight", "blocks.{}.layer_scale"),
        *llama.gguf_names(config, llama.GGUF_ATTENTION | llama.GGUF_QK_NORMS | names),
    ]


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return what differs between layers, and the sizes of per-layer embeddings and experts."""
    layers, full = config.layers, config.layers[-1]
    sliding = next((layer for layer in layers if layer.window is not None), None)
    if sliding is None:
        raise ValueError(
            "llama.cpp's architecture gemma4 needs layers with sliding windows; keep the Hugging "
            "Face folder"
        )
    heads: Any = config.n_kv_heads
    if full.key_is_value:  # which only a list shows
        heads = [layer.n_kv_heads or config.n_kv_heads for layer in layers]
    # a list only where layers differ
    hidden: Any = [layer.hidden_dim or config.hidden_dim for layer in layers]
    experts = full.experts and (
        full.experts.count,
        full.experts.top_k,
        full.experts.hidden_dim,
    )
    # every layer is rotated
    assert sliding.rope is not None
    # in the order of GGUF_FIELDS
    values = (
        [layer.window is not None for layer in layers],
        sum(layer.kv_sharing == "reuse" for layer in layers),
        heads,
        *(full.head_dim,) * 2,
        *(config.head_dim,) * 2,
        sliding.rope.dim,
        sliding.rope.theta,
        config.per_layer_dim,
        hidden if len(set(hidden)) > 1 else config.hidden_dim,
        *(experts or (None,) * 3),
    )
    metadata = {}
    for key, value in zip(GGUF_FIELDS, values, strict=True):
        if value is not None:
            metadata[key] = value
    return metadata | {"final_logit_softcapping": float(config.logit_softcap or 0)}


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the kinds of layers, and the values of each kind."""
    sliding = hf["layer_types"]
    heads = hf["num_key_value_heads"]
    hidden = hf["intermediate_size"]
    full = {
        "rope_theta": hf["rope_theta"],
        "partial_rotary_factor": 1.0,
        "rope_type": "proportional",
    }
    full |= hf.get("rope_scaling", {})
    local = {"rope_type": "default", "rope_theta": hf.get("rope_local_base_freq", 1e4)}
    hf |= {
        "layer_types": [
            "sliding_attention" if slides else "full_attention" for slides in sliding
        ],
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "vocab_size_per_layer_input": hf["vocab_size"],
        "enable_moe_block": bool(hf.get("num_experts")),
        "use_double_wide_mlp": isinstance(hidden, list),
        "intermediate_size": hidden[0] if isinstance(hidden, list) else hidden,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_k_eq_v": isinstance(heads, list),
        # llama.cpp's default; 0: none
        "final_logit_softcapping": hf.get("final_logit_softcapping", 30.0) or None,
    }
    # full attention has a number of its own, which is that of the last layer
    if isinstance(heads, list):
        hf |= {
            "num_key_value_heads": heads[sliding.index(True)],
            "num_global_key_value_heads": heads[-1],
        }
    unused = (
        "global_value_dim value_dim rope_dim rope_local_base_freq rope_theta rope_scaling "
        "partial_rotary_factor"
    )
    return {name: value for name, value in hf.items() if name not in unused.split()}


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    config=gguf_config,
    metadata=gguf_metadata,
    fields=GGUF_FIELDS,
)
