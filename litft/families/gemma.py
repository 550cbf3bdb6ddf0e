"""Gemma 1, 2 and 3 (arXiv 2403.08295, 2408.00118, 2503.19786), CodeGemma; Gemma 3 also from a
multimodal folder."""

import math
from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Drop, Rule
from litft.families import llama
from litft.families.family import Family
from litft.families.wrappers import MODEL_PREFIXES, OTHER_PARTS
from litft.model.config import Config, NormConfig
from litft.model.rope_config import RopeConfig

# where they differ from those of `llama.config`: of all, of Gemma 2 and 3, of Gemma 3
DEFAULTS = dict(
    head_dim=256,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
    num_key_value_heads=16,
)
DEFAULTS2 = dict(
    num_key_value_heads=4,
    query_pre_attn_scalar=256,
    sliding_window=4096,
    hidden_activation="gelu_pytorch_tanh",
)
# sizes that multimodal files may leave out
DEFAULTS3 = dict(
    vocab_size=262_208,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    max_position_embeddings=131_072,
)

POST_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def text_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the text model if `hf` is a multimodal model's, otherwise `hf`."""
    if hf["model_type"] == "gemma3":
        return llama.text_model_config(hf, "gemma3_text", "Gemma3ForCausalLM")
    return hf


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' GemmaConfig, Gemma2Config
    and Gemma3TextConfig."""
    hf = _with_defaults(hf)
    is_gemma1 = hf["model_type"] == "gemma"
    is_gemma3 = hf["model_type"] == "gemma3_text"
    if hf.get("use_bidirectional_attention"):
        raise ValueError(
            "config.json: use_bidirectional_attention true is not supported; use a causal model"
        )
    # Gemma 3 has a RoPE for each kind of layer, see `ropes_of_types`
    if is_gemma3:
        base = llama.config({**hf, "rope_parameters": None, "rope_scaling": None})
    else:
        base = llama.config(hf)
    # norms multiply by 1 + weight
    norm = NormConfig("rms", base.norm.eps, offset=1.0)
    base = replace(base, norm=norm, embed_scale=math.sqrt(base.dim), mlp_bias=False)
    if is_gemma1:
        return base
    return _with_windows(hf, base, norm)


def _with_defaults(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with the defaults of their generation, and `hidden_act`."""
    is_gemma1 = hf["model_type"] == "gemma"
    defaults = dict(DEFAULTS)
    if not is_gemma1:
        defaults |= DEFAULTS2
    if hf["model_type"] == "gemma3_text":
        defaults |= DEFAULTS3
    hf = {**defaults, **hf}
    if not is_gemma1:
        hf["hidden_act"] = hf["hidden_activation"]
    # Gemma 1 files say gelu but mean its tanh approximation
    elif hf.get("hidden_act", "gelu") == "gelu":
        hf["hidden_act"] = "gelu_pytorch_tanh"
    return hf


def _with_windows(hf: dict[str, Any], base: Config, norm: NormConfig) -> Config:
    """Return the config of Gemma 2 and 3: sliding windows, norms of queries and keys or softcaps,
    and two more norms a block."""
    is_gemma3 = hf["model_type"] == "gemma3_text"
    # every second layer of Gemma 2 has full attention, every sixth of Gemma 3
    pattern = hf.get("sliding_window_pattern", 6) if is_gemma3 else 2
    sliding = llama.sliding_layers(hf, lambda index: (index + 1) % pattern != 0)
    scale = hf["query_pre_attn_scalar"] ** -0.5
    window = hf["sliding_window"] or None
    # (full attention, window), to be indexed by whether the layer slides
    if is_gemma3:
        ropes = ropes_of_types(hf, base.head_dim)
        own = dict(qk_norm=norm, attention_softcap=None, logit_softcap=None)
    else:
        ropes = (base.layers[0].rope,) * 2
        own = dict(qk_norm=None, attention_softcap=50.0, logit_softcap=30.0)
    # Gemma 3 does not read it
    if "attn_logit_softcapping" in hf and not is_gemma3:
        own["attention_softcap"] = hf["attn_logit_softcapping"]
    if "final_logit_softcapping" in hf:
        own["logit_softcap"] = hf["final_logit_softcapping"]
    layer = replace(base.layers[0], attention_scale=scale)
    # (full attention, window)
    kinds = (replace(layer, rope=ropes[0]), replace(layer, rope=ropes[1], window=window))
    layers = tuple(kinds[slides] for slides in sliding)
    norm_position = "before" if hf["model_type"] == "vaultgemma" else "both"
    return replace(base, layers=layers, norm_position=norm_position, **own)


def ropes_of_types(hf: dict[str, Any], head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Return Gemma 3's RoPE of layers with full attention, and that of layers with a window; only
    the first is scaled."""
    llama.check_rope_type(hf)
    nested = llama.ropes_by_type(hf)
    full = {**(nested.get("full_attention") or {}), **(hf.get("rope_scaling") or {})}
    full.setdefault("rope_theta", hf.get("rope_theta", 1e6))
    local = {
        "rope_theta": hf.get("rope_local_base_freq", 1e4),
        **(nested.get("sliding_attention") or {}),
    }
    full_rope = RopeConfig.from_hf({**hf, "rope_parameters": full}, head_dim)
    local_rope = RopeConfig.from_hf({**hf, "rope_parameters": local}, head_dim)
    return full_rope, local_rope


def rules(config: Config) -> list[Rule]:
    """Return the rules for Llama's names; Gemma 2 and 3 have norms before and after attention and
    MLP."""
    if config.model_type == "gemma":
        return llama.rules(config)
    if config.model_type == "vaultgemma":
        return llama.rules(
            config, norms=llama.NORMS | {"mlp_norm": "pre_feedforward_layernorm"}
        )
    # Gemma 3 is published as a multimodal model, too
    head = "{|language_model.}lm_head"
    return [*llama.rules(config, MODEL_PREFIXES, head, POST_NORMS), Drop(OTHER_PARTS)]


FAMILY = Family(
    model_types=("gemma", "gemma2", "vaultgemma", "gemma3_text", "gemma3"),
    config=config,
    rules=rules,
    text_config=text_config,
    fits_fp16=False,
)
