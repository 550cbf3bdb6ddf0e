"""Sizes of tiny multimodal models for transformers, shared by the tests of wrappers."""

import torch
import transformers

TEXT = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=3,
    num_attention_heads=4,
)
TEXT |= dict(num_key_value_heads=2, head_dim=8, pad_token_id=0)
TOWER = dict(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    patch_size=14,
    image_size=28,
)
LINEAR = dict(
    linear_key_head_dim=6,
    linear_value_head_dim=10,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
QWEN_TOWER = dict(
    depth=1, hidden_size=16, num_heads=2, out_hidden_size=32, num_position_embeddings=16
)
MROPE = dict(rope_type="default", rope_theta=1e6, mrope_section=[1, 1, 2])
SPARSE = dict(num_experts_per_tok=2, moe_intermediate_size=24)


def random_wrapper(name, text, tower, **values):
    """Return a multimodal model with random weights; NAMEConfig is its config class."""
    torch.manual_seed(0)
    # transformers changes the dictionaries that it gets
    config_class = getattr(transformers, f"{name}Config")
    config = config_class(text_config=dict(text), vision_config=dict(tower), **values)
    return transformers.AutoModelForImageTextToText.from_config(config).eval()
