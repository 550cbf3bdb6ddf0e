"""The network: one decoder for every family. What varies is a value of `Config`, decided when it is built."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litft.model.attention import attend
from litft.model.config import Config, LayerConfig
from litft.model.kv_cache import KVCache, LayerCache
from litft.model.linear import Linear
from litft.model.loss import IGNORED, apply_softcap, summed_cross_entropy
from litft.model.mlp import make_mlp
from litft.model.norm import Norm, apply_norm, make_qk_norm
from litft.model.packed_sequences import PackedSequences
from litft.model.rope import CosSin, RotaryEmbedding, rotate, rotate_interleaved

# B batch, T tokens, C channels, H query heads, K key/value heads, D head dim, V vocabulary


class Attention(nn.Module):
    """Self-attention with grouped key/value heads (arXiv 2305.13245)."""

    def __init__(self, config: Config, layer: LayerConfig) -> None:
        super().__init__()
        self.head_dim, self.window, self.scale = config.head_dim, layer.window, layer.attention_scale
        self.softcap, self.clip = config.attention_softcap, config.qkv_clip
        self.rotate = rotate_interleaved if config.rope_interleaved else rotate
        width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.q_proj = Linear(config.dim, width, bias=config.qkv_bias)
        self.k_proj = Linear(config.dim, kv_width, bias=config.qkv_bias)
        self.v_proj = Linear(config.dim, kv_width, bias=config.qkv_bias)
        self.o_proj = Linear(width, config.dim, bias=config.o_bias)
        self.q_norm, self.k_norm = make_qk_norm(config, config.n_heads), make_qk_norm(config, config.n_kv_heads)
        self.sinks = nn.Parameter(torch.zeros(config.n_heads)) if config.sinks else None

    def forward(
        self, x: Tensor, cos_sin: CosSin | None, documents: PackedSequences | None, cache: LayerCache | None
    ) -> Tensor:
        q, k, v = map(self.split, self.projections(x))
        q, k, v = self.heads(apply_norm(self.q_norm, q)), self.heads(apply_norm(self.k_norm, k)), self.heads(v)
        if cos_sin is not None:
            q, k = self.apply_rotary(q, k, cos_sin)
            q = q if cos_sin.query_scale is None else q * cos_sin.query_scale
        y = self.attend(q, k, v, documents, cache)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def apply_rotary(self, q: Tensor, k: Tensor, cos_sin: CosSin) -> tuple[Tensor, ...]:
        """Queries and keys, rotated; those of single tokens together, since decoding waits for every operation."""
        if q.size(2) > 1:
            return self.rotate(q, cos_sin.cos, cos_sin.sin), self.rotate(k, cos_sin.cos, cos_sin.sin)
        heads = (q.size(1), k.size(1))
        return self.rotate(torch.cat((q, k), 1), cos_sin.cos, cos_sin.sin).split_with_sizes(heads, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: PackedSequences | None, cache: LayerCache | None) -> Tensor:
        """What the queries (B, H, T, D) see, (B, H, T, D): the seam of methods that let them see more."""
        return attend(q, k, v, documents, self.window, self.softcap, self.sinks, cache, self.scale)

    def projections(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of x (B, T, C), all heads in a row: the seam of those made at once."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, K, T, D) of x (B, T, C), before any rotation."""
        return self.heads(apply_norm(self.k_norm, self.split(self.k_proj(x)))), self.heads(self.split(self.v_proj(x)))

    def split(self, x: Tensor) -> Tensor:
        """(B, T, heads * D) -> (B, T, heads, D)"""
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def heads(self, x: Tensor) -> Tensor:
        """(B, T, heads, D) -> (B, heads, T, D), clipped where the architecture clips"""
        return (x if self.clip is None else x.clamp(-self.clip, self.clip)).transpose(1, 2)


class Block(nn.Module):
    """Attention, then the MLP (or experts), each added to the residual stream, normalised before, after, or both."""

    def __init__(self, config: Config, layer: LayerConfig) -> None:
        super().__init__()
        before, after = config.norm_position != "after", config.norm_position != "before"
        self.scale = config.residual_scale
        self.attention_norm = Norm(config.norm, config.dim) if before else None
        self.attention = Attention(config, layer)
        self.attention_post_norm = Norm(config.norm, config.dim) if after else None
        self.mlp_norm = Norm(config.norm, config.dim) if before and not config.shared_norm else None
        self.mlp = make_mlp(config, layer)
        self.mlp_post_norm = Norm(config.norm, config.dim) if after else None

    def forward(
        self, x: Tensor, cos_sin: CosSin | None, documents: PackedSequences | None, cache: LayerCache | None
    ) -> Tensor:
        y = self.attention(apply_norm(self.attention_norm, x), cos_sin, documents, cache)
        x = x + scaled(apply_norm(self.attention_post_norm, y), self.scale)
        y = self.mlp(apply_norm(self.mlp_norm, x))
        return x + scaled(apply_norm(self.mlp_post_norm, y), self.scale)


def scaled(x: Tensor, scale: float) -> Tensor:
    """x * scale, without a pass over memory where the scale is 1."""
    return x if scale == 1 else x * scale


class ParallelBlock(Block):
    """Attention and the MLP side by side on one input, as in GPT-J; `shared_norm`: on one normalised input."""

    def __init__(self, config: Config, layer: LayerConfig) -> None:
        super().__init__(config, layer)
        self.shared = config.shared_norm

    def forward(
        self, x: Tensor, cos_sin: CosSin | None, documents: PackedSequences | None, cache: LayerCache | None
    ) -> Tensor:
        y = self.attention_norm(x)
        return x + self.attention(y, cos_sin, documents, cache) + self.mlp(y if self.shared else self.mlp_norm(x))


class GPT(nn.Module):
    """A decoder-only transformer of the architecture that `config` states."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.embed_positions = nn.Embedding(config.max_positions, config.dim) if config.learned_positions else None
        block = ParallelBlock if config.parallel else Block
        self.blocks = nn.ModuleList(block(config, layer) for layer in config.layers)
        self.norm = Norm(config.norm, config.dim)
        self.lm_head = Linear(config.dim, config.vocab_size, bias=config.head_bias)
        self.tie()
        ropes = list(dict.fromkeys(layer.rope for layer in config.layers if layer.rope))
        self.rotaries = nn.ModuleList(RotaryEmbedding(rope) for rope in ropes)
        self.rotary_of = [ropes.index(layer.rope) if layer.rope else None for layer in config.layers]
        self.label_smoothing = self.neftune_alpha = 0.0  # of training: the loop sets them
        self.computes_on: torch.device | None = None  # set where weights wait in the host's memory: None: where they lie

    @property
    def dtype(self) -> torch.dtype:
        """What the network computes in; weights that are trained may be kept in more."""
        return getattr(self.embed, "dtype", self.embed.weight.dtype)

    @property
    def device(self) -> torch.device:
        """Where tokens are given to the network."""
        return self.computes_on or self.embed.weight.device

    @property
    def block_devices(self) -> list[torch.device]:
        """Where each block computes."""
        return [self.computes_on or next(block.parameters()).device for block in self.blocks]

    def set_vocabulary(self, size: int) -> None:
        """Say that embedding and head know `size` tokens now."""
        self.config = replace(self.config, vocab_size=size)

    def tie(self) -> None:
        """Make the head's weight and the embedding's one parameter again, where the architecture says so."""
        if self.config.tied:
            self.lm_head.weight = self.embed.weight

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: PackedSequences | Tensor | None = None,
        cache: KVCache | None = None,
        targets: Tensor | None = None,
        target_indices: Tensor | None = None,
        logits_to_keep: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run tokens (B, T) through the network.

        positions: (B, T), default: counted from the cache's length, restarting at each document; with a cache they are
        places in it too. documents: (B, T) integers, one value a packed sample, or what is made of them; tokens of
        different documents do not see each other. cache: keys and values of the tokens before, extended by these.
        targets: (B, T), IGNORED where there is none; `targets[b, t]` is what `tokens[b, t]` predicts. kept: (N,), where
        the targets are among B x T, if that is known already: a GPU need not be asked. wanted: (B, N), the tokens after
        which logits are asked for, default all.

        Returns logits (B, T or N, V), or with targets the summed loss and the count of targets (the head runs inside
        `forward`, so that DDP and FSDP see it).
        """
        if isinstance(documents, Tensor):
            documents = PackedSequences.of(documents)
        ids = documents.ids if documents else None
        if cache is not None:
            cache.begin(tokens, positions)
        if positions is None:
            positions = default_positions(tokens, ids, cache.length if cache else 0)
        x = self.embedded(tokens, positions)  # (B, T, C)
        if self.training and self.neftune_alpha:
            x = with_noise(x, self.neftune_alpha, targets, ids)
        cos_sin = self.cos_sin(positions, cache, x.dtype)
        documents = self.arranged(documents, tokens)
        for index, (block, rotary) in enumerate(zip(self.blocks, self.rotary_of, strict=True)):
            layer_cache = cache.layers[index] if cache else None
            x = block(x, cos_sin[rotary] if rotary is not None else None, documents, layer_cache)
        if cache is not None:
            cache.end()
        if logits_to_keep is not None:
            x = x.gather(1, logits_to_keep[..., None].expand(-1, -1, x.size(2)))
        x = scaled(self.norm(x), self.config.logit_scale)
        if targets is not None:
            smoothing = self.label_smoothing if self.training else 0.0
            return summed_cross_entropy(x, self.lm_head, targets, self.config.logit_softcap, smoothing, target_indices)
        return apply_softcap(self.lm_head(x), self.config.logit_softcap)

    def arranged(self, documents: PackedSequences | None, tokens: Tensor) -> PackedSequences | None:
        """What the blocks are told of the documents: the seam of compiled ones."""
        return documents

    def embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The residual stream's first state; the scale is rounded to the weights' dtype, as Gemma was trained."""
        x = self.embed(tokens)
        if self.config.embed_scale != 1:
            x = x * torch.tensor(self.config.embed_scale, dtype=x.dtype)
        return x if self.embed_positions is None else x + self.embed_positions(positions)

    def cos_sin(self, positions: Tensor, cache: KVCache | None, dtype: torch.dtype) -> list[CosSin]:
        """The angles of each distinct Rope; the longest document (or the planned length) chooses its factors."""
        longest = cache.max_length if cache else positions.max() + 1
        return [rotary(positions, longest, dtype) for rotary in self.rotaries]


@contextmanager
def built_in(dtype: torch.dtype) -> Iterator[None]:
    """Inside, modules are made in this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def with_noise(x: Tensor, alpha: float, targets: Tensor, documents: Tensor | None) -> Tensor:
    """NEFTune (arXiv 2310.05914): uniform noise within alpha / sqrt(L C) on embeddings (B, T, C) in training.

    L is a sample's length: its tokens in a packed row, or those up to a row's last target, since what comes behind is
    padding or cannot be learned from. So the noise does not depend on how long the micro-batch's other rows are.
    """
    if documents is None:
        index = torch.arange(1, x.size(1) + 1, device=x.device)
        lengths = torch.where(targets != IGNORED, index, 1).amax(1, keepdim=True)  # (B, 1)
    else:
        lengths = (documents[:, :, None] == documents[:, None, :]).sum(2)  # (B, T)
    bound = alpha / (lengths * x.size(2)).sqrt()
    return x + ((torch.rand_like(x, dtype=torch.float32) * 2 - 1) * bound[..., None]).to(x.dtype)


def default_positions(tokens: Tensor, documents: Tensor | None, offset: int) -> Tensor:
    """0, 1, 2, ... from `offset`, restarting where a new document begins; (1, T) or (B, T)."""
    index = torch.arange(offset, offset + tokens.size(1), device=tokens.device)[None]
    if documents is None:
        return index
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return index - torch.where(begins, index, 0).cummax(dim=1).values
