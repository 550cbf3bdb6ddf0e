"""Gemma 4 (Google, 2026): per-layer embeddings, layers that share keys and values, experts beside
the dense MLP."""

import math
from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Drop, Rename, Rule
from litft.families import gemma, llama, mixtral
from litft.families.family import Family
from litft.model.config import Config, ExpertsConfig, KVSharing, LayerConfig
from litft.model.rope_config import RopeConfig

DEFAULTS = dict(
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
    hidden_activation="gelu_pytorch_tanh",
    sliding_window=512,
    hidden_size_per_layer_input=256,
    vocab_size_per_layer_input=262144,
)
# Gemma 4 12B, whose layers have no inputs of their own
UNIFIED = dict(
    hidden_size_per_layer_input=0, max_position_embeddings=262144, sliding_window=1024
)
# transformers' defaults for each kind of layer
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
}
MODEL = "{model.|model.language_model.}"
LAYERS = f"{MODEL}layers.{{}}."
# litft's module names -> the files', within a layer: all models, mixtures
NAMES = {
    "token_input.input_gate": "per_layer_input_gate",
    "token_input.projection": "per_layer_projection",
    "token_input.norm": "post_per_layer_input_norm",
}
MIXTURE = llama.mlp_names("mlp.dense", "mlp") | {
    "mlp.dense_norm": "pre_feedforward_layernorm",
    "mlp.dense_post_norm": "post_feedforward_layernorm_1",
    "mlp.moe.norm": "pre_feedforward_layernorm_2",
    "mlp.moe_post_norm": "post_feedforward_layernorm_2",
    "mlp.moe.router": "router.proj",
}


def text_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the text model if `hf` is a multimodal model's, otherwise `hf`."""
    if hf["model_type"] == "gemma4":
        return llama.text_model_config(hf, "gemma4_text", "Gemma4ForCausalLM")
    if hf["model_type"] == "gemma4_unified":
        return llama.text_model_config(
            hf, "gemma4_unified_text", "Gemma4UnifiedForCausalLM"
        )
    return hf


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' Gemma4TextConfig."""
    if hf["model_type"] == "gemma4_unified_text":
        hf = {**UNIFIED, **hf}
    hf = {**DEFAULTS, **hf}
    if hf.get("use_bidirectional_attention") == "all":
        raise ValueError(
            "config.json: use_bidirectional_attention 'all' is not supported; use a causal model"
        )
    # each kind of layer has a RoPE of its own, see `_layers`
    base = llama.config(
        {
            **hf,
            "hidden_act": hf["hidden_activation"],
            "rope_parameters": None,
            "rope_scaling": None,
        }
    )
    per_layer_dim = hf["hidden_size_per_layer_input"] or 0
    per_layer_vocab_size = hf["vocab_size_per_layer_input"] if per_layer_dim else 0
    return replace(
        base,
        layers=_layers(hf, base),
        norm_position="both",
        mlp_bias=False,
        embed_scale=math.sqrt(base.dim),
        qk_norm=base.norm,
        value_norm=replace(base.norm, weight=False),
        logit_softcap=hf.get("final_logit_softcapping"),
        per_layer_dim=per_layer_dim,
        per_layer_vocab_size=per_layer_vocab_size,
        layer_scale=True,
    )


def _layers(hf: dict[str, Any], base: Config) -> tuple[LayerConfig, ...]:
    """Return the layers; those of full attention have wider heads, and the last ones share the
    others' keys and values."""
    num_layers = len(base.layers)
    nested = {**ROPES, **llama.ropes_by_type(hf)}
    sliding = llama.sliding_layers(hf, lambda index: (index + 1) % 6 != 0)
    # as in transformers, whatever the file says of the last layer
    sliding[-1] = False
    window = window_size(hf)
    experts = _experts(hf)
    wide, full_kv_heads = _full_attention_sizes(hf, base.head_dim)
    sharing = kv_sharing(sliding, num_layers - hf.get("num_kv_shared_layers", 0))
    layers = []
    for index, slides in enumerate(sliding):
        head_dim = base.head_dim if slides else wide
        kind = "sliding_attention" if slides else "full_attention"
        rope = RopeConfig.from_hf({**hf, "rope_parameters": nested[kind]}, head_dim)
        # queries and keys have norms, and their product is not scaled
        layer = LayerConfig(
            rope=rope, experts=experts, attention_scale=1.0, kv_sharing=sharing[index]
        )
        if slides:
            layer = replace(layer, window=window)
        else:
            layer = replace(
                layer,
                head_dim=head_dim,
                n_kv_heads=full_kv_heads,
                key_is_value=hf.get("attention_k_eq_v", False),
            )
        if sharing[index] == "reuse" and hf.get("use_double_wide_mlp"):
            layer = replace(layer, hidden_dim=2 * base.hidden_dim)
        layers.append(layer)
    return tuple(layers)


def _full_attention_sizes(hf: dict[str, Any], head_dim: int) -> tuple[int, int | None]:
    """Return the head size of full attention, and its number of key heads (None: as elsewhere).

    head_dim: of sliding attention.
    """
    wide = hf.get("global_head_dim", 512)
    # where keys are values, full attention has a number of key heads of its own
    kv_heads = None
    if hf.get("attention_k_eq_v", False):
        kv_heads = hf.get("num_global_key_value_heads")
    # transformers 5 writes what differs in full attention as overrides, by layer
    overrides = hf.get("per_layer_config")
    if not overrides:
        return wide, kv_heads
    override = next(iter(overrides.values()))
    wide = override.get("head_dim", head_dim)
    if hf.get("attention_k_eq_v", False):
        kv_heads = override.get("num_key_value_heads")
    return wide, kv_heads


def _experts(hf: dict[str, Any]) -> ExpertsConfig | None:
    if not hf.get("enable_moe_block"):
        return None
    return ExpertsConfig(
        hf["num_experts"],
        hf["top_k_experts"],
        llama.one_size(hf, "moe_intermediate_size"),
        renormalize=True,
        beside_dense=True,
    )


def window_size(hf: dict[str, Any]) -> int:
    """Return the size of the sliding window; raise ValueError for 0 or null."""
    if not hf["sliding_window"]:
        raise ValueError(
            "config.json: sliding_window must be a whole number of at least 1, found "
            f"{hf['sliding_window']!r}"
        )
    return hf["sliding_window"]


def kv_sharing(sliding: list[bool], first_shared: int) -> list[KVSharing]:
    """Return each layer's `kv_sharing`: from `first_shared` on, layers reuse what the last one of
    their kind stores."""
    if not (
        0 < first_shared <= len(sliding)
        and set(sliding[first_shared:]) <= set(sliding[:first_shared])
    ):
        shared = len(sliding) - first_shared
        raise ValueError(
            f"config.json: num_kv_shared_layers {shared}: each kind of layer must first occur in "
            "another layer"
        )
    if first_shared == len(sliding):
        return ["none"] * len(sliding)
    # before the layers that reuse, the last one of each kind stores
    sharing: list[KVSharing] = []
    for index, slides in enumerate(sliding[:first_shared]):
        is_last = slides not in sliding[index + 1 : first_shared]
        sharing.append("store" if is_last else "none")
    reused: list[KVSharing] = ["reuse"] * (len(sliding) - first_shared)
    return sharing + reused


def rules(config: Config) -> list[Rule]:
    """Return the rules, which also match a multimodal checkpoint, without the tensors of its other
    towers."""
    moe = "blocks.{}.mlp.moe."
    experts = mixtral.fused_experts(config, f"{LAYERS}experts.", prefix=f"{moe}experts.")
    per_layer = {
        "per_layer.embed": f"{MODEL}embed_tokens_per_layer",
        "per_layer.projection": f"{MODEL}per_layer_model_projection",
        "per_layer.norm": f"{MODEL}per_layer_projection_norm",
    }
    mixture = llama.rename_modules(MIXTURE, LAYERS) if experts else []
    # files may have projections in layers that reuse keys and values, but nothing reads them
    shared = llama.layers_with(
        config, lambda layer: layer.kv_sharing == "reuse", f"{MODEL}layers."
    )
    drops: list[Rule] = []
    if any(layer.kv_sharing == "reuse" for layer in config.layers):
        for name in ("k_proj", "v_proj", "k_norm"):
            drops.append(Drop(f"{shared}self_attn.{name}.weight"))
    return [
        *drops,
        *mixture,
        *llama.rename_modules(NAMES, LAYERS),
        *llama.rename_modules(per_layer, "", ""),
        Rename(f"{LAYERS}layer_scalar", "blocks.{}.layer_scale"),
        Rename(f"{LAYERS}router.scale", f"{moe}router_scale"),
        Rename(f"{LAYERS}router.per_expert_scale", f"{moe}expert_scale"),
        *experts,
        *llama.rules(config, MODEL, norms=gemma.POST_NORMS),
        Drop(
            "model.{vision_tower|vision_embedder|audio_tower|embed_vision|embed_audio|"
            "multi_modal_projector}.{*}"
        ),
    ]


FAMILY = Family(
    model_types=("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"),
    config=config,
    rules=rules,
    text_config=text_config,
    fits_fp16=False,
)
