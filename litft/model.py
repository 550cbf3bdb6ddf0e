"""The network: one decoder for every family. What varies is a value of `Config`, decided when it is built."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litft.attention import attend
from litft.cache import KVCache, LayerCache
from litft.config import Config, Layer
from litft.loss import summed_cross_entropy
from litft.rope import Rotary, rotate

# B batch, T tokens, C channels, H query heads, K key/value heads, D head dim, V vocabulary

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last dimension, in fp32 (arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Self-attention with grouped key/value heads (arXiv 2305.13245)."""

    def __init__(self, config: Config, layer: Layer) -> None:
        super().__init__()
        self.head_dim, self.window, self.rotary = config.head_dim, layer.window, layer.rope is not None
        width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.dim, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.dim, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.dim, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.dim, bias=config.o_bias)

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor] | None, documents: Tensor | None, cache: LayerCache | None
    ) -> Tensor:
        q, k, v = (self.heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        y = attend(q, k, v, documents, self.window, cache=cache)  # (B, H, T, D)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        """(B, T, heads * D) -> (B, heads, T, D)"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """The gated feed-forward layer (arXiv 2002.05202)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        if config.activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(f"config.json: activation {config.activation!r} is not supported; known: {known}")
        self.activation = ACTIVATIONS[config.activation]
        self.gate_proj = nn.Linear(config.dim, config.hidden_dim, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.dim, config.hidden_dim, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.hidden_dim, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention, then the MLP, each on a normalised input and added to the residual stream."""

    def __init__(self, config: Config, layer: Layer) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor] | None, documents: Tensor | None, cache: LayerCache | None
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles, documents, cache)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A decoder-only transformer of the architecture that `config` states."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in config.layers)
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tie()
        ropes = list(dict.fromkeys(layer.rope for layer in config.layers if layer.rope))
        self.rotaries = nn.ModuleList(Rotary(rope) for rope in ropes)
        self.rotary_of = [ropes.index(layer.rope) if layer.rope else None for layer in config.layers]

    def tie(self) -> None:
        """Make the head's weight and the embedding's one parameter again, where the architecture says so."""
        if self.config.tied:
            self.lm_head.weight = self.embed.weight

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
        targets: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run tokens (B, T) through the network.

        positions: (B, T), default: counted from the cache's length, restarting at each document. documents: (B, T)
        integers, one value a packed sample; tokens of different documents do not see each other. cache: keys and values of
        the tokens before, extended by these. targets: (B, T), IGNORED where there is none; `targets[b, t]` is what
        `tokens[b, t]` predicts. Returns logits (B, T, V), or with targets the summed loss and the count of targets (the
        head runs inside `forward`, so that DDP and FSDP see it).
        """
        if positions is None:
            positions = default_positions(tokens, documents, cache.length if cache else 0)
        x = self.embed(tokens)  # (B, T, C)
        angles = self.angles(positions, cache, x.dtype)
        for index, (block, rotary) in enumerate(zip(self.blocks, self.rotary_of, strict=True)):
            layer_cache = cache.layers[index] if cache else None
            x = block(x, angles[rotary] if rotary is not None else None, documents, layer_cache)
        x = self.norm(x)
        return self.lm_head(x) if targets is None else summed_cross_entropy(x, self.lm_head, targets)

    def angles(self, positions: Tensor, cache: KVCache | None, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """cos and sin of each distinct Rope; the longest document (or the planned length) chooses its factors."""
        longest = cache.capacity if cache else positions.max() + 1
        return [rotary(positions, longest, dtype) for rotary in self.rotaries]


def default_positions(tokens: Tensor, documents: Tensor | None, offset: int) -> Tensor:
    """0, 1, 2, ... from `offset`, restarting where a new document begins; (1, T) or (B, T)."""
    index = torch.arange(offset, offset + tokens.size(1), device=tokens.device)[None]
    if documents is None:
        return index
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return index - torch.where(begins, index, 0).cummax(dim=1).values
