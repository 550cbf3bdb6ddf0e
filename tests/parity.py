"""Variations of every family and measures of their difference from transformers, for tests and
tutorials/families.md."""

import copy
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.modeling_outputs import CausalLMOutput

from litft.model.config import Config
from litft.model.kv_cache import KVCache
from litft.model.transformer import GPT

LENGTHS = (20, 100)  # within and beyond the original context of 64

# a Llama that trains in milliseconds, with a different value for every size
TINY = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
LONG = dict(
    rope_type="longrope",
    short_factor=[1.1, 1.2, 1.4, 1.7],
    long_factor=[2.0, 3.0, 5.0, 9.0],
    factor=4.0,
)
LINEAR = dict(rope_type="linear", factor=2.5, rope_theta=1e4)
PART = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
GPT2 = dict(max_position_embeddings=128, n_inner=56)
MOE = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24)

MLA = dict(
    kv_lora_rank=10,
    q_lora_rank=14,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=12,
    num_key_value_heads=4,
)
HYBRID = ["linear_attention", "full_attention", "linear_attention"]
LINEAR_ATTENTION = dict(
    linear_key_head_dim=6,
    linear_value_head_dim=10,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    head_dim=8,
    layer_types=HYBRID,
)
MAMBA = dict(mamba_n_heads=4, mamba_d_state=16, mamba_n_groups=2)
DEEPSEEK = dict(num_experts_per_tok=2, moe_intermediate_size=24)

# transformers opens it only as a part of Mistral 3's multimodal class
transformers.AutoModelForCausalLM.register(
    transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True
)


class MuseGlimmerText(transformers.MuseGlimmerPreTrainedModel):
    """Muse Glimmer's text alone, of which transformers has no class with a head: the head of its
    multimodal class."""

    config_class = transformers.MuseGlimmerTextConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = transformers.MuseGlimmerTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, labels=None, **inputs):
        """Return the logits, and the loss of labels."""
        hidden = self.model(input_ids, **inputs).last_hidden_state
        limit = self.config.final_logit_softcapping
        logits = self.lm_head(hidden) * self.config.output_multiplier
        logits = torch.tanh(logits / limit) * limit
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)


transformers.AutoModelForCausalLM.register(
    transformers.MuseGlimmerTextConfig, MuseGlimmerText, exist_ok=True
)

# family: (transformers' config class, {variation: values})
ROWS: dict[str, tuple[str, dict[str, dict]]] = {
    "llama": (
        "LlamaConfig",
        {
            "grouped": {},
            "all heads": dict(num_key_value_heads=4),
            "one key head": dict(num_key_value_heads=1),
            "tied": dict(tie_word_embeddings=True),
            "attention bias": dict(attention_bias=True),
            "mlp bias": dict(mlp_bias=True),
            "wide heads": dict(head_dim=16),
            "gelu": dict(hidden_act="gelu_pytorch_tanh"),
            "rope base": dict(rope_parameters=dict(rope_type="default", rope_theta=500.0)),
            "linear": dict(rope_parameters=LINEAR),
            "dynamic": dict(
                rope_parameters=dict(rope_type="dynamic", factor=3.0, rope_theta=1e4)
            ),
            "llama3": dict(rope_parameters=dict(rope_theta=500.0, **LLAMA3)),
            "yarn": dict(rope_parameters=dict(rope_theta=1e4, **YARN)),
            "yarn mscale": dict(
                rope_parameters=dict(
                    rope_theta=1e4, mscale=0.8, mscale_all_dim=0.5, truncate=False, **YARN
                )
            ),
            "yarn betas": dict(
                rope_parameters=dict(
                    rope_theta=1e4, beta_fast=16, beta_slow=2, attention_factor=1.3, **YARN
                )
            ),
            "longrope": dict(
                rope_parameters=dict(
                    rope_theta=1e4, original_max_position_embeddings=64, **LONG
                )
            ),
        },
    ),
    "mistral": (
        "MistralConfig",
        {
            "window": dict(sliding_window=5),
            "no window": dict(sliding_window=None, layer_types=["full_attention"] * 3),
            "window, wide heads": dict(
                sliding_window=9, head_dim=12, tie_word_embeddings=True
            ),
        },
    ),
    "ministral": (
        "MinistralConfig",
        {"alternating": dict(sliding_window=6, layer_types=MIXED, head_dim=8)},
    ),
    "ministral3": (
        "Ministral3Config",
        {
            "queries scaled by position": dict(
                head_dim=16,
                rope_parameters=dict(
                    rope_theta=1e4,
                    llama_4_scaling_beta=0.3,
                    mscale=1.0,
                    mscale_all_dim=1.0,
                    **YARN,
                ),
            ),
            "window, tied": dict(
                head_dim=8,
                sliding_window=6,
                tie_word_embeddings=True,
                rope_parameters=dict(rope_theta=1e4, llama_4_scaling_beta=0.1, **YARN),
            ),
        },
    ),
    "mixtral": (
        "MixtralConfig",
        {
            "4 experts": dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8),
            "window, 3 of 6": dict(
                num_local_experts=6, num_experts_per_tok=3, sliding_window=7, head_dim=8
            ),
        },
    ),
    "qwen2": (
        "Qwen2Config",
        {
            "biases": {},
            "tied": dict(tie_word_embeddings=True),
            "late windows": dict(
                use_sliding_window=True, sliding_window=6, max_window_layers=1
            ),
        },
    ),
    "qwen3": (
        "Qwen3Config",
        {
            "q/k norms": dict(head_dim=16),
            "biases, tied": dict(
                head_dim=12, attention_bias=True, tie_word_embeddings=True
            ),
            "windows": dict(
                head_dim=8, use_sliding_window=True, sliding_window=6, layer_types=MIXED
            ),
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "shared expert": dict(shared_expert_intermediate_size=40, **MOE),
            "some dense, renormalized": dict(
                shared_expert_intermediate_size=16,
                mlp_only_layers=[1],
                norm_topk_prob=True,
                qkv_bias=False,
                **MOE,
            ),
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "renormalized": dict(head_dim=16, norm_topk_prob=True, **MOE),
            "every second sparse": dict(head_dim=8, decoder_sparse_step=2, **MOE),
        },
    ),
    "gemma": (
        "GemmaConfig",
        {
            "one key head": dict(num_key_value_heads=1, head_dim=16),
            "grouped": dict(head_dim=8),
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {
            "soft caps, windows": dict(
                head_dim=16,
                sliding_window=6,
                query_pre_attn_scalar=24,
                attn_logit_softcapping=3.0,
            ),
            "no caps": dict(
                head_dim=8,
                attn_logit_softcapping=None,
                final_logit_softcapping=None,
                sliding_window=6,
            ),
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            "two rope bases": dict(
                head_dim=16, sliding_window=6, layer_types=MIXED, query_pre_attn_scalar=24
            ),
            "scaled, six layers": dict(
                head_dim=8,
                sliding_window=5,
                num_hidden_layers=6,
                rope_parameters=dict(
                    full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
                    sliding_attention=dict(rope_type="default", rope_theta=1e4),
                ),
            ),
        },
    ),
    "gemma4_text": (
        "Gemma4TextConfig",
        {
            "per-layer embeddings, shared keys": dict(
                head_dim=4,
                global_head_dim=12,
                hidden_size_per_layer_input=10,
                vocab_size_per_layer_input=96,
                num_hidden_layers=6,
                num_kv_shared_layers=2,
                layer_types=["sliding_attention", "full_attention"] * 3,
                sliding_window=6,
                use_double_wide_mlp=True,
                final_logit_softcapping=20.0,
            ),
            "experts, keys as values": dict(
                head_dim=8,
                global_head_dim=16,
                hidden_size_per_layer_input=0,
                attention_k_eq_v=True,
                num_global_key_value_heads=1,
                layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                sliding_window=6,
                enable_moe_block=True,
                num_experts=5,
                top_k_experts=2,
                moe_intermediate_size=24,
            ),
        },
    ),
    "gemma3n_text": (
        "Gemma3nTextConfig",
        {
            "four streams, shared keys": dict(
                head_dim=8,
                hidden_size_per_layer_input=10,
                vocab_size_per_layer_input=96,
                num_hidden_layers=6,
                num_kv_shared_layers=2,
                layer_types=["sliding_attention", "full_attention"] * 3,
                sliding_window=6,
                laurel_rank=5,
                intermediate_size=[56, 56, 40, 56, 56, 56],
                activation_sparsity_pattern=[0.7, 0.0, 0.9, 0.0, 0.0, 0.0],
            ),
            "three streams": dict(
                head_dim=8,
                hidden_size_per_layer_input=10,
                vocab_size_per_layer_input=96,
                num_kv_shared_layers=0,
                layer_types=MIXED,
                sliding_window=6,
                altup_num_inputs=3,
                altup_active_idx=1,
                laurel_rank=5,
            ),
        },
    ),
    "phi": (
        "PhiConfig",
        {
            "partial": dict(rope_parameters=PART),
            "q/k norms, tied": dict(qk_layernorm=True, tie_word_embeddings=True),
        },
    ),
    "phi3": (
        "Phi3Config",
        {
            "fused": {},
            "window": dict(sliding_window=7, num_key_value_heads=4),
            "longrope, partial, tied": dict(
                tie_word_embeddings=True,
                original_max_position_embeddings=32,
                rope_parameters=dict(
                    rope_type="longrope",
                    rope_theta=1e4,
                    partial_rotary_factor=0.75,
                    short_factor=[1.1, 1.2, 1.4],
                    long_factor=[2.0, 3.0, 5.0],
                ),
            ),
        },
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        {
            "parallel, partial": {},
            "sequential": dict(use_parallel_residual=False),
            "no bias, tied, full": dict(
                attention_bias=False,
                tie_word_embeddings=True,
                rope_parameters=dict(PART, partial_rotary_factor=1.0),
            ),
        },
    ),
    "falcon": (
        "FalconConfig",
        {
            "7B: one key head": dict(ffn_hidden_size=56),
            "40B: groups, two norms": dict(
                new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=56
            ),
            "11B: groups, one norm": dict(
                new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
            ),
            "sequential, biases, all heads": dict(
                parallel_attn=False, bias=True, multi_query=False, ffn_hidden_size=56
            ),
            "untied": dict(tie_word_embeddings=False),
        },
    ),
    "stablelm": (
        "StableLmConfig",
        {
            "partial": {},
            "q/k norms, biases": dict(qk_layernorm=True, use_qkv_bias=True),
            "parallel, tied": dict(
                use_parallel_residual=True, tie_word_embeddings=True, rope_parameters=PART
            ),
        },
    ),
    "olmo": (
        "OlmoConfig",
        {"weightless norms": {}, "clipped": dict(clip_qkv=0.7, tie_word_embeddings=True)},
    ),
    "olmo2": (
        "Olmo2Config",
        {"norms after": {}, "biases": dict(attention_bias=True, num_key_value_heads=4)},
    ),
    "olmo3": (
        "Olmo3Config",
        {
            "windows": dict(sliding_window=6, layer_types=MIXED),
            "yarn": dict(
                sliding_window=6,
                layer_types=MIXED,
                rope_parameters=dict(
                    full_attention=dict(rope_theta=5e5, **YARN),
                    sliding_attention=dict(rope_type="default", rope_theta=5e5),
                ),
            ),
        },
    ),
    "olmoe": (
        "OlmoeConfig",
        {
            "experts": dict(num_experts=5, num_experts_per_tok=2, num_key_value_heads=4),
            "clipped, renormalized": dict(
                num_experts=4,
                num_experts_per_tok=3,
                clip_qkv=0.9,
                norm_topk_prob=True,
                num_key_value_heads=4,
            ),
        },
    ),
    "gpt2": (
        "GPT2Config",
        {
            "tied": GPT2,
            "untied, scaled by depth": dict(
                GPT2, tie_word_embeddings=False, scale_attn_by_inverse_layer_idx=True
            ),
        },
    ),
    "gptj": (
        "GPTJConfig",
        {
            "interleaved, partial": dict(rotary_dim=4, **GPT2),
            "whole heads": dict(rotary_dim=8, **GPT2),
        },
    ),
    "gpt_bigcode": (
        "GPTBigCodeConfig",
        {
            "one key head": GPT2,
            "all heads, untied": dict(GPT2, multi_query=False, tie_word_embeddings=False),
        },
    ),
    "starcoder2": (
        "Starcoder2Config",
        {
            "window": dict(sliding_window=6),
            "no bias, untied": dict(use_bias=False, tie_word_embeddings=False),
        },
    ),
    "granite": (
        "GraniteConfig",
        {
            "four scales": dict(
                embedding_multiplier=3.0,
                residual_multiplier=0.4,
                attention_multiplier=0.2,
                logits_scaling=5.0,
            ),
            "biases, tied": dict(
                attention_bias=True, mlp_bias=True, tie_word_embeddings=True
            ),
        },
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        {
            "experts": dict(
                num_local_experts=5,
                num_experts_per_tok=2,
                residual_multiplier=0.4,
                attention_multiplier=0.2,
            )
        },
    ),
    "cohere": (
        "CohereConfig",
        {
            "interleaved": dict(logit_scale=0.3),
            "q/k norms, biases": dict(use_qk_norm=True, attention_bias=True),
        },
    ),
    "cohere2": (
        "Cohere2Config",
        {"windows, NoPE": dict(sliding_window=6, layer_types=MIXED)},
    ),
    "glm": (
        "GlmConfig",
        {
            "half rotated": dict(head_dim=8),
            "no bias": dict(head_dim=16, attention_bias=False),
        },
    ),
    "glm4": (
        "Glm4Config",
        {
            "norms on both sides": dict(head_dim=8),
            "tied": dict(head_dim=16, tie_word_embeddings=True),
        },
    ),
    "ernie4_5": (
        "Ernie4_5Config",
        {
            "interleaved": dict(head_dim=8),
            "biases, untied": dict(head_dim=12, use_bias=True, tie_word_embeddings=False),
        },
    ),
    "smollm3": (
        "SmolLM3Config",
        {
            "NoPE": dict(no_rope_layers=[1, 0, 1]),
            "untied, windows": dict(
                no_rope_layer_interval=2,
                use_sliding_window=True,
                sliding_window=6,
                tie_word_embeddings=False,
            ),
        },
    ),
    "llama4_text": (
        "Llama4TextConfig",
        {
            "chunks, NoPE, experts": dict(
                head_dim=8,
                attention_chunk_size=7,
                no_rope_layers=[1, 0, 1],
                moe_layers=[0, 2],
                num_local_experts=5,
                num_experts_per_tok=2,
                intermediate_size_mlp=40,
                floor_scale=6,
                rope_parameters=dict(rope_theta=500.0, **LLAMA3),
            ),
            "no norm of keys": dict(
                head_dim=8,
                use_qk_norm=False,
                attn_temperature_tuning=False,
                no_rope_layer_interval=2,
                interleave_moe_layer_step=2,
                num_local_experts=4,
                intermediate_size_mlp=40,
            ),
        },
    ),
    "internlm3": (
        "InternLM3Config",
        {"biases": dict(head_dim=8, attention_bias=True, mlp_bias=True)},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            "greedy": dict(
                MLA,
                q_lora_rank=None,
                first_k_dense_replace=1,
                n_routed_experts=5,
                **DEEPSEEK,
            ),
            "limited to groups": dict(
                MLA,
                n_routed_experts=8,
                n_group=4,
                topk_group=2,
                topk_method="group_limited_greedy",
                routed_scaling_factor=2.0,
                **DEEPSEEK,
            ),
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "groups, correction": dict(
                MLA,
                n_routed_experts=8,
                n_group=4,
                topk_group=2,
                first_k_dense_replace=1,
                **DEEPSEEK,
            ),
            "yarn, no query rank": dict(
                MLA,
                q_lora_rank=None,
                n_routed_experts=4,
                n_group=1,
                topk_group=1,
                first_k_dense_replace=0,
                rope_interleave=False,
                attention_bias=True,
                rope_parameters=dict(
                    rope_theta=1e4, mscale=1.0, mscale_all_dim=1.0, **YARN
                ),
                **DEEPSEEK,
            ),
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {"latent, shared": dict(MLA, n_routed_experts=5, **DEEPSEEK)},
    ),
    "minicpm3": (
        "MiniCPM3Config",
        {"latent, scales": dict(MLA, scale_emb=3.0, scale_depth=0.8, dim_model_base=20)},
    ),
    # transformers sets the padding token's row to zero
    "youtu": ("YoutuConfig", {"latent": dict(MLA, pad_token_id=None)}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "q/k norms": dict(
                head_dim=16, use_qk_norm=True, n_routed_experts=5, **DEEPSEEK
            ),
            "groups": dict(
                head_dim=8,
                n_routed_experts=8,
                n_group=2,
                topk_group=1,
                attention_bias=True,
                **DEEPSEEK,
            ),
        },
    ),
    "solar_open": (
        "SolarOpenConfig",
        {"all sparse": dict(head_dim=8, n_routed_experts=5, **DEEPSEEK)},
    ),
    "dots1": (
        "Dots1Config",
        {
            "windows": dict(
                head_dim=8,
                n_routed_experts=5,
                n_shared_experts=1,
                n_group=1,
                topk_group=1,
                sliding_window=6,
                layer_types=MIXED,
                first_k_dense_replace=1,
                **DEEPSEEK,
            )
        },
    ),
    "exaone_moe": (
        "ExaoneMoeConfig",
        {
            "windows, NoPE": dict(
                head_dim=8,
                num_experts=5,
                num_experts_per_tok=2,
                moe_intermediate_size=24,
                sliding_window=6,
                layer_types=MIXED,
            )
        },
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {
            "partial": dict(
                head_dim=8, rotary_dim=4, num_local_experts=5, num_experts_per_tok=2
            )
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {"shared": dict(moe_num_experts=5, moe_k=2, moe_intermediate_size=24)},
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1Config",
        {"shared": dict(head_dim=16, num_experts=5, moe_topk=2)},
    ),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        {
            "shared": dict(
                num_local_experts=5,
                num_experts_per_tok=2,
                shared_intermediate_size=20,
                attention_multiplier=0.2,
            )
        },
    ),
    "phimoe": (
        "PhimoeConfig",
        {
            "SparseMixer": dict(
                num_local_experts=5,
                attention_bias=True,
                lm_head_bias=True,
                router_jitter_noise=0.2,
            )
        },
    ),
    "cohere2_moe": (
        "Cohere2MoeConfig",
        {
            "softmax, averaged": dict(
                head_dim=8,
                sliding_window=6,
                layer_types=MIXED,
                num_experts=5,
                num_shared_experts=1,
                mlp_layer_types=["dense", "sparse", "sparse"],
                prefix_dense_intermediate_size=40,
            ),
            "sigmoid": dict(
                head_dim=8,
                sliding_window=6,
                layer_types=MIXED,
                num_experts=5,
                expert_selection_fn="sigmoid",
                mlp_layer_types=["sparse"] * 3,
                rms_norm_eps=1e-5,
            ),
        },
    ),
    "afmoe": (
        "AfmoeConfig",
        {
            "gated attention": dict(
                head_dim=8,
                num_experts=5,
                num_experts_per_tok=2,
                moe_intermediate_size=24,
                sliding_window=6,
                layer_types=MIXED,
                mup_enabled=True,
                route_scale=1.7,
            )
        },
    ),
    "flex_olmo": (
        "FlexOlmoConfig",
        {"experts": dict(num_experts=5, num_experts_per_tok=2)},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "delta nets, experts": dict(
                LINEAR_ATTENTION,
                shared_expert_intermediate_size=20,
                norm_topk_prob=True,
                **MOE,
            )
        },
    ),
    "qwen3_5_text": (
        "Qwen3_5TextConfig",
        {
            "delta nets": dict(
                LINEAR_ATTENTION,
                linear_key_head_dim=16,
                linear_value_head_dim=16,
                tie_word_embeddings=True,
            )
        },
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig",
        {
            "delta nets, experts": dict(
                LINEAR_ATTENTION,
                linear_key_head_dim=16,
                shared_expert_intermediate_size=20,
                **MOE,
            )
        },
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            "KDA, latent": dict(
                MLA,
                q_lora_rank=None,
                num_local_experts=5,
                linear_head_dim=6,
                linear_num_heads=4,
                layer_types=HYBRID,
                **DEEPSEEK,
            )
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "short convolutions": dict(
                block_multiple_of=8, layer_types=["conv", "full_attention", "conv"]
            ),
            "bias": dict(
                conv_bias=True,
                block_auto_adjust_ff_dim=False,
                layer_types=["conv", "conv", "full_attention"],
            ),
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            "experts": dict(
                num_dense_layers=1, layer_types=["conv", "full_attention", "conv"], **MOE
            )
        },
    ),
    "lfm3": (
        "Lfm3Config",
        {
            "windows, gates": dict(
                head_dim=8,
                sliding_window=6,
                layer_types=["conv", "sliding_attention", "full_attention"],
                conv_L_cache=5,
            ),
            "no gates, norms before": dict(
                head_dim=8,
                use_attention_gate=False,
                use_sandwich_norm=False,
                layer_types=["conv", "conv", "full_attention"],
            ),
        },
    ),
    "mellum": (
        "MellumConfig",
        {
            "windows, a dense layer": dict(
                head_dim=8,
                sliding_window=6,
                layer_types=MIXED,
                mlp_layer_types=["dense", "sparse", "sparse"],
                num_experts=5,
                num_experts_per_tok=2,
                moe_intermediate_size=24,
            )
        },
    ),
    "bamba": ("BambaConfig", {"Mamba-2": dict(MAMBA, attn_layer_indices=[1])}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            "experts, NoPE": dict(
                MAMBA,
                layer_types=HYBRID,
                num_local_experts=4,
                shared_intermediate_size=20,
                residual_multiplier=0.4,
            ),
            "dense, RoPE": dict(
                MAMBA,
                layer_types=HYBRID,
                num_local_experts=0,
                shared_intermediate_size=40,
                position_embedding_type="rope",
            ),
            "attention only": dict(
                MAMBA,
                layer_types=["full_attention"] * 3,
                num_local_experts=0,
                num_experts_per_tok=0,  # as published
                shared_intermediate_size=40,
                position_embedding_type="rope",
            ),
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            "side by side": dict(
                MAMBA, mamba_d_ssm=24, mamba_d_state=32, mamba_rms_norm=True
            ),
            "scales": dict(
                MAMBA,
                mamba_d_ssm=24,
                mamba_d_state=32,
                key_multiplier=0.7,
                attention_in_multiplier=1.2,
                attention_out_multiplier=0.8,
                mlp_multipliers=[0.9, 1.1],
                ssm_multipliers=[0.5, 0.7, 1.2, 1.3, 0.9],
                ssm_in_multiplier=1.1,
                ssm_out_multiplier=0.6,
                embedding_multiplier=2.0,
                lm_head_multiplier=0.5,
                projectors_bias=True,
            ),
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "Mamba-2, attention, MLP, experts": dict(
                layers_block_type=["linear_attention", "full_attention", "mlp", "moe"],
                mamba_num_heads=4,
                mamba_head_dim=6,
                n_groups=2,
                ssm_state_size=16,
                head_dim=8,
                n_routed_experts=5,
                moe_shared_expert_intermediate_size=20,
                **DEEPSEEK,
            )
        },
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        {
            "delta nets, NoPE": dict(
                linear_key_head_dim=16, linear_value_head_dim=16, layer_types=HYBRID
            ),
            "RoPE": dict(
                linear_key_head_dim=12,
                linear_value_head_dim=12,
                layer_types=HYBRID,
                rope_parameters=dict(rope_type="default", rope_theta=1e4),
            ),
        },
    ),
    "mamba2": (
        "Mamba2Config",
        {"no attention": dict(num_heads=4, head_dim=16, state_size=6, n_groups=2)},
    ),
    "nemotron": ("NemotronConfig", {"squared ReLU, half rotated": {}}),
    "arcee": ("ArceeConfig", {"squared ReLU": {}}),
    "jais2": ("Jais2Config", {"LayerNorm, biases": {}}),
    "seed_oss": (
        "SeedOssConfig",
        {
            "biases": dict(head_dim=12),
            "output bias": dict(head_dim=8, attention_out_bias=True),
        },
    ),
    "helium": ("HeliumConfig", {"interleaved": dict(head_dim=8)}),
    "exaone4": (
        "Exaone4Config",
        {
            "windows, NoPE": dict(sliding_window=6, layer_types=MIXED),
            "no window": dict(sliding_window=None, layer_types=["full_attention"] * 3),
        },
    ),
    "apertus": (
        "ApertusConfig",
        {
            "xIELU": dict(hidden_act="xielu"),
            "llama3": dict(rope_parameters=dict(rope_theta=500.0, **LLAMA3)),
        },
    ),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1Config",
        {
            "norms after RoPE": dict(head_dim=16),
            "NTK alpha": dict(
                head_dim=8,
                rope_parameters=dict(
                    rope_type="dynamic", rope_theta=1e4, alpha=50.0, factor=1.0
                ),
            ),
        },
    ),
    "cwm": (
        "CwmConfig",
        {
            "windows": dict(
                sliding_window=6,
                layer_types=MIXED,
                head_dim=8,
                rope_parameters=dict(rope_theta=500.0, **LLAMA3),
            )
        },
    ),
    "nanochat": (
        "NanoChatConfig",
        {
            "reversed rotation": {},
            "reversed rotation, dynamic": {
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "factor": 3.0,
                    "rope_theta": 500.0,
                }
            },
        },
    ),
    "hyperclovax": (
        "HyperCLOVAXConfig",
        {
            "post norms": dict(residual_multiplier=0.4, logits_scaling=0.7),
            "no post norms": dict(use_post_norm=False),
        },
    ),
    "vaultgemma": (
        "VaultGemmaConfig",
        {"one norm a part": dict(head_dim=16, sliding_window=6, query_pre_attn_scalar=24)},
    ),
    "persimmon": ("PersimmonConfig", {"q/k norms": {}}),
    "opt": (
        "OPTConfig",
        {
            "offset positions": dict(
                ffn_dim=56, max_position_embeddings=128, pad_token_id=0
            ),
            "norms of sums": dict(
                ffn_dim=56, max_position_embeddings=128, do_layer_norm_before=False
            ),
        },
    ),
    "biogpt": ("BioGptConfig", {"scaled embedding": dict(max_position_embeddings=128)}),
    "xglm": ("XGLMConfig", {"sinusoids": dict(ffn_dim=56, max_position_embeddings=128)}),
    "gpt_neo": (
        "GPTNeoConfig",
        {
            "local and global": dict(
                max_position_embeddings=128,
                window_size=6,
                attention_types=[[["global", "local"], 1], [["local"], 1]],
            )
        },
    ),
    "codegen": ("CodeGenConfig", {"fused in four parts": dict(rotary_dim=4, **GPT2)}),
    "bloom": (
        "BloomConfig",
        {"ALiBi": {}, "ALiBi, 6 heads": dict(hidden_size=48, num_attention_heads=6)},
    ),
    "mpt": (
        "MptConfig",
        {
            "ALiBi": dict(attn_config=dict(clip_qkv=0.9)),
            "ALiBi, 6 heads": dict(hidden_size=48, num_attention_heads=6),
        },
    ),
    "openai-gpt": ("OpenAIGPTConfig", {"norms of sums": dict(max_position_embeddings=128)}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "sinks, experts": dict(
                num_local_experts=5, num_experts_per_tok=2, head_dim=16, sliding_window=6
            ),
            "no bias": dict(
                num_local_experts=4,
                num_experts_per_tok=3,
                head_dim=8,
                attention_bias=False,
                rope_parameters=LINEAR,
                swiglu_limit=1.5,
            ),
        },
    ),
    "gemma4_unified_text": (
        "Gemma4UnifiedTextConfig",
        {
            "keys as values": dict(
                head_dim=8,
                global_head_dim=16,
                attention_k_eq_v=True,
                num_global_key_value_heads=1,
                layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                sliding_window=6,
                final_logit_softcapping=20.0,
            ),
        },
    ),
    "sarvam_mla": (
        "SarvamMLAConfig",
        {
            "no query rank": dict(
                MLA,
                q_lora_rank=None,
                n_routed_experts=6,
                first_k_dense_replace=1,
                **DEEPSEEK,
            ),
        },
    ),
    "mistral4": (
        "Mistral4Config",
        {
            "scaled queries": dict(
                MLA,
                n_routed_experts=6,
                rope_parameters=dict(
                    rope_type="yarn",
                    rope_theta=1e4,
                    factor=4.0,
                    original_max_position_embeddings=16,
                    mscale=1.0,
                    mscale_all_dim=1.0,
                    llama_4_scaling_beta=0.3,
                ),
                **DEEPSEEK,
            ),
            "groups": dict(
                MLA,
                n_routed_experts=8,
                n_group=4,
                topk_group=2,
                first_k_dense_replace=1,
                norm_topk_prob=False,
                routed_scaling_factor=1.5,
                **DEEPSEEK,
            ),
        },
    ),
    "muse_glimmer_text": (
        "MuseGlimmerTextConfig",
        {
            "windows, NoPE": dict(head_dim=8, sliding_window=6, num_hidden_layers=5),
            "RoPE by layer": dict(
                head_dim=16,
                sliding_window=6,
                layer_types=MIXED,
                layer_rope_theta=[0, 1e4, 1e4],
                rope_parameters=dict(rope_type="default", rope_theta=1e4),
                qk_scale_factor=2.5,
                output_multiplier=0.6,
                post_norm_eps=1e-3,
                final_logit_softcapping=4.0,
            ),
        },
    ),
    "apertus1p5_text": (
        "Apertus1p5TextConfig",
        {"xIELU": dict(hidden_act="xielu")},
    ),
    "iquestcoder": (
        "IQuestCoderConfig",
        {"grouped": dict(head_dim=8)},
    ),
    "exaone": (
        "ExaoneConfig",
        {
            "tied, grouped": dict(
                head_dim=8, num_key_value_heads=2, tie_word_embeddings=True
            )
        },
    ),
    "sarvam_moe": (
        "SarvamMoEConfig",
        {"groups": dict(head_dim=8, n_routed_experts=6, **DEEPSEEK)},
    ),
    "granite_swa": (
        "GraniteSWAConfig",
        {
            "windows, a base for each layer": dict(
                sliding_window=6,
                attention_multiplier=0.2,
                embedding_multiplier=3.0,
                layer_rope_theta=[0, 1e4, 1e5],
            )
        },
    ),
    "granitemoe_swa": (
        "GraniteMoeSWAConfig",
        {
            "windows, shared": dict(
                sliding_window=6,
                num_local_experts=5,
                num_experts_per_tok=2,
                shared_intermediate_size=20,
            )
        },
    ),
}


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute difference, relative to the largest expected value."""
    return float((actual - expected).abs().max() / expected.abs().max())


def tolerance(config: Config) -> float:
    """Return the largest difference from transformers, relative to the largest logit.

    Recurrent mixers normalize sums that may be small: changing the embedding by 1e-7 of itself
    changes their logits by 1e-5 to 1e-4, and transformers differs from itself by as much when it
    computes a text token by token.
    """
    return 3e-5 if any(layer.mixer for layer in config.layers) else 1e-5


@torch.no_grad()
def rounding_noise(reference: torch.nn.Module) -> float:
    """Return how far logits of transformers move if each weight changes by 1e-7 of itself, about
    half a rounding of fp32: another processor's products differ by as much."""
    changed = copy.deepcopy(reference)
    generator = torch.Generator().manual_seed(0)
    for parameter in changed.parameters():
        signs = torch.randn(parameter.shape, generator=generator).sign()
        parameter.mul_(1 + 1e-7 * signs)
    differences = []
    for length in LENGTHS:
        tokens = draw(2, length, seed=length)
        differences.append(relative(changed(tokens).logits, reference(tokens).logits))
    return max(differences)


def redraw(model: torch.nn.Module, seed: int = 0) -> None:
    """Give every tensor random values, so that ignoring it changes the output (default biases are
    zero)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # transformers stores the biases that correct the selection of experts as buffers
        biases = (
            buffer
            for name, buffer in model.named_buffers()
            if name.endswith(("correction_bias", "expert_bias", "layer_scalar"))
        )
        for parameter in (*model.parameters(), *biases):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() <= 1:
                parameter += 0.3 * noise
            else:
                parameter.copy_(1.5 / parameter.size(-1) ** 0.5 * noise)


def build(config_class: type | str, folder: Path, **values):
    """Build a transformers model with random values in every tensor, and save it to `folder`."""
    config_class = (
        getattr(transformers, config_class)
        if isinstance(config_class, str)
        else config_class
    )
    torch.manual_seed(0)
    config = config_class(**{**TINY, **values}, dtype="float32")
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    redraw(model)
    model.save_pretrained(folder)
    return model


def perturb(parameters: Iterable[torch.nn.Parameter], seed: int = 3) -> None:
    """Add noise to the parameters of a method, so that also those initialized to zero change the
    output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter += 0.15 * torch.randn(parameter.shape, generator=generator)


def load_hf(folder: Path) -> torch.nn.Module:
    """Load a folder in transformers, in fp32 and eval mode."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


def draw(*shape: int, seed: int) -> torch.Tensor:
    """Return random token ids."""
    return torch.randint(3, 96, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def plain_difference(reference, model: GPT) -> float:
    """Compare logits of batches within and beyond the original context."""
    batches = [draw(2, length, seed=length) for length in LENGTHS]
    return max(relative(model(tokens), reference(tokens).logits) for tokens in batches)


@torch.no_grad()
def padded_difference(reference, model: GPT) -> float:
    """Compare logits of two rows, one of them padded on the right; padding positions are
    ignored."""
    tokens = draw(2, 20, seed=5)
    mask = torch.ones_like(tokens)
    tokens[1, 13:] = mask[1, 13:] = 0
    actual, expected = model(tokens), reference(tokens, attention_mask=mask).logits
    return max(relative(actual[0], expected[0]), relative(actual[1, :13], expected[1, :13]))


@torch.no_grad()
def cached_difference(reference, model: GPT) -> float:
    """Compare logits with a KV cache, for a prompt in chunks and single tokens after it."""
    largest = 0.0
    for length in LENGTHS:
        tokens, cache = draw(2, length, seed=length), KVCache(model.config, 2, length)
        pieces = [
            *tokens[:, :-9].split(length - 13, dim=1),
            *tokens[:, -9:].split(1, dim=1),
        ]
        cached = torch.cat([model(piece, cache=cache) for piece in pieces], dim=1)
        expected = reference(tokens).logits
        largest = max(
            largest,
            relative(cached, expected),
            relative(*staggered_logits(model, tokens, expected)),
        )
    return largest


def staggered_logits(
    model: GPT, tokens: torch.Tensor, expected: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of a KV cache whose second row is three tokens behind the first, and the
    expected logits."""
    cache, ends = (
        KVCache(model.config, 2, tokens.size(1)),
        (tokens.size(1) - 6, tokens.size(1) - 9),
    )
    for row, end in enumerate(ends):
        model(tokens[row : row + 1, :end], cache=cache.rows(row, row + 1))
    actual, reference = [], []
    for step in range(0, 6, 2):
        positions = torch.tensor([[end + step, end + step + 1] for end in ends])
        actual.append(
            model(
                tokens.gather(1, positions),
                positions=positions,
                cache=cache,
                logits_to_keep=torch.tensor([[1], [1]]),
            )
        )
        reference.append(
            torch.stack([expected[row, positions[row, 1:]] for row in range(2)])
        )
    return torch.cat(actual, 1), torch.cat(reference, 1)


@torch.no_grad()
def packed_difference(reference, model: GPT) -> float:
    """Compare logits of two packed documents with those of each document alone."""
    first, second = draw(2, 20, seed=3)
    logits = model(
        torch.cat((first[:12], second))[None], documents=torch.tensor([[0] * 12 + [1] * 20])
    )
    parts = ((logits[:, :12], first[None, :12]), (logits[:, 12:], second[None]))
    return max(relative(actual, reference(tokens).logits) for actual, tokens in parts)


@torch.no_grad()
def noisy_difference(reference, model: GPT) -> float:
    """Compare logits with NEFTune's noise, for which both draw the same numbers, with the hook of
    transformers' Trainer."""
    tokens = draw(1, 20, seed=6)
    embeddings = reference.get_input_embeddings()
    embeddings.neftune_noise_alpha = model.neftune_alpha = 10.0
    hook = embeddings.register_forward_hook(neftune_post_forward_hook)
    # only these modules, so that nothing else draws numbers
    embeddings.training = model.training = True
    try:
        torch.manual_seed(0)
        expected = reference(tokens).logits
        torch.manual_seed(0)
        actual = model(tokens, documents=torch.zeros_like(tokens))
    finally:
        hook.remove()
        embeddings.training = model.training = False
        model.neftune_alpha = 0.0
    assert relative(expected, reference(tokens).logits) > 1e-3
    return relative(actual, expected)
