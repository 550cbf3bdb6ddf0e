"""Variations of every family and measures of their difference from transformers, for the tests and the README's table."""

from collections.abc import Iterable
from pathlib import Path

import torch
import transformers

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


LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
LONG = dict(rope_type="longrope", short_factor=[1.1, 1.2, 1.4, 1.7], long_factor=[2.0, 3.0, 5.0, 9.0], factor=4.0)
LINEAR = dict(rope_type="linear", factor=2.5, rope_theta=1e4)
PART = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
GPT2 = dict(max_position_embeddings=128, n_inner=56)
MOE = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24)

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
            "dynamic": dict(rope_parameters=dict(rope_type="dynamic", factor=3.0, rope_theta=1e4)),
            "llama3": dict(rope_parameters=dict(rope_theta=500.0, **LLAMA3)),
            "yarn": dict(rope_parameters=dict(rope_theta=1e4, **YARN)),
            "yarn mscale": dict(
                rope_parameters=dict(rope_theta=1e4, mscale=0.8, mscale_all_dim=0.5, truncate=False, **YARN)
            ),
            "yarn betas": dict(
                rope_parameters=dict(rope_theta=1e4, beta_fast=16, beta_slow=2, attention_factor=1.3, **YARN)
            ),
            "longrope": dict(rope_parameters=dict(rope_theta=1e4, original_max_position_embeddings=64, **LONG)),
        },
    ),
    "mistral": (
        "MistralConfig",
        {
            "window": dict(sliding_window=5),
            "no window": dict(sliding_window=None),
            "window, wide heads": dict(sliding_window=9, head_dim=12, tie_word_embeddings=True),
        },
    ),
    "ministral": ("MinistralConfig", {"alternating": dict(sliding_window=6, layer_types=MIXED, head_dim=8)}),
    "ministral3": (
        "Ministral3Config",
        {
            "queries scaled by position": dict(
                head_dim=16,
                rope_parameters=dict(rope_theta=1e4, llama_4_scaling_beta=0.3, mscale=1.0, mscale_all_dim=1.0, **YARN),
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
            "window, 3 of 6": dict(num_local_experts=6, num_experts_per_tok=3, sliding_window=7, head_dim=8),
        },
    ),
    "qwen2": (
        "Qwen2Config",
        {
            "biases": {},
            "tied": dict(tie_word_embeddings=True),
            "late windows": dict(use_sliding_window=True, sliding_window=6, max_window_layers=1),
        },
    ),
    "qwen3": (
        "Qwen3Config",
        {
            "q/k norms": dict(head_dim=16),
            "biases, tied": dict(head_dim=12, attention_bias=True, tie_word_embeddings=True),
            "windows": dict(head_dim=8, use_sliding_window=True, sliding_window=6, layer_types=MIXED),
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "shared expert": dict(shared_expert_intermediate_size=40, **MOE),
            "some dense, renormalized": dict(
                shared_expert_intermediate_size=16, mlp_only_layers=[1], norm_topk_prob=True, qkv_bias=False, **MOE
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
    "gemma": ("GemmaConfig", {"one key head": dict(num_key_value_heads=1, head_dim=16), "grouped": dict(head_dim=8)}),
    "gemma2": (
        "Gemma2Config",
        {
            "soft caps, windows": dict(head_dim=16, sliding_window=6, query_pre_attn_scalar=24, attn_logit_softcapping=3.0),
            "no caps": dict(head_dim=8, attn_logit_softcapping=None, final_logit_softcapping=None, sliding_window=6),
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            "two rope bases": dict(head_dim=16, sliding_window=6, layer_types=MIXED, query_pre_attn_scalar=24),
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
    "phi": (
        "PhiConfig",
        {"partial": dict(rope_parameters=PART), "q/k norms, tied": dict(qk_layernorm=True, tie_word_embeddings=True)},
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
                attention_bias=False, tie_word_embeddings=True, rope_parameters=dict(PART, partial_rotary_factor=1.0)
            ),
        },
    ),
    "falcon": (
        "FalconConfig",
        {
            "7B: one key head": dict(ffn_hidden_size=56),
            "40B: groups, two norms": dict(new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=56),
            "11B: groups, one norm": dict(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
            "sequential, biases, all heads": dict(parallel_attn=False, bias=True, multi_query=False, ffn_hidden_size=56),
            "untied": dict(tie_word_embeddings=False),
        },
    ),
    "stablelm": (
        "StableLmConfig",
        {
            "partial": {},
            "q/k norms, biases": dict(qk_layernorm=True, use_qkv_bias=True),
            "parallel, tied": dict(use_parallel_residual=True, tie_word_embeddings=True, rope_parameters=PART),
        },
    ),
    "olmo": ("OlmoConfig", {"weightless norms": {}, "clipped": dict(clip_qkv=0.7, tie_word_embeddings=True)}),
    "olmo2": ("Olmo2Config", {"norms after": {}, "biases": dict(attention_bias=True, num_key_value_heads=4)}),
    "olmo3": (
        "Olmo3Config",
        {
            "windows": dict(sliding_window=6, layer_types=MIXED),
            "yarn": dict(
                sliding_window=6,
                layer_types=MIXED,
                rope_parameters=dict(
                    full_attention=dict(rope_theta=5e5, **YARN), sliding_attention=dict(rope_type="default", rope_theta=5e5)
                ),
            ),
        },
    ),
    "olmoe": (
        "OlmoeConfig",
        {
            "experts": dict(num_experts=5, num_experts_per_tok=2, num_key_value_heads=4),
            "clipped, renormalized": dict(
                num_experts=4, num_experts_per_tok=3, clip_qkv=0.9, norm_topk_prob=True, num_key_value_heads=4
            ),
        },
    ),
    "gpt2": (
        "GPT2Config",
        {
            "tied": GPT2,
            "untied, scaled by depth": dict(GPT2, tie_word_embeddings=False, scale_attn_by_inverse_layer_idx=True),
        },
    ),
    "gptj": ("GPTJConfig", {"interleaved, partial": dict(rotary_dim=4, **GPT2), "whole heads": dict(rotary_dim=8, **GPT2)}),
    "gpt_bigcode": (
        "GPTBigCodeConfig",
        {"one key head": GPT2, "all heads, untied": dict(GPT2, multi_query=False, tie_word_embeddings=False)},
    ),
    "starcoder2": (
        "Starcoder2Config",
        {"window": dict(sliding_window=6), "no bias, untied": dict(use_bias=False, tie_word_embeddings=False)},
    ),
    "granite": (
        "GraniteConfig",
        {
            "four scales": dict(
                embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.2, logits_scaling=5.0
            ),
            "biases, tied": dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        },
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        {"experts": dict(num_local_experts=5, num_experts_per_tok=2, residual_multiplier=0.4, attention_multiplier=0.2)},
    ),
    "cohere": (
        "CohereConfig",
        {"interleaved": dict(logit_scale=0.3), "q/k norms, biases": dict(use_qk_norm=True, attention_bias=True)},
    ),
    "cohere2": ("Cohere2Config", {"windows, NoPE": dict(sliding_window=6, layer_types=MIXED)}),
    "glm": ("GlmConfig", {"half rotated": dict(head_dim=8), "no bias": dict(head_dim=16, attention_bias=False)}),
    "glm4": ("Glm4Config", {"norms on both sides": dict(head_dim=8), "tied": dict(head_dim=16, tie_word_embeddings=True)}),
    "ernie4_5": (
        "Ernie4_5Config",
        {"interleaved": dict(head_dim=8), "biases, untied": dict(head_dim=12, use_bias=True, tie_word_embeddings=False)},
    ),
    "smollm3": (
        "SmolLM3Config",
        {
            "NoPE": dict(no_rope_layers=[1, 0, 1]),
            "untied, windows": dict(
                no_rope_layer_interval=2, use_sliding_window=True, sliding_window=6, tie_word_embeddings=False
            ),
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "sinks, experts": dict(num_local_experts=5, num_experts_per_tok=2, head_dim=16, sliding_window=6),
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
}


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute difference, relative to the largest expected value."""
    return float((actual - expected).abs().max() / expected.abs().max())


def redraw(model: torch.nn.Module, seed: int = 0) -> None:
    """Give every tensor random values, so that ignoring it changes the output (default biases are zero)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter += 0.3 * noise
            else:
                parameter.copy_(1.5 / parameter.size(-1) ** 0.5 * noise)


def build(config_class: type | str, folder: Path, **values):
    """Build a transformers model with random values in every tensor, and save it to `folder`."""
    config_class = getattr(transformers, config_class) if isinstance(config_class, str) else config_class
    torch.manual_seed(0)
    config = config_class(**{**TINY, **values}, dtype="float32")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    redraw(model)
    model.save_pretrained(folder)
    return model


def perturb(parameters: Iterable[torch.nn.Parameter], seed: int = 3) -> None:
    """Add noise to the parameters of a method, so that also those initialized to zero change the output."""
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
    """Compare logits of two rows, one of them padded on the right; padding positions are ignored."""
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
        pieces = [*tokens[:, :-9].split(length - 13, dim=1), *tokens[:, -9:].split(1, dim=1)]
        cached = torch.cat([model(piece, cache=cache) for piece in pieces], dim=1)
        expected = reference(tokens).logits
        largest = max(largest, relative(cached, expected), relative(*staggered_logits(model, tokens, expected)))
    return largest


def staggered_logits(model: GPT, tokens: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of a KV cache whose second row is three tokens behind the first, and the expected logits."""
    cache, ends = KVCache(model.config, 2, tokens.size(1)), (tokens.size(1) - 6, tokens.size(1) - 9)
    for row, end in enumerate(ends):
        model(tokens[row : row + 1, :end], cache=cache.rows(row, row + 1))
    actual, reference = [], []
    for step in range(0, 6, 2):
        positions = torch.tensor([[end + step, end + step + 1] for end in ends])
        actual.append(
            model(tokens.gather(1, positions), positions=positions, cache=cache, logits_to_keep=torch.tensor([[1], [1]]))
        )
        reference.append(torch.stack([expected[row, positions[row, 1:]] for row in range(2)]))
    return torch.cat(actual, 1), torch.cat(reference, 1)


@torch.no_grad()
def packed_difference(reference, model: GPT) -> float:
    """Compare logits of two packed documents with those of each document alone."""
    first, second = draw(2, 20, seed=3)
    logits = model(torch.cat((first[:12], second))[None], documents=torch.tensor([[0] * 12 + [1] * 20]))
    parts = ((logits[:, :12], first[None, :12]), (logits[:, 12:], second[None]))
    return max(relative(actual, reference(tokens).logits) for actual, tokens in parts)
