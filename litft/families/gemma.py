"""Gemma 1, 2 and 3 (arXiv 2403.08295, 2408.00118, 2503.19786), CodeGemma; Gemma 3 also out of a multimodal folder."""

import math
from dataclasses import replace
from typing import Any

from litft.checkpoints.conversion import Rename, Rule, Shift
from litft.families import llama
from litft.model.config import Config, NormConfig, RopeConfig

MODEL_TYPES = ("gemma", "gemma2", "gemma3_text", "gemma3")
GGUF = {
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3_text": ("gemma3", "Gemma3ForCausalLM"),
}

DEFAULTS = dict(head_dim=256, tie_word_embeddings=True, max_position_embeddings=8192, num_key_value_heads=16)
DEFAULTS2 = dict(
    num_key_value_heads=4, query_pre_attn_scalar=256, sliding_window=4096, hidden_activation="gelu_pytorch_tanh"
)
DEFAULTS3 = dict(
    vocab_size=262_208,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    max_position_embeddings=131_072,
)


def text_config(hf: dict[str, Any]) -> dict[str, Any]:
    """The text model's own config.json, where `hf` is that of the multimodal model around it."""
    return llama.language_model(hf, "gemma3_text", "Gemma3ForCausalLM") if hf["model_type"] == "gemma3" else hf


def config(hf: dict[str, Any]) -> Config:
    """Defaults are those of transformers' GemmaConfig, Gemma2Config and Gemma3TextConfig."""
    first, third = hf["model_type"] == "gemma", hf["model_type"] == "gemma3_text"
    hf = {**DEFAULTS, **({} if first else DEFAULTS2), **(DEFAULTS3 if third else {}), **hf}
    if hf.get("use_bidirectional_attention"):
        raise ValueError("config.json: use_bidirectional_attention true is not supported; litft's models are causal")
    hf["hidden_act"] = hf.get("hidden_act", "gelu_pytorch_tanh") if first else hf["hidden_activation"]
    if first and hf["hidden_act"] == "gelu":
        hf["hidden_act"] = "gelu_pytorch_tanh"  # what the first files meant by it
    plain = llama.config({**hf, "rope_parameters": None, "rope_scaling": None} if third else hf)
    norm = NormConfig("rms", plain.norm.eps, offset=1.0)
    plain = replace(plain, norm=norm, embed_scale=math.sqrt(plain.dim), mlp_bias=False)
    if first:
        return plain
    pattern = hf.get("sliding_window_pattern", 6) if third else 2
    sliding = llama.sliding(hf, lambda index: (index + 1) % pattern != 0)
    scale = hf["query_pre_attn_scalar"] ** -0.5
    window = hf["sliding_window"] or None
    ropes = _ropes(hf, plain.head_dim) if third else (plain.layers[0].rope,) * 2
    layers = tuple(
        replace(plain.layers[0], window=window if slides else None, rope=ropes[slides], attention_scale=scale)
        for slides in sliding
    )
    return replace(
        plain,
        layers=layers,
        norm_position="both",
        qk_norm=norm if third else None,
        attention_softcap=hf.get("attn_logit_softcapping", None if third else 50.0),
        logit_softcap=hf.get("final_logit_softcapping", None if third else 30.0),
    )


def _ropes(hf: dict[str, Any], head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Gemma 3's rotations of layers with full attention and with a window; only the first is ever scaled."""
    nested = llama.ropes_by_type(hf)
    full = {**(nested.get("full_attention") or {}), **(hf.get("rope_scaling") or {})}
    full.setdefault("rope_theta", hf.get("rope_theta", 1e6))
    local = {"rope_theta": hf.get("rope_local_base_freq", 1e4), **(nested.get("sliding_attention") or {})}
    return tuple(RopeConfig.from_hf({**hf, "rope_parameters": parameters}, head_dim) for parameters in (full, local))


def rules(config: Config) -> list[Rule]:
    """Llama's names; Gemma 2 and 3 have norms on both sides of attention and MLP."""
    if config.norm_position == "before":
        return llama.rules(config)
    norms = {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
    return llama.wrapped_rules(config, norms)


def gguf_rules(config: Config) -> list[Rule]:
    """llama.cpp stores what its norms multiply by, 1 more than the weights; ValueError for a head it has no place for."""
    if not (config.tied or config.model_type == "gemma3_text"):
        raise ValueError(
            f"llama.cpp takes the embedding for the head of {config.model_type}, and this model has one of its own"
        )
    after = {"attention_post_norm": "post_attention_norm", "mlp_post_norm": "post_ffw_norm"}
    rules = llama.gguf_names(config, llama.GGUF_ATTENTION | llama.GGUF_QK_NORMS | llama.GGUF_MLP | llama.GGUF_NORMS | after)
    norms = [rule for rule in rules if isinstance(rule, Rename) and rule.name.endswith("norm.weight")]
    return [*(Shift(rule.hf_name, rule.name, 1.0) for rule in norms), *rules]


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp knows by the architecture's name; the scale of the largest models by their number of layers."""
    first, third = hf["model_type"] == "gemma", hf["model_type"] == "gemma3_text"
    activation = {"hidden_activation": "gelu_pytorch_tanh"}
    if first:
        return {**hf, **activation, "hidden_act": "gelu_pytorch_tanh"}
    wide = hf["num_hidden_layers"] == (62 if third else 46)
    scalar = hf["hidden_size"] // hf["num_attention_heads"] if wide else hf["head_dim"]
    local = {"rope_local_base_freq": 1e4, "sliding_window_pattern": 6} if third else {}
    return {**local, **hf, **activation, "query_pre_attn_scalar": scalar}
