"""Per-layer embeddings (Gemma 3n and 4): every block gets a small vector of each token, from a
table of its own."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from litft.model.config import Chunk, Config
from litft.model.linear import Linear
from litft.model.mlp import activation
from litft.model.norm import Norm

# B batch, T tokens, C channels, L layers, P size of a per-layer vector


class SharedKeys:
    """Keys and values (B, heads, T, D) for later layers, by the window of the layer that made them.

    It is no dict, since FSDP copies the containers among a block's inputs, and a copy would not
    reach later blocks.
    """

    def __init__(self) -> None:
        self.by_window: dict[int | Chunk | None, tuple[Tensor, Tensor]] = {}


class BlockExtra(NamedTuple):
    """What some architectures pass to a block besides the residual stream."""

    token_input: Tensor | None  # (B, T, P)
    shared: SharedKeys


class PerLayerEmbedding(nn.Module):
    """The per-layer vectors of each token: a table's rows plus a projection of the embedding."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_layers = len(config.layers)
        self.dim = config.per_layer_dim
        self.embed = nn.Embedding(config.per_layer_vocab_size, self.num_layers * self.dim)
        self.projection = Linear(config.dim, self.num_layers * self.dim, bias=False)
        self.norm = Norm(config.norm, self.dim)

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Return the vectors (L, B, T, P) of tokens (B, T) with embedding x (B, T, C).

        Tokens that the table lacks have its first row, as in transformers' Gemma 3n.
        """
        rows = self.embed(torch.where(tokens < self.embed.num_embeddings, tokens, 0))
        # the scale is rounded as in training
        rows = rows * torch.tensor(self.dim**0.5, dtype=rows.dtype)
        # (B, T, L, P)
        projected = (self.projection(x) * x.size(-1) ** -0.5).unflatten(
            -1, (self.num_layers, self.dim)
        )
        # the factor keeps the variance of a sum of two independent vectors
        vectors = (
            self.norm(projected) + rows.unflatten(-1, (self.num_layers, self.dim))
        ) * 2**-0.5
        return vectors.movedim(2, 0)


class TokenInput(nn.Module):
    """Adds a token's per-layer vector to the residual stream, gated by that stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.activation = activation(config)
        self.input_gate = Linear(config.dim, config.per_layer_dim, bias=False)
        self.projection = Linear(config.per_layer_dim, config.dim, bias=False)
        self.norm = Norm(config.norm, config.dim)

    def forward(self, x: Tensor, token_input: Tensor) -> Tensor:
        """Return x (B, T, C) plus what the vectors (B, T, P) contribute."""
        return x + self.contribution(x, token_input)

    def contribution(self, x: Tensor, token_input: Tensor) -> Tensor:
        """Return what the vectors (B, T, P) contribute, gated by x (B, T, C)."""
        return self.norm(self.projection(self.activation(self.input_gate(x)) * token_input))
