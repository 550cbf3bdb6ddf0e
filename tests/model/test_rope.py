"""Rotary tables stay exact whatever happens to the model, and bad scalings are refused."""

import pytest
import torch

from litft.model.config import RopeConfig
from litft.model.rope import RotaryEmbedding, inverse_frequencies


def test_a_cast_of_the_model_leaves_the_frequencies_in_fp32():
    """In bf16, position 4,000 would be off by up to 16 radians."""
    rope = RopeConfig(theta=10000.0, dim=64)
    exact = inverse_frequencies(rope)[0]
    for model in (RotaryEmbedding(rope).bfloat16(), RotaryEmbedding(rope).half().float()):
        assert model.short.dtype == torch.float32 and torch.equal(model.short, exact)
    cos = RotaryEmbedding(rope).bfloat16()(torch.tensor([[4000]]), 4001, torch.float32).cos
    torch.testing.assert_close(cos[0, 0, 0], torch.cos(4000.0 * exact).repeat(2), rtol=0, atol=1e-6)


def test_from_the_meta_device_the_tables_are_computed_anew():
    with torch.device("meta"):
        rotary = RotaryEmbedding(RopeConfig(theta=500.0, dim=8))
    assert torch.equal(rotary.to_empty(device="cpu").short, inverse_frequencies(RopeConfig(theta=500.0, dim=8))[0])


@pytest.mark.parametrize(
    "scaling, message",
    [
        ({"rope_type": "spiral"}, "'spiral' is not supported; known: default, linear"),
        ({"rope_type": "linear"}, "needs factor"),
        ({"rope_type": "llama3", "factor": 8}, "needs original_max_position_embeddings"),
        ({"type": "longrope", "short_factor": [1.0]}, "needs long_factor"),
    ],
)
def test_a_bad_scaling_is_named(scaling, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig.from_hf({"rope_scaling": scaling, "max_position_embeddings": 64}, 8)


def test_both_spellings_mean_the_same():
    old = {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "max_position_embeddings": 64}
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}, "max_position_embeddings": 64}
    assert RopeConfig.from_hf(old, 8) == RopeConfig.from_hf(new, 8)
