"""Gemma 3n's several residual streams, by Alternating Updates (AltUp), and its learned residual
layer (LAuReL)."""

import torch
from torch import Tensor, nn

from litft.model.blocks import Block
from litft.model.config import AltUpConfig, Config, LayerConfig
from litft.model.kv_cache import LayerCache
from litft.model.linear import Linear
from litft.model.norm import Norm
from litft.model.packed_sequences import PackedSequences
from litft.model.per_layer_input import BlockExtra, TokenInput
from litft.model.rope import CosSin

# B batch, T tokens, S streams, C channels; between blocks,
# the streams of a token are one vector of S C entries


class AltUp(nn.Module):
    """Predicts all streams before a block, and corrects them by what the block has computed (arXiv
    2301.13310).

    The clamping of coefficients to 120 that transformers does in training is left out: no published
    weight is near it.
    """

    def __init__(self, config: Config, altup: AltUpConfig) -> None:
        super().__init__()
        self.active = altup.active
        self.streams = altup.streams
        self.norm = Norm(config.norm, config.dim)
        self.modality = Linear(config.dim, altup.streams, bias=False)
        self.prediction = Linear(altup.streams, altup.streams**2, bias=False)
        self.correction = Linear(altup.streams, altup.streams, bias=False)
        self.output_scale = nn.Parameter(torch.ones(config.dim))

    def modalities(self, x: Tensor) -> Tensor:
        """Return one value in (-1, 1) for each stream, (B, T, S); Linears compute the coefficients
        from them."""
        return torch.tanh(self.modality(self.norm(x) / x.size(-1)).float()).to(x.dtype)

    def predict(self, streams: Tensor) -> Tensor:
        """Return each of the streams (B, T, S, C) plus a linear combination of all."""
        # one matrix (S, S) for each token, computed from the active stream
        coefficients = self.prediction(self.modalities(streams[:, :, self.active]))
        return coefficients.unflatten(-1, (self.streams, self.streams)) @ streams + streams

    def correct(self, predictions: Tensor, activated: Tensor) -> Tensor:
        """Add to each prediction (B, T, S, C) its share of the error of the active one, which is
        `activated` (B, T, C)."""
        # 1 plus a learned part: at 0 all streams get the whole error
        coefficients = self.correction(self.modalities(activated)) + 1  # (B, T, S)
        innovation = activated - predictions[:, :, self.active]
        return predictions + coefficients[..., None] * innovation[:, :, None]


class Laurel(nn.Module):
    """Adds a normalized product of two low-rank matrices (arXiv 2411.07501)."""

    def __init__(self, config: Config, rank: int) -> None:
        super().__init__()
        self.left = Linear(config.dim, rank, bias=False)
        self.right = Linear(rank, config.dim, bias=False)
        self.norm = Norm(config.norm, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return x (B, T, C) plus the product, in the same shape."""
        return x + self.norm(self.right(self.left(x)))


class AltUpBlock(Block):
    """A block that computes one of several residual streams."""

    # every block of this class has all parts
    attention_norm: Norm
    attention_post_norm: Norm
    mlp: nn.Module
    mlp_norm: Norm
    mlp_post_norm: Norm
    token_input: TokenInput

    def __init__(self, config: Config, layer: LayerConfig) -> None:
        super().__init__(config, layer)
        altup = config.altup
        assert altup is not None  # `block_class` chooses this class for such networks only
        self.altup = AltUp(config, altup)
        self.laurel = Laurel(config, altup.laurel_rank)

    def forward(
        self,
        x: Tensor,
        cos_sin: CosSin | None,
        documents: PackedSequences | None,
        cache: LayerCache | None,
        extra: BlockExtra,
    ) -> Tensor:
        """Return the streams (B, T, S C) of x (B, T, S C)."""
        # (B, T, S, C)
        predictions = self.altup.predict(x.unflatten(-1, (self.altup.streams, -1)))
        # attention and MLP compute the active stream alone
        active = predictions[:, :, self.altup.active]
        normed = self.attention_norm(active)
        attended = active + self.attention_post_norm(
            self.mix(normed, cos_sin, documents, cache, extra)
        )

        # LAuReL is a second branch, parallel to attention; the factor keeps the variance of the sum
        y = (attended + self.laurel(normed)) * 2**-0.5
        y = y + self.mlp_post_norm(self.mlp(self.mlp_norm(y)))

        corrected = self.altup.correct(predictions, y)
        first = corrected[:, :, :1]
        others = corrected[:, :, 1:]
        gate = corrected[:, :, self.altup.active] * self.altup.output_scale
        # the per-layer vector is added to all streams but the first
        assert extra.token_input is not None  # the network has per-layer embeddings
        others = others + self.token_input.contribution(gate, extra.token_input)[:, :, None]
        return torch.cat((first, others), dim=2).flatten(2)


class Streams(nn.Module):
    """Makes the residual streams of an embedding, and one vector of the last block's streams."""

    def __init__(self, config: Config, altup: AltUpConfig) -> None:
        super().__init__()
        others = range(altup.streams - 1)
        self.streams = altup.streams
        self.expansions = nn.ModuleList(
            Linear(config.dim, config.dim, bias=False) for _ in others
        )
        self.reductions = nn.ModuleList(
            Linear(config.dim, config.dim, bias=False) for _ in others
        )

    def expand(self, x: Tensor) -> Tensor:
        """Return the streams (B, T, S C) of an embedding x (B, T, C), all of the same magnitude."""
        return torch.cat(
            [x, *(_with_magnitude(linear(x), x) for linear in self.expansions)], dim=-1
        )

    def reduce(self, x: Tensor) -> Tensor:
        """Return the mean (B, T, C) of the projected streams x (B, T, S C)."""
        first, *others = x.unflatten(-1, (self.streams, -1)).unbind(2)
        projected = [first]
        for linear, y in zip(self.reductions, others, strict=True):
            projected.append(_with_magnitude(linear(y), first))
        return torch.stack(projected).mean(0)


def _with_magnitude(x: Tensor, like: Tensor) -> Tensor:
    """Scale each vector of x to the root mean square of `like`."""
    target, actual = (y.square().mean(-1, keepdim=True) for y in (like, x))
    # the square root has no finite gradient at 0, where a padding token's embedding may be
    return x * target.clamp(min=1e-30).sqrt() / actual.clamp(min=1e-5).sqrt()
