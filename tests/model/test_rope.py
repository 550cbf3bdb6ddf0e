"""Rotary frequencies stay exact when the model is cast or moved; invalid scalings are refused."""

import pytest
import torch
from parity import draw
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import litft
from litft.data.packing import collate
from litft.data.sample import Sample
from litft.model.rope import RotaryEmbedding, _rotate_compiled, inverse_frequencies
from litft.model.rope_config import RopeConfig


def test_casting_the_model_keeps_the_frequencies_in_fp32():
    """In bf16, position 4,000 would be off by up to 16 radians."""
    rope = RopeConfig(theta=10000.0, dim=64)
    expected = inverse_frequencies(rope)[0]
    for model in (RotaryEmbedding(rope).bfloat16(), RotaryEmbedding(rope).half().float()):
        assert model.short.dtype == torch.float32 and torch.equal(model.short, expected)
    cos = RotaryEmbedding(rope).bfloat16()(torch.tensor([[4000]]), 4001, torch.float32).cos
    torch.testing.assert_close(
        cos[0, 0, 0], torch.cos(4000.0 * expected).repeat(2), rtol=0, atol=1e-6
    )


def test_frequencies_are_computed_again_after_the_meta_device():
    with torch.device("meta"):
        rotary = RotaryEmbedding(RopeConfig(theta=500.0, dim=8))
    assert torch.equal(
        rotary.to_empty(device="cpu").short,
        inverse_frequencies(RopeConfig(theta=500.0, dim=8))[0],
    )


SCALED = {
    "longrope": dict(
        short_factor=[1.0] * 4, long_factor=[4.0] * 4, original_max_position_embeddings=32
    ),
    "dynamic": dict(factor=4.0),
}


def test_the_factor_of_longrope_is_read_beside_an_original_length():
    """Files of Phi-3 have an original length and no factor; with both, transformers takes the
    factor."""
    scaling = SCALED["longrope"] | {"rope_type": "longrope", "rope_theta": 1e4}
    for factor in ({}, {"factor": 4.0}):
        hf = dict(
            hidden_size=32,
            num_attention_heads=4,
            max_position_embeddings=512,
            original_max_position_embeddings=32,
            rope_parameters=scaling | factor,
        )
        _, expected = ROPE_INIT_FUNCTIONS["longrope"](Phi3Config(**hf), "cpu")
        assert RopeConfig.from_hf(hf, head_dim=8).attention_factor == pytest.approx(
            expected
        )


@torch.no_grad()
@pytest.mark.parametrize("kind", SCALED)
def test_a_loss_does_not_depend_on_what_shares_the_micro_batch(kind, make_model):
    """Each document has the frequencies of its own length, as transformers computes it alone."""
    rope = dict(rope_type=kind, rope_theta=1e4, **SCALED[kind])
    contexts = {"longrope": 128, "dynamic": 32}
    reference, folder = make_model(
        LlamaConfig, rope_parameters=rope, max_position_embeddings=contexts[kind]
    )
    model, _ = litft.load(folder)
    samples = []
    for length in (20, 61):
        ids = draw(1, length, seed=length)[0]
        samples.append(Sample(ids[:-1], ids[1:]))
    expected = 0.0
    for sample in samples:
        logits = reference(sample.tokens[None]).logits[0]
        expected += float(cross_entropy(logits, sample.targets, reduction="sum"))
    for rows, packed in (([[samples[0]], [samples[1]]], False), ([samples], True)):
        batch = collate(rows, packed)
        loss, _ = model(batch.tokens, **batch.inputs())
        assert float(loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "scaling, message",
    [
        ({"rope_type": "spiral"}, "'spiral' is not supported; known: default, linear"),
        ({"rope_type": "linear"}, "needs factor"),
        ({"rope_type": "llama3", "factor": 8}, "needs original_max_position_embeddings"),
        ({"type": "longrope", "short_factor": [1.0]}, "needs long_factor"),
    ],
)
def test_an_invalid_scaling_is_reported(scaling, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig.from_hf({"rope_scaling": scaling, "max_position_embeddings": 64}, 8)


def test_older_and_newer_config_fields_are_equivalent():
    older = {
        "rope_theta": 500.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "max_position_embeddings": 64,
    }
    newer = {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
        "max_position_embeddings": 64,
    }
    assert RopeConfig.from_hf(older, 8) == RopeConfig.from_hf(newer, 8)


def test_the_compiled_rotation_keeps_the_layout_of_the_kernels():
    """(B, T, H, D) in memory, as the projections write and attention kernels read it: otherwise
    each block copies twice."""
    x, angles = torch.randn(2, 5, 3, 8).transpose(1, 2), torch.randn(2, 1, 5, 6)
    rotated = _rotate_compiled(x, angles.cos(), angles.sin())
    assert rotated.transpose(1, 2).is_contiguous()


CONTEXTS = {  # config.json's fields and the context length, as vLLM computes it
    "none": ({}, 512),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 2048),
    "dynamic": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 1024),
    "yarn, as on Qwen's card": (
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            }
        },
        2048,
    ),
    "yarn, scaled in the file": (
        {
            "max_position_embeddings": 2048,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            },
        },
        2048,
    ),
    "yarn without the original length": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        512,
    ),
    "type without rope_type": (
        {"rope_scaling": {"rope_type": None, "type": "linear", "factor": 4.0}},
        2048,
    ),
    "llama3": (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        512,
    ),
    "gemma3": (
        {
            "model_type": "gemma3_text",
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        512,
    ),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_scaled_rope_extends_the_context(name):
    from litft.families import read_config

    fields, expected = CONTEXTS[name]
    sizes = dict(
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        intermediate_size=64,
        vocab_size=64,
    )
    hf = {
        "model_type": "llama",
        "max_position_embeddings": 512,
        "head_dim": 16,
        **sizes,
    } | fields
    assert read_config(hf).max_positions == expected
