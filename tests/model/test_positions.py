"""ALiBi as two more entries of queries and keys, and sinusoids."""

import torch

from litft.model.attention import attend
from litft.model.positions import add_alibi, alibi_slopes


def biased_attention(q, k, v, slopes):
    """Attention in fp64 with -slope * distance added to the scores."""
    q, k, v = q.double(), k.double(), v.double()
    position = torch.arange(q.size(2))
    bias = (
        -torch.tensor(slopes).double()[:, None, None]
        * (position[:, None] - position).double()
    )
    scores = q @ k.mT * q.size(-1) ** -0.5 + bias
    return scores.masked_fill(position > position[:, None], -torch.inf).softmax(-1) @ v


def with_alibi(q, k, v, slopes):
    """The same by `attend`."""
    scale = q.size(-1) ** -0.5
    q, k = add_alibi(q, k, torch.arange(q.size(2))[None], torch.tensor(slopes), scale)
    return attend(q, k, v, scale=scale)


def test_alibi_equals_a_bias():
    """Eight heads, and six, whose last slopes are those of a longer sequence."""
    for heads in (8, 6):
        q, k, v = torch.randn(
            3, 2, heads, 90, 16, generator=torch.Generator().manual_seed(0)
        )
        slopes = alibi_slopes(heads)
        torch.testing.assert_close(
            with_alibi(q, k, v, slopes).double(),
            biased_attention(q, k, v, slopes),
            atol=1e-5,
            rtol=0,
        )


def test_alibi_in_bf16_is_exact_at_long_distances():
    """Only distances matter: queries and keys are zero, and slopes are powers of two."""
    slopes, length = alibi_slopes(8), 1500
    zeros, values = (
        torch.zeros(1, 8, length, 16),
        torch.randn(1, 8, length, 16, generator=torch.Generator().manual_seed(0)),
    )
    actual = with_alibi(zeros.bfloat16(), zeros.bfloat16(), values.bfloat16(), slopes)
    torch.testing.assert_close(
        actual.double(), biased_attention(zeros, zeros, values, slopes), atol=0.03, rtol=0
    )
