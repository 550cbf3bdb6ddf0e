"""The families that litft reads: one file each, found by looking into this folder.

A family file holds MODEL_TYPES (values of `model_type` in config.json), `config(hf) -> Config` and `rules(config)`; where
they are needed, `text_config(hf)` and `peft_rules(config)`. Where llama.cpp knows the family: GGUF (its architecture and
transformers' class for each model_type), `gguf_rules(config)` and, for what its files do not say, `gguf_config(hf)`.
"""

import pkgutil
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from litft.checkpoints.conversion import Rule
from litft.model.config import Config, is_positive


@cache
def families() -> dict[str, ModuleType]:
    """The family module of every known model_type."""
    modules = [import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    return {model_type: module for module in modules for model_type in module.MODEL_TYPES}


# What a field may hold wherever a family reads it. Files from strangers are checked once, here, before any arithmetic.
_SIZES = (
    "hidden_size intermediate_size num_attention_heads vocab_size max_position_embeddings n_embd "
    "n_head n_positions moe_intermediate_size shared_expert_intermediate_size num_experts_per_tok "
    "decoder_sparse_step query_pre_attn_scalar sliding_window_pattern no_rope_layer_interval"
).split()
_COUNTS = "num_hidden_layers n_layer num_experts num_local_experts".split()  # each makes objects, so few at most
_SIZES_OR_NULL = (
    "num_key_value_heads head_dim original_max_position_embeddings n_inner num_kv_heads ffn_hidden_size "
    "rotary_dim num_ln_in_parallel_attn"
).split()
_POSITIVE = (
    "rms_norm_eps rope_theta layer_norm_eps layer_norm_epsilon norm_epsilon rotary_emb_base rotary_pct "
    "rope_local_base_freq attention_multiplier embedding_multiplier residual_multiplier logits_scaling logit_scale "
    "swiglu_alpha swiglu_limit"
).split()
_POSITIVE_OR_NULL = "clip_qkv attn_logit_softcapping final_logit_softcapping".split()
_FLAGS = (
    "attention_bias mlp_bias tie_word_embeddings use_bias use_qkv_bias qkv_bias bias use_sliding_window qk_layernorm "
    "use_parallel_residual multi_query norm_topk_prob scale_attn_weights scale_attn_by_inverse_layer_idx"
).split()
_FLAGS_OR_NULL = "use_qk_norm alibi new_decoder_architecture parallel_attn use_bidirectional_attention".split()
_TEXTS = "hidden_act model_type activation_function activation".split()
_LISTS_OR_NULL = "layer_types mlp_only_layers no_rope_layers".split()
_LARGEST = 10**9  # of any size: beyond it a file is broken, and memory would run out before a message


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _LARGEST


def _is_size_or_0(value: Any) -> bool:
    return (value == 0 and not isinstance(value, bool)) or _is_size(value)


def _or_null(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_SIZES, (_is_size, "a whole number from 1")),
    **dict.fromkeys(_SIZES_OR_NULL, (_or_null(_is_size), "a whole number from 1, or null")),
    "sliding_window": (_or_null(_is_size_or_0), "a whole number, or null"),
    "max_window_layers": (_is_size_or_0, "a whole number"),
    **dict.fromkeys(_POSITIVE, (is_positive, "a number above 0")),
    **dict.fromkeys(_POSITIVE_OR_NULL, (_or_null(is_positive), "a number above 0, or null")),
    **dict.fromkeys(_FLAGS, (_is(bool), "true or false")),
    **dict.fromkeys(_FLAGS_OR_NULL, (_or_null(_is(bool)), "true, false or null")),
    **dict.fromkeys(_COUNTS, (lambda value: _is_size(value) and value <= 10_000, "a whole number from 1 to 10,000")),
    **dict.fromkeys(_TEXTS, (_is(str), "text")),
    "hidden_activation": (_or_null(_is(str)), "text or null"),
    **dict.fromkeys(_LISTS_OR_NULL, (_or_null(_is(list)), "a list or null")),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "quantization_config"), (_or_null(_is(dict)), "an object or null")),
}


def _check_fields(hf: dict[str, Any]) -> None:
    """ValueError listing every field of a wrong type or range."""
    problems = [
        f"config.json: {name} must be {wanted}, found {hf[name]!r}"
        for name, (fits, wanted) in _CHECKS.items()
        if name in hf and not fits(hf[name])
    ]
    if problems:
        raise ValueError("\n".join(problems))


def family(model_type: str) -> ModuleType:
    """The module of a model_type; ValueError listing the known ones otherwise."""
    if model_type not in families():
        known = f"known: {', '.join(sorted(families()))}"
        reason = f"config.json: model_type {model_type!r} is not a family that litft knows"
        raise ValueError(f"{reason}; {known}; name the folder of one of these, or see tutorials/add_a_family.md")
    return families()[model_type]


def text_config(hf: dict[str, Any]) -> dict[str, Any]:
    """The language model's own config.json, where `hf` wraps it in a multimodal model's."""
    module = families().get(str(hf.get("model_type")))
    if not hasattr(module, "text_config"):
        return hf
    if not isinstance(hf.get("text_config", {}), dict):
        raise ValueError(f"config.json: text_config must be an object, found {hf['text_config']!r:.200}")
    try:
        return module.text_config(hf)
    except KeyError as missing:
        raise ValueError(f"config.json lacks the field {missing}; is it the whole file?") from None


def peft_rules(config: Config) -> list[Rule]:
    """How PEFT names what it does not call as the checkpoint does, such as stacked experts."""
    module = family(config.model_type)
    return module.peft_rules(config) if hasattr(module, "peft_rules") else []


def read_config(hf: dict[str, Any]) -> Config:
    """config.json's content as a Config; ValueError naming the field where one is missing or unsupported."""
    try:
        module = family(str(hf["model_type"]))  # what is unknown is said alone: its fields may mean other things
        _check_fields(hf)
        return module.config(hf)
    except KeyError as missing:
        raise ValueError(f"config.json lacks the field {missing}; is it the folder of a causal language model?") from None


def gguf_architectures() -> dict[str, str]:
    """llama.cpp's name of the architecture of each model_type that it knows."""
    return {kind: names[0] for module in families().values() for kind, names in getattr(module, "GGUF", {}).items()}


def gguf_rules(config: Config) -> list[Rule]:
    """How llama.cpp names a family's weights; ValueError where litft does not know that."""
    if config.model_type not in (known := gguf_architectures()):
        reason = f"GGUF files of {config.model_type!r} are not supported"
        raise ValueError(f"{reason}; known: {', '.join(sorted(known))}")
    return family(config.model_type).gguf_rules(config)


def gguf_config(architecture: str, hf: dict[str, Any]) -> dict[str, Any]:
    """config.json's content for one of llama.cpp's architectures, `hf` being what its file says in transformers' words."""
    kinds = [kind for kind, name in gguf_architectures().items() if name == architecture]
    if not kinds:
        known = ", ".join(sorted(set(gguf_architectures().values())))
        raise ValueError(f"the architecture {architecture!r} is not one that litft knows; known: {known}")
    kind = architecture if architecture in kinds else kinds[0]  # Mistral's files are Llama's
    module = family(kind)
    hf = {"model_type": kind, "architectures": [module.GGUF[kind][1]], **hf}
    return module.gguf_config(hf) if hasattr(module, "gguf_config") else hf
