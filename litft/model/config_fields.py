"""The fields of config.json: their types and ranges, each declared once, for all families.

A family sees only what is declared here, after it was checked: a field without a declaration has no
effect, so a new one cannot be read without a check. Defaults differ between families and are where
a family reads the field.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from litft.model.config_file import is_positive

LONGEST_LIST = 1_000


@dataclass(frozen=True)
class FieldType:
    """What a field may contain."""

    description: str  # completes "must be ..."
    is_valid: Callable[[Any], bool]
    fields: dict[str, "FieldType"] = field(default_factory=dict)  # of an object
    # of an object with any names, such as numbers of layers
    entries: "FieldType | None" = None

    def or_null(self) -> "FieldType":
        """Return this type, which also allows null."""

        def is_valid(value: Any) -> bool:
            return value is None or self.is_valid(value)

        return FieldType(
            f"{self.description}, or null", is_valid, self.fields, self.entries
        )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(lowest: int, highest: int) -> FieldType:
    """Return the type of whole numbers in a range."""
    description = f"a whole number from {lowest} to {highest:,}"
    return FieldType(
        description, lambda value: _is_whole(value) and lowest <= value <= highest
    )


def _number(description: str, is_in_range: Callable[[float], bool]) -> FieldType:
    """Return the type of finite numbers in a range."""
    return FieldType(
        description, lambda value: (value == 0 or is_positive(value)) and is_in_range(value)
    )


def _instance(description: str, *types: type) -> FieldType:
    """Return the type of values that Python reads from JSON as one of these types."""
    return FieldType(description, lambda value: isinstance(value, types))


def _list_of(entry: FieldType, description: str, length: int | None = None) -> FieldType:
    """Return the type of lists; length: the number of entries, if it is fixed."""

    def is_valid(value: Any) -> bool:
        if not isinstance(value, list) or len(value) > LONGEST_LIST:
            return False
        if length is not None and len(value) != length:
            return False
        return all(entry.is_valid(item) for item in value)

    return FieldType(description, is_valid)


def _either(*types: FieldType) -> FieldType:
    """Return the union of types."""
    description = " or ".join(option.description for option in types)
    return FieldType(
        description, lambda value: any(option.is_valid(value) for option in types)
    )


def _object(
    fields: dict[str, FieldType] | None = None, entries: FieldType | None = None
) -> FieldType:
    """Return the type of objects. fields: by name; entries: the type of all values, whatever their
    names."""
    return FieldType(
        "an object", lambda value: isinstance(value, dict), fields or {}, entries
    )


def _all(field_type: FieldType, names: str) -> dict[str, FieldType]:
    """Return a declaration of several fields with one type."""
    return dict.fromkeys(names.split(), field_type)


# A larger value means a broken file, and would run out of memory or time before any error message.
DIMENSION = _whole(1, 1_000_000)
COUNT = _whole(1, 10_000)  # heads, experts
WIDTH = _whole(1, 1_000)  # of convolutions over tokens
DEPTH = _whole(1, 1_000)  # layers: several Python objects each
LENGTH = _whole(1, 10**9)  # in tokens
# before scaling; its logarithm is a divisor
ORIGINAL_LENGTH = _whole(2, 10**9).or_null()
VOCABULARY = _whole(1, 10**8)
COUNT_OR_0 = _whole(0, 10_000)
POSITIVE = _number("a number above 0", lambda value: 0 < value <= 1e18)
NOT_NEGATIVE = _number("a number of at least 0", lambda value: value >= 0)
SHARE = _number("a number above 0 and at most 1", lambda value: 0 < value <= 1)
SPARSITY = _number("a number of at least 0 and below 1", lambda value: 0 <= value < 1)
FLAG = _instance("true or false", bool)
TEXT = _instance("text", str)
TEXTS = _list_of(TEXT, "a list of texts")
LAYERS = _list_of(COUNT_OR_0, "a list of numbers of layers")
# one value for all layers, or one a layer
DIMENSIONS = _either(DIMENSION, _list_of(DIMENSION, "a list of such numbers"))
COUNTS = _either(COUNT_OR_0, _list_of(COUNT, "a list of such numbers"))


def _is_step_limit(value: Any) -> bool:
    """Return whether a value is a limit of Mamba's step size; JSON has no infinity: transformers
    writes an object for it."""
    if isinstance(value, dict):
        return list(value.items()) == [("__float__", "Infinity")]
    return NOT_NEGATIVE.is_valid(value) or value == math.inf


def _is_attention_type(value: Any) -> bool:
    """Return whether a value is an entry of GPT-Neo's `attention_types`: the kinds of layers, and
    how often they repeat."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    kinds, repeats = value
    return (
        TEXTS.is_valid(kinds)
        and COUNT.is_valid(repeats)
        and len(kinds) * repeats <= LONGEST_LIST
    )


STEP_LIMIT = FieldType("a number of at least 0", _is_step_limit)
ATTENTION_TYPE = FieldType("a pair of a list of texts and a number", _is_attention_type)

# parameters of RoPE and of its scaling
ROPE_FIELDS = {
    **_all(TEXT.or_null(), "rope_type type"),
    **_all(
        POSITIVE.or_null(),
        "rope_theta factor low_freq_factor high_freq_factor beta_fast beta_slow attention_factor "
        "mscale mscale_all_dim llama_4_scaling_beta alpha short_mscale long_mscale",
    ),
    "original_max_position_embeddings": ORIGINAL_LENGTH,
    "partial_rotary_factor": SHARE.or_null(),
    "truncate": FLAG.or_null(),
    **_all(
        _list_of(POSITIVE, "a list of numbers above 0").or_null(),
        "short_factor long_factor",
    ),
}
# transformers 5 writes the parameters of each kind of layer
ROPE = _object(
    {
        **ROPE_FIELDS,
        **_all(_object(ROPE_FIELDS).or_null(), "full_attention sliding_attention"),
    }
)

MPT_ATTENTION = _object(
    {
        **_all(FLAG, "alibi qk_ln prefix_lm"),
        "attn_type": TEXT,
        "alibi_bias_max": DIMENSION,
        **_all(POSITIVE.or_null(), "softmax_scale clip_qkv"),
    }
)
KIMI_ATTENTION = _object(
    {
        **_all(COUNT, "num_heads head_dim"),
        "short_conv_kernel_size": WIDTH,
        "full_attn_layers": LAYERS,
    }
)
LAYER = _object({"head_dim": DIMENSION, "num_key_value_heads": COUNT})

FIELD_TYPES: dict[str, FieldType] = {
    **_all(
        DIMENSION,
        "hidden_size n_embd d_model ffn_dim shared_expert_intermediate_size query_pre_attn_scalar "
        "kv_lora_rank qk_nope_head_dim qk_rope_head_dim intermediate_size_mlp laurel_rank "
        "global_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_state "
        "mamba_head_dim mamba_expand ssm_state_size state_size block_multiple_of "
        "moe_shared_expert_intermediate_size",
    ),
    **_all(
        DIMENSION.or_null(),
        "head_dim n_inner ffn_hidden_size rotary_dim q_lora_rank v_head_dim "
        "prefix_dense_intermediate_size block_ff_dim mamba_d_ssm dim_model_base "
        "word_embed_proj_dim moe_latent_size n_embed",
    ),
    **_all(DIMENSIONS.or_null(), "intermediate_size moe_intermediate_size"),
    **_all(
        _whole(0, 1_000_000).or_null(),
        "hidden_size_per_layer_input shared_intermediate_size",
    ),
    **_all(WIDTH, "linear_conv_kernel_dim mamba_d_conv conv_L_cache conv_kernel"),
    "mamba_d_head": _either(DIMENSION, FieldType('"auto"', lambda value: value == "auto")),
    # numbers of layers, heads and experts
    **_all(DEPTH, "num_hidden_layers n_layer n_layers num_layers"),
    **_all(
        COUNT,
        "num_attention_heads n_head attention_heads n_heads num_heads linear_num_value_heads "
        "linear_num_key_heads linear_num_heads mamba_n_heads mamba_num_heads mamba_n_groups "
        "n_groups n_routed_experts moe_num_experts moe_k altup_num_inputs decoder_sparse_step "
        "no_rope_layer_interval global_attn_every_n_layers moe_layer_interval "
        "interleave_moe_layer_step full_attention_interval prefix_dense_sliding_window_pattern",
    ),
    **_all(
        COUNT.or_null(),
        "num_key_value_heads num_kv_heads num_global_key_value_heads num_ln_in_parallel_attn "
        "n_group topk_group num_expert_group num_experts_per_token top_k_experts",
    ),
    **_all(
        COUNT_OR_0,
        "max_window_layers num_kv_shared_layers altup_active_idx num_local_experts "
        "num_experts_per_tok first_k_dense_replace num_dense_layers moe_layer_start_index "
        "moe_num_shared_experts",
    ),
    **_all(COUNT_OR_0.or_null(), "n_shared_experts num_shared_experts"),
    "num_experts": COUNTS.or_null(),
    "moe_topk": COUNTS,
    "moe_layer_end_index": _whole(-1, 10_000),
    "sliding_window_pattern": _either(COUNT_OR_0, TEXT).or_null(),
    # lengths in tokens
    **_all(
        LENGTH, "max_position_embeddings n_positions max_seq_len window_size floor_scale"
    ),
    **_all(LENGTH.or_null(), "attention_chunk_size model_max_length"),
    "original_max_position_embeddings": ORIGINAL_LENGTH,
    "sliding_window": _whole(0, 10**9).or_null(),
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": _whole(0, 10**8),
    # numbers
    **_all(
        POSITIVE,
        "rope_theta layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps rotary_emb_base "
        "rope_local_base_freq embedding_multiplier residual_multiplier logits_scaling swiglu_alpha "
        "swiglu_limit routed_scaling_factor route_scale attn_scale scale_emb lm_head_multiplier "
        "key_multiplier attention_in_multiplier attention_out_multiplier ssm_in_multiplier "
        "ssm_out_multiplier qk_scale_factor output_multiplier post_norm_eps",
    ),
    **_all(
        POSITIVE.or_null(),
        "clip_qkv attn_logit_softcapping final_logit_softcapping attention_multiplier logit_scale "
        "rms_norm_eps scale_depth block_ffn_dim_multiplier",
    ),
    **_all(NOT_NEGATIVE, "router_jitter_noise time_step_min mamba_dt_min moe_norm_min"),
    "rotary_pct": SHARE,
    "partial_rotary_factor": SHARE.or_null(),
    # flags
    **_all(
        FLAG,
        "attention_bias mlp_bias tie_word_embeddings tie_embedding use_bias use_qkv_bias qkv_bias "
        "bias use_sliding_window qk_layernorm use_parallel_residual multi_query norm_topk_prob "
        "scale_attn_weights scale_attn_by_inverse_layer_idx attention_out_bias use_post_norm "
        "enable_bias do_layer_norm_before layer_norm_elementwise_affine scale_embedding "
        "mup_enabled lm_head_bias altup_correct_scale attention_k_eq_v "
        "use_double_wide_mlp enable_moe_block rope_interleave block_auto_adjust_ff_dim conv_bias "
        "use_expert_bias use_conv_bias mamba_conv_bias mamba_proj_bias mamba_rms_norm "
        "mamba_norm_before_gate projectors_bias use_attention_gate use_sandwich_norm "
        "linear_allow_neg_eigval moe_renormalize add_cross_attention "
        "apply_residual_connection_post_layernorm _remove_final_layer_norm",
    ),
    # transformers 4.51 wrote a number
    "attn_temperature_tuning": _either(FLAG, COUNT_OR_0),
    **_all(
        FLAG.or_null(), "is_causal use_qk_norm alibi new_decoder_architecture parallel_attn"
    ),
    "use_bidirectional_attention": _instance(
        "true, false, text or null", bool, str, type(None)
    ),
    # texts
    **_all(
        TEXT,
        "model_type hidden_act activation_function activation afn mlp_hidden_act mamba_hidden_act "
        "topk_method expert_selection_fn shared_expert_combination_strategy",
    ),
    **_all(
        TEXT.or_null(), "hidden_activation position_embedding_type hybrid_override_pattern"
    ),
    # the folders of most families have it, with any value; XGLM's network depends on it
    "pad_token_id": FieldType("any value", lambda value: True),
    # lists
    **_all(TEXTS.or_null(), "layer_types layers_block_type mlp_layer_types"),
    **_all(
        LAYERS.or_null(),
        "mlp_only_layers no_rope_layers moe_layers attn_layer_indices full_attn_idxs",
    ),
    "layer_rope_theta": _list_of(NOT_NEGATIVE, "a list of numbers of at least 0").or_null(),
    "activation_sparsity_pattern": _list_of(
        SPARSITY, "a list of shares in [0, 1)"
    ).or_null(),
    "ssm_multipliers": _list_of(POSITIVE, "a list of 5 numbers above 0", 5).or_null(),
    "mlp_multipliers": _list_of(POSITIVE, "a list of 2 numbers above 0", 2).or_null(),
    "time_step_limit": _list_of(
        STEP_LIMIT, "a list of 2 numbers of at least 0", 2
    ).or_null(),
    "attention_types": _list_of(ATTENTION_TYPE, "a list of pairs").or_null(),
    # objects
    **_all(ROPE.or_null(), "rope_scaling rope_parameters"),
    "attn_config": MPT_ATTENTION.or_null(),
    "linear_attn_config": KIMI_ATTENTION.or_null(),
    "per_layer_config": _object(entries=LAYER).or_null(),
}


def declared_fields(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the declared fields of config.json; raise ValueError listing every one with a wrong
    type or range."""
    problems: list[str] = []
    declared = _checked(hf, FIELD_TYPES, "", problems)
    if problems:
        raise ValueError("\n".join(f"config.json: {problem}" for problem in problems))
    return declared


def undeclared_fields(hf: dict[str, Any]) -> list[str]:
    """Return the names of fields in config.json that no family reads."""
    return sorted(name for name in hf if name not in FIELD_TYPES)


def _checked(
    values: dict[str, Any], types: dict[str, FieldType], prefix: str, problems: list[str]
) -> dict[str, Any]:
    """Return the declared fields of an object, and add a text to `problems` for each invalid
    one."""
    declared = {}
    for name, value in values.items():
        field_type = types.get(name)
        if field_type is None:
            continue
        if not field_type.is_valid(value):
            problems.append(
                f"{prefix}{name} must be {field_type.description}, found {value!r:.200}"
            )
        elif isinstance(value, dict):
            # an object with fixed names, or one whose names
            # are free and whose entries have one type
            nested = field_type.fields
            if field_type.entries:
                nested = dict.fromkeys(value, field_type.entries)
            declared[name] = _checked(value, nested, f"{prefix}{name}.", problems)
        else:
            declared[name] = value
    return declared
