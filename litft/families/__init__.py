"""The supported model families, one file each; every file in this folder is imported and registered.

A family file defines:

- `MODEL_TYPES`: values of `model_type` in config.json.
- `config(hf) -> Config`: read the content `hf` of config.json. Missing fields have transformers' defaults.
- `rules(config) -> list[Rule]`: map litft's tensors to the checkpoint's and back (see checkpoints/rules.py).
- optional `text_config(hf)`: return the language model's part of a multimodal config.json.
- optional `WRAPPER`: the names of the language model's modules in the family's multimodal class in transformers.
- optional `peft_rules(config)`: rules for modules that PEFT names differently from the checkpoint, such as stacked experts.
- optional, for GGUF: `GGUF`, which maps a model_type to llama.cpp's architecture and transformers' class,
  `gguf_rules(config)`, and `gguf_config(hf)`, which adds fields of config.json that are not in GGUF metadata. For metadata
  of this family alone, `GGUF_FIELDS` maps its keys to fields of config.json, and `gguf_metadata(config)` returns its values.
  `GGUF_TENSORS` maps fields of config.json to the tensors of a block that are there if the field is true.
  `gguf_architecture(config)` returns the architecture if it depends on more than the model_type.

The helper functions in llama.py cover most of this. A new field of config.json is also added to the lists below.
tutorials/add_a_family.md has an example.
"""

import pkgutil
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from litft.checkpoints.peft_names import ModuleNames
from litft.checkpoints.rules import Rule
from litft.model.config import Config
from litft.model.config_file import is_positive
from litft.model.rope_config import scaled_context


@cache
def families() -> dict[str, ModuleType]:
    """Return the family module of each supported model_type."""
    modules = [import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    return {model_type: module for module in modules for model_type in module.MODEL_TYPES}


# Valid values of config.json fields, for all families. Downloaded files are checked once, here, before any arithmetic.
_SIZES = (
    "hidden_size num_attention_heads vocab_size max_position_embeddings n_embd "
    "n_head n_positions shared_expert_intermediate_size "
    "decoder_sparse_step query_pre_attn_scalar no_rope_layer_interval d_model ffn_dim attention_heads n_heads "
    "num_heads max_seq_len window_size kv_lora_rank qk_nope_head_dim qk_rope_head_dim "
    "global_attn_every_n_layers moe_layer_interval interleave_moe_layer_step floor_scale "
    "intermediate_size_mlp altup_num_inputs laurel_rank global_head_dim full_attention_interval linear_num_value_heads "
    "linear_num_key_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim mamba_n_heads mamba_d_head "
    "mamba_d_state mamba_n_groups mamba_d_conv mamba_num_heads mamba_head_dim ssm_state_size conv_L_cache block_multiple_of "
    "n_groups conv_kernel"
).split()
# one Python object each, hence a low maximum
_COUNTS = "num_hidden_layers n_layer n_layers num_layers n_routed_experts moe_num_experts".split()
_SIZES_OR_NULL = (
    "num_key_value_heads head_dim original_max_position_embeddings n_inner num_kv_heads ffn_hidden_size "
    "rotary_dim num_ln_in_parallel_attn n_group topk_group q_lora_rank v_head_dim prefix_dense_intermediate_size "
    "top_k_experts num_global_key_value_heads attention_chunk_size "
    "num_expert_group num_experts_per_token model_max_length"
).split()
_POSITIVE = (
    "rope_theta layer_norm_eps layer_norm_epsilon norm_epsilon rotary_emb_base rotary_pct "
    "rope_local_base_freq embedding_multiplier residual_multiplier logits_scaling "
    "swiglu_alpha swiglu_limit norm_eps routed_scaling_factor route_scale attn_scale"
).split()
_POSITIVE_OR_NULL = (
    "clip_qkv attn_logit_softcapping final_logit_softcapping attention_multiplier logit_scale rms_norm_eps"
).split()
_FLAGS = (
    "attention_bias mlp_bias tie_word_embeddings use_bias use_qkv_bias qkv_bias bias use_sliding_window qk_layernorm "
    "use_parallel_residual multi_query norm_topk_prob scale_attn_weights scale_attn_by_inverse_layer_idx "
    "attention_out_bias use_post_norm enable_bias do_layer_norm_before layer_norm_elementwise_affine scale_embedding "
    "mup_enabled lm_head_bias attn_temperature_tuning altup_correct_scale attention_k_eq_v use_double_wide_mlp "
    "enable_moe_block"
).split()
_FLAGS_OR_NULL = "use_qk_norm alibi new_decoder_architecture parallel_attn".split()
_TEXTS = "hidden_act model_type activation_function activation".split()
_LISTS_OR_NULL = "layer_types mlp_only_layers no_rope_layers moe_layers activation_sparsity_pattern".split()
_LARGEST = 10**9  # a larger size means a broken file, and would run out of memory before any error message


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _LARGEST


def _is_count(value: Any) -> bool:
    return _is_size(value) and value <= 10_000


def _is_size_or_0(value: Any) -> bool:
    return (value == 0 and not isinstance(value, bool)) or _is_size(value)


def _or_null(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_valid(value)


def _is(expected_type: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, expected_type)


# name of a field -> (whether a value is valid, description of valid values)
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_SIZES, (_is_size, "a whole number of at least 1")),
    **dict.fromkeys(_SIZES_OR_NULL, (_or_null(_is_size), "a whole number of at least 1, or null")),
    **dict.fromkeys(  # Gemma 3n and Hunyuan list one number a layer
        ("intermediate_size", "moe_intermediate_size"),
        (
            lambda value: _or_null(_is_size)(value) or (isinstance(value, list) and all(map(_is_size, value))),
            "a whole number of at least 1, or null",
        ),
    ),
    "use_bidirectional_attention": (lambda value: isinstance(value, bool | str | None), "true, false, a text or null"),
    "sliding_window": (_or_null(_is_size_or_0), "a whole number, or null"),
    **dict.fromkeys(
        ("max_window_layers", "num_kv_shared_layers", "altup_active_idx", "vocab_size_per_layer_input"),
        (_is_size_or_0, "a whole number"),
    ),
    "hidden_size_per_layer_input": (_or_null(_is_size_or_0), "a whole number, or null"),
    "sliding_window_pattern": (
        lambda value: _is_size_or_0(value) or isinstance(value, str | None),
        "a whole number or text",
    ),
    **dict.fromkeys(_POSITIVE, (is_positive, "a number above 0")),
    **dict.fromkeys(_POSITIVE_OR_NULL, (_or_null(is_positive), "a number above 0, or null")),
    **dict.fromkeys(_FLAGS, (_is(bool), "true or false")),
    **dict.fromkeys(_FLAGS_OR_NULL, (_or_null(_is(bool)), "true, false or null")),
    **dict.fromkeys(_COUNTS, (_is_count, "a whole number from 1 to 10,000")),
    # Granite without experts has 0
    "num_local_experts": (lambda value: value == 0 or _is_count(value), "a whole number from 1 to 10,000"),
    "num_experts_per_tok": (_is_size_or_0, "a whole number"),
    # Hunyuan lists one number a layer
    **dict.fromkeys(
        ("num_experts", "moe_topk"),
        (lambda value: value == 0 or _is_count(value) or isinstance(value, list | None), "a whole number"),
    ),
    **dict.fromkeys(_TEXTS, (_is(str), "text")),
    "hidden_activation": (_or_null(_is(str)), "text or null"),
    **dict.fromkeys(_LISTS_OR_NULL, (_or_null(_is(list)), "a list or null")),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "quantization_config"), (_or_null(_is(dict)), "an object or null")),
}


def _check_fields(hf: dict[str, Any]) -> None:
    """Raise ValueError listing every field with a wrong type or range."""
    problems = [
        f"config.json: {name} must be {expected}, found {hf[name]!r}"
        for name, (is_valid, expected) in _CHECKS.items()
        if name in hf and not is_valid(hf[name])
    ]
    if problems:
        raise ValueError("\n".join(problems))


_ENCODER_DECODER = "an encoder and a decoder, and litft trains decoders"
_ENCODER = "an encoder, which does not generate text"
_MAMBA_1 = "a network with Mamba-1 layers, which are not implemented"
# why some model types are not supported
UNSUPPORTED = {
    **dict.fromkeys(
        ("t5", "mt5", "umt5", "bart", "mbart", "pegasus", "marian", "m2m_100", "t5gemma", "whisper", "led", "fsmt"),
        _ENCODER_DECODER,
    ),
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "deberta", "deberta-v2", "electra", "distilbert", "albert", "modernbert"),
        _ENCODER,
    ),
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba"), _MAMBA_1),
    "rwkv": "a network with RWKV layers, which are not implemented",
    "clip": "an image model",
    "vit": "an image model",
    "wav2vec2": "a speech model",
}


def family(model_type: str) -> ModuleType:
    """Return the module of a model_type; raise ValueError listing the supported ones if it is not among them."""
    if model_type not in families():
        reason = UNSUPPORTED.get(model_type)
        why = f": it is {reason}" if reason else ""
        remedy = "tutorials/families.md has what is supported and why, add_a_family.md shows how to add a family"
        supported = f"supported: {', '.join(sorted(families()))}"
        raise ValueError(f"config.json: model_type {model_type!r} is not supported{why}; {remedy} ({supported})")
    return families()[model_type]


def text_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's config.json if `hf` is a multimodal model's, otherwise `hf`."""
    module = families().get(str(hf.get("model_type")))
    if not hasattr(module, "text_config"):
        return hf
    if not isinstance(hf.get("text_config", {}), dict):
        raise ValueError(f"config.json: text_config must be an object, found {hf['text_config']!r:.200}")
    try:
        return module.text_config(hf)
    except KeyError as missing:
        raise ValueError(f"config.json lacks the field {missing}; is the file complete?") from None


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for modules that PEFT names differently from the checkpoint, such as stacked experts."""
    module = family(config.model_type)
    return module.peft_rules(config) if hasattr(module, "peft_rules") else []


def wrapper_names(config: Config) -> ModuleNames:
    """Return the names of the language model's modules in the multimodal class of a family."""
    return getattr(family(config.model_type), "WRAPPER", ModuleNames("model.language_model."))


def read_config(hf: dict[str, Any]) -> Config:
    """Convert the content of config.json to a Config; raise ValueError naming missing or unsupported fields."""
    try:
        module = family(str(hf["model_type"]))  # first: fields of an unknown family may have other meanings
        _check_fields(hf)
        config = module.config(hf)
    except KeyError as missing:
        raise ValueError(f"config.json lacks the field {missing}; is it the folder of a causal language model?") from None
    if config.learned_positions:
        return config
    return replace(config, max_positions=scaled_context(hf, config.max_positions))


# families whose network others have under another model_type, as code in the model's repository
LOOKALIKES = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3", "phi3", "gpt_neox", "gpt2")
# fields of config.json that do not describe the network
_NOT_THE_NETWORK = (
    "architectures auto_map torch_dtype dtype transformers_version use_cache initializer_range bos_token_id eos_token_id "
    "pad_token_id attention_dropout _name_or_path pretraining_tp hidden_dropout rope_theta"
).split()


def as_family(hf: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Return config.json with another model_type, and without the code that transformers would run for its own."""
    kept = {name: value for name, value in hf.items() if name not in ("auto_map", "architectures")}
    return kept | {"model_type": model_type}


def unread_fields(hf: dict[str, Any]) -> list[str]:
    """Return the fields of config.json that no family reads: their names are in none of the files."""
    sources = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("*.py"))
    read = {*re.findall(r"\w+", sources), *_NOT_THE_NETWORK}
    return sorted(name for name in hf if name not in read)


def gguf_architectures() -> dict[str, str]:
    """Return llama.cpp's architecture of each model_type with GGUF support."""
    return {
        model_type: names[0] for module in families().values() for model_type, names in getattr(module, "GGUF", {}).items()
    }


def gguf_architecture(config: Config) -> str:
    """Return llama.cpp's architecture of a model; raise ValueError without GGUF support."""
    if config.model_type not in (supported := gguf_architectures()):
        reason = f"GGUF files of {config.model_type!r} are not supported"
        remedy = "keep the Hugging Face folder; tutorials/export.md gives reasons"
        raise ValueError(f"{reason}; supported: {', '.join(sorted(supported))}; {remedy}")
    module = family(config.model_type)
    return module.gguf_architecture(config) if hasattr(module, "gguf_architecture") else supported[config.model_type]


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names of a family's weights; raise ValueError without GGUF support."""
    gguf_architecture(config)
    return [*families()["llama"].drop_mtp(config, "blk."), *family(config.model_type).gguf_rules(config)]


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return the GGUF metadata that only this family has, by key."""
    module = family(config.model_type)
    return module.gguf_metadata(config) if hasattr(module, "gguf_metadata") else {}


def gguf_fields(architecture: str) -> dict[str, str]:
    """Return the fields of config.json for GGUF metadata that only families of this architecture have."""
    return _of_architecture(architecture, "GGUF_FIELDS")


def gguf_tensors(architecture: str) -> dict[str, str]:
    """Return the fields of config.json that are true if a block has a tensor, and the tensor's name in the block."""
    return _of_architecture(architecture, "GGUF_TENSORS")


def _of_architecture(architecture: str, table: str) -> dict[str, str]:
    """Return the union of a table of all families with this GGUF architecture."""
    modules = {family(model_type) for model_type, name in gguf_architectures().items() if name == architecture}
    return {key: value for module in modules for key, value in getattr(module, table, {}).items()}


def gguf_config(architecture: str, hf: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a GGUF file with this architecture; hf: the fields that its metadata specifies."""
    model_types = [model_type for model_type, name in gguf_architectures().items() if name == architecture]
    if not model_types:
        supported = ", ".join(sorted(set(gguf_architectures().values())))
        raise ValueError(f"the GGUF architecture {architecture!r} is not supported; supported: {supported}")
    model_type = architecture if architecture in model_types else model_types[0]  # llama.cpp has no "mistral"
    module = family(model_type)
    hf = {"model_type": model_type, "architectures": [module.GGUF[model_type][1]], **hf}
    try:
        return module.gguf_config(hf) if hasattr(module, "gguf_config") else hf
    except KeyError as missing:
        fields = {field: key for key, field in gguf_fields(architecture).items()}
        key = fields.get(missing.args[0], missing.args[0])
        raise ValueError(f"{architecture}.{key}: missing from the metadata; download the file again") from None
