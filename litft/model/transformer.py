"""The network: one decoder for all model families. Differences are values of `Config`, applied when it is built."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litft.model.attention import attend
from litft.model.config import Chunk, Config, LayerConfig
from litft.model.kv_cache import KVCache, LayerCache
from litft.model.latent_attention import LatentAttention
from litft.model.linear import Linear
from litft.model.loss import IGNORED, apply_softcap, summed_cross_entropy
from litft.model.mixers import make_mixer
from litft.model.mlp import make_mlp
from litft.model.norm import Norm, apply_norm, make_qk_norm, scaled
from litft.model.packed_sequences import PackedSequences
from litft.model.per_layer_input import BlockExtra, PerLayerEmbedding, SharedKeys, TokenInput
from litft.model.positions import add_alibi, sinusoids
from litft.model.rope import CosSin, RotaryEmbedding, rotate, rotate_interleaved

# B batch, T tokens, C channels, H query heads, K key/value heads, D head dim, V vocabulary


class Attention(nn.Module):
    """Self-attention with grouped key/value heads (arXiv 2305.13245)."""

    def __init__(self, config: Config, layer: LayerConfig) -> None:
        super().__init__()
        self.head_dim, self.window, self.scale = layer.head_dim or config.head_dim, layer.window, layer.attention_scale
        self.kv_sharing, kv_heads = layer.kv_sharing, layer.n_kv_heads or config.n_kv_heads
        self.softcap, self.clip = config.attention_softcap, config.qkv_clip
        self.rotate = rotate_interleaved if config.rope_interleaved else rotate
        width, kv_width, has_kv = config.n_heads * self.head_dim, kv_heads * self.head_dim, layer.kv_sharing != "reuse"
        self.q_proj = Linear(config.dim, width, bias=config.qkv_bias)
        self.k_proj = Linear(config.dim, kv_width, bias=config.qkv_bias) if has_kv else None
        has_values = has_kv and not layer.key_is_value
        self.v_proj = Linear(config.dim, kv_width, bias=config.qkv_bias) if has_values else None
        self.o_proj = Linear(width, config.dim, bias=config.o_bias)
        self.gate_proj = Linear(config.dim, width, bias=False) if config.attention_gate else None
        self.q_norm = make_qk_norm(config, config.n_heads, self.head_dim) if layer.qk_norm else None
        self.k_norm = make_qk_norm(config, kv_heads, self.head_dim) if layer.qk_norm and has_kv else None
        self.v_norm = Norm(config.value_norm, self.head_dim) if config.value_norm and has_kv else None
        self.norm_after_rope, self.out_scale = config.qk_norm_after_rope, config.attention_out_scale
        # on the host until the weights are allocated, since nothing fills it from a file
        slopes = torch.tensor(config.alibi, dtype=torch.float32, device="cpu") if config.alibi else None
        self.register_buffer("alibi_slopes", slopes, persistent=False)
        if config.alibi and self.scale is None:
            self.scale = config.head_dim**-0.5  # of the head without ALiBi's entries
        self.sinks = nn.Parameter(torch.zeros(config.n_heads)) if config.sinks else None

    def forward(
        self,
        x: Tensor,
        cos_sin: CosSin | None,
        documents: PackedSequences | None,
        cache: LayerCache | None,
        extra: BlockExtra | None = None,
    ) -> Tensor:
        if self.kv_sharing == "reuse":
            return self.reuse(x, cos_sin, documents, cache, extra)
        q, k, v = map(self.split, self.projections(x))
        if not self.norm_after_rope:
            q, k = apply_norm(self.q_norm, q), apply_norm(self.k_norm, k)
        q, k, v = self.heads(q), self.heads(k), self.heads(apply_norm(self.v_norm, v))
        if cos_sin is not None:
            q, k = self.apply_rotary(q, k, cos_sin) if cos_sin.cos.size(-1) else (q, k)
            q = q if cos_sin.query_scale is None else q * cos_sin.query_scale
        if self.norm_after_rope:
            q, k = apply_norm(self.q_norm, q), apply_norm(self.k_norm, k)
        if self.kv_sharing == "store" and cache is None:
            extra.shared.by_window[self.window] = k, v
        y = self.add_attended(q, self.attend(q, k, v, documents, cache)).transpose(1, 2).flatten(2)
        y = self.o_proj(y if self.gate_proj is None else y * torch.sigmoid(self.gate_proj(x)))
        return scaled(y, self.out_scale)

    def reuse(
        self,
        x: Tensor,
        cos_sin: CosSin,
        documents: PackedSequences | None,
        cache: LayerCache | None,
        extra: BlockExtra,
    ) -> Tensor:
        """Attend to the keys and values of an earlier layer."""
        q = self.heads(apply_norm(self.q_norm, self.split(self.q_proj(x))))
        q, mask = self.rotate(q, cos_sin.cos, cos_sin.sin), None
        if cache is None:
            k, v = extra.shared.by_window[self.window]
        else:
            k, v, mask = cache.read(self.window)
        y = attend(q, k, v, documents, self.window, self.softcap, scale=self.scale, mask=mask)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def apply_rotary(self, q: Tensor, k: Tensor, cos_sin: CosSin) -> tuple[Tensor, ...]:
        """Rotate queries and keys; in a decode step both at once, since each operation adds latency."""
        if q.size(2) > 1:
            return self.rotate(q, cos_sin.cos, cos_sin.sin), self.rotate(k, cos_sin.cos, cos_sin.sin)
        heads = (q.size(1), k.size(1))
        return self.rotate(torch.cat((q, k), 1), cos_sin.cos, cos_sin.sin).split_with_sizes(heads, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: PackedSequences | None, cache: LayerCache | None) -> Tensor:
        """Return the attention output (B, H, T, D)."""
        if self.alibi_slopes is not None:
            positions = torch.arange(q.size(2), device=q.device)[None] if cache is None else cache.positions(q.device)
            q, k = add_alibi(q, k, positions, self.alibi_slopes, self.scale)
        return attend(q, k, v, documents, self.window, self.softcap, self.sinks, cache, self.scale)

    def add_attended(self, q: Tensor, y: Tensor) -> Tensor:
        """Return the attention output y (B, H, T, D); overridden where queries attend to more, such as a prefix."""
        return y

    def projections(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values of x (B, T, C), (B, T, heads * D); overridden where one matrix computes all."""
        k = self.k_proj(x)
        return self.q_proj(x), k, k if self.v_proj is None else self.v_proj(x)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return unrotated keys and values (B, K, T, D) of x (B, T, C)."""
        k = self.split(self.k_proj(x))
        v = k if self.v_proj is None else self.split(self.v_proj(x))
        return self.heads(apply_norm(self.k_norm, k)), self.heads(apply_norm(self.v_norm, v))

    def split(self, x: Tensor) -> Tensor:
        """(B, T, heads * D) -> (B, T, heads, D)"""
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def heads(self, x: Tensor) -> Tensor:
        """(B, T, heads, D) -> (B, heads, T, D), clamped if the architecture has a clip value"""
        return (x if self.clip is None else x.clamp(-self.clip, self.clip)).transpose(1, 2)


class Block(nn.Module):
    """Attention, then MLP or experts, each added to the residual stream, with norms before, after, or both."""

    def __init__(self, config: Config, layer: LayerConfig) -> None:
        super().__init__()
        norm_position = layer.norm_position or config.norm_position
        before, after = norm_position in ("before", "both"), norm_position != "before"
        self.scale = config.residual_scale
        mixes, beside_dense = bool(layer.attention or layer.mixer), bool(layer.experts and layer.experts.beside_dense)
        has_mlp_norm = before and not config.shared_norm and not beside_dense  # which has norms of its own
        self.attention_norm = Norm(config.norm, config.dim) if before and mixes else None
        self.attention = make_attention(config, layer)
        self.mixer = make_mixer(config, layer)
        self.attention_post_norm = Norm(config.norm, config.dim) if after and mixes else None
        self.mlp_norm = Norm(config.norm, config.dim) if has_mlp_norm and layer.mlp else None
        self.mlp = make_mlp(config, layer) if layer.mlp else None
        self.mlp_post_norm = Norm(config.norm, config.dim) if after and layer.mlp else None
        self.token_input = TokenInput(config) if config.per_layer_dim else None
        self.layer_scale = nn.Parameter(torch.ones(1)) if config.layer_scale else None

    def forward(
        self,
        x: Tensor,
        cos_sin: CosSin | None,
        documents: PackedSequences | None,
        cache: LayerCache | None,
        extra: BlockExtra | None = None,
    ) -> Tensor:
        if self.attention is not None or self.mixer is not None:
            y = self.mix(apply_norm(self.attention_norm, x), cos_sin, documents, cache, extra)
            x = x + scaled(apply_norm(self.attention_post_norm, y), self.scale)
        if self.mlp is not None:
            y = self.mlp(apply_norm(self.mlp_norm, x))
            x = x + scaled(apply_norm(self.mlp_post_norm, y), self.scale)
        if self.token_input is not None:
            x = self.token_input(x, extra.token_input)
        return x if self.layer_scale is None else x * self.layer_scale.detach()

    def mix(
        self,
        x: Tensor,
        cos_sin: CosSin | None,
        documents: PackedSequences | None,
        cache: LayerCache | None,
        extra: BlockExtra | None,
    ) -> Tensor:
        """Return what attention, a recurrent mixer, or the sum of both computes from x (B, T, C)."""
        extras = () if extra is None else (extra,)
        if self.mixer is None:
            return self.attention(x, cos_sin, documents, cache, *extras)
        y = self.mixer(x, documents, cache)
        return y if self.attention is None else y + self.attention(x, cos_sin, documents, cache, *extras)


def make_attention(config: Config, layer: LayerConfig) -> nn.Module | None:
    """Build the attention of a layer, or return None if it has none."""
    if not layer.attention:
        return None
    return (LatentAttention if layer.latent else Attention)(config, layer)


class PostNormBlock(Block):
    """Attention, then MLP, with a norm of each sum, as in the original transformer."""

    def forward(
        self, x: Tensor, cos_sin: CosSin | None, documents: PackedSequences | None, cache: LayerCache | None
    ) -> Tensor:
        x = self.attention_post_norm(x + self.attention(x, cos_sin, documents, cache))
        return self.mlp_post_norm(x + self.mlp(x))


class ParallelBlock(Block):
    """Attention and MLP in parallel on the same input, as in GPT-J; with `shared_norm` both use one norm."""

    def __init__(self, config: Config, layer: LayerConfig) -> None:
        super().__init__(config, layer)
        self.shared_norm = config.shared_norm

    def forward(
        self, x: Tensor, cos_sin: CosSin | None, documents: PackedSequences | None, cache: LayerCache | None
    ) -> Tensor:
        y = self.attention_norm(x)
        return x + self.attention(y, cos_sin, documents, cache) + self.mlp(y if self.shared_norm else self.mlp_norm(x))


def block_class(config: Config) -> type[Block]:
    """Return the class of the blocks of an architecture."""
    if config.parallel:
        return ParallelBlock
    return PostNormBlock if config.norm_position == "residual" else Block


class GPT(nn.Module):
    """A decoder-only transformer with the architecture of `config`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        num_positions = config.max_positions + config.position_offset
        self.embed_positions = nn.Embedding(num_positions, config.dim) if config.learned_positions else None
        self.embed_norm = Norm(config.embed_norm, config.dim) if config.embed_norm else None
        self.per_layer = PerLayerEmbedding(config) if config.per_layer_dim else None
        self.blocks = nn.ModuleList(block_class(config)(config, layer) for layer in config.layers)
        self.norm = Norm(config.norm, config.dim) if config.final_norm else None
        self.lm_head = Linear(config.dim, config.vocab_size, bias=config.head_bias)
        self.tie()
        ropes = list(dict.fromkeys(layer.rope for layer in config.layers if layer.rope))
        self.rotaries = nn.ModuleList(RotaryEmbedding(rope) for rope in ropes)
        self.rotary_indices = [ropes.index(layer.rope) if layer.rope else None for layer in config.layers]
        self.label_smoothing = self.neftune_alpha = 0.0  # set by the training loop
        self.compiled_loss = False  # whether the loss is compiled in training
        self.compute_device: torch.device | None = (
            None  # set if weights are offloaded to the host; None: the device of the weights
        )

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype; trained weights may be stored in a wider one."""
        return getattr(self.embed, "dtype", self.embed.weight.dtype)

    @property
    def device(self) -> torch.device:
        """The device that tokens must be on."""
        return self.compute_device or self.embed.weight.device

    @property
    def block_devices(self) -> list[torch.device]:
        """The compute device of each block."""
        return [self.compute_device or next(block.parameters()).device for block in self.blocks]

    def set_vocabulary(self, size: int) -> None:
        """Set the config's vocabulary size after embedding and head were resized."""
        self.config = replace(self.config, vocab_size=size)

    def tie(self) -> None:
        """Make the head's weight the embedding's parameter, if the architecture ties them."""
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

        positions: (B, T); default: counted from the cache's length, restarting at each document. With a cache they are also
            the indices at which keys and values are stored.
        documents: (B, T) integers with a different value for each packed sample of a row, or `PackedSequences`. Tokens of
            different documents do not attend to each other.
        cache: keys and values of previous tokens; those of `tokens` are added.
        targets: (B, T); `targets[b, t]` is the token after `tokens[b, t]`, or IGNORED.
        target_indices: (N,), indices of the targets among the flattened B x T positions; avoids a GPU sync.
        logits_to_keep: (B, N), indices of the tokens whose logits are computed; default: all.

        Returns logits (B, T or N, V), or with targets the summed loss and the number of targets. The head runs inside
        `forward`, so that DDP and FSDP handle it.
        """
        if isinstance(documents, Tensor):
            documents = PackedSequences.of(documents)
        document_ids = documents.ids if documents else None
        if cache is not None:
            cache.begin(tokens, positions)
        if positions is None:
            positions = default_positions(tokens, document_ids, cache.length if cache else 0)
        x = self.embed_tokens(tokens, positions)  # (B, T, C)
        if self.training and self.neftune_alpha:
            x = add_neftune_noise(x, self.neftune_alpha, targets, document_ids)
        cos_sin, extras = self.cos_sin(positions, cache, x.dtype), self.block_extras(tokens, x)
        documents = self.layer_documents(self.prepare_documents(documents, tokens), tokens)
        for index, (block, rotary) in enumerate(zip(self.blocks, self.rotary_indices, strict=True)):
            layer_cache = cache.layers[index] if cache else None
            x = block(x, cos_sin[rotary] if rotary is not None else None, documents[index], layer_cache, *extras[index])
        if cache is not None:
            cache.end()
        if logits_to_keep is not None:
            x = x.gather(1, logits_to_keep[..., None].expand(-1, -1, x.size(2)))
        x = scaled(apply_norm(self.norm, x), self.config.logit_scale)
        if targets is not None:
            smoothing = self.label_smoothing if self.training else 0.0
            options = self.config.logit_softcap, smoothing, target_indices, self.compiled_loss
            return summed_cross_entropy(x, self.lm_head, targets, *options)
        return apply_softcap(self.lm_head(x), self.config.logit_softcap)

    def prepare_documents(self, documents: PackedSequences | None, tokens: Tensor) -> PackedSequences | None:
        """Return the documents to pass to the blocks; overridden for compiled blocks."""
        return documents

    def layer_documents(self, documents: PackedSequences | None, tokens: Tensor) -> list[PackedSequences | None]:
        """Return the documents of each block: those of tokens (B, T), or their chunks for a block with chunked attention."""
        windows = [layer.window for layer in self.config.layers]
        chunks = {window for window in windows if isinstance(window, Chunk) and window.size < tokens.size(1)}
        rows = torch.zeros_like(tokens) if documents is None else documents.ids
        chunked = {chunk: PackedSequences.of_chunks(rows, chunk.size) for chunk in chunks}
        return [chunked.get(window, documents) for window in windows]

    def block_extras(self, tokens: Tensor, x: Tensor) -> list[tuple[BlockExtra, ...]]:
        """Return the further argument of each block for tokens (B, T) with embedding x; an empty tuple if it has none."""
        shares = any(layer.kv_sharing != "none" for layer in self.config.layers)
        if self.per_layer is None and not shares:
            return [()] * len(self.blocks)
        inputs = [None] * len(self.blocks) if self.per_layer is None else self.per_layer(tokens, x).unbind()
        shared = SharedKeys()
        return [(BlockExtra(token_input, shared),) for token_input in inputs]

    def embed_tokens(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the input of the residual stream. The scale is rounded to the weights' dtype, as in Gemma's training."""
        x = self.embed(tokens)
        if self.config.embed_scale != 1:
            x = x * torch.tensor(self.config.embed_scale, dtype=x.dtype)
        positions = positions + self.config.position_offset
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        if self.config.sinusoidal_positions:
            x = x + sinusoids(positions, x.size(-1), x.dtype)
        return apply_norm(self.embed_norm, x)

    def cos_sin(self, positions: Tensor, cache: KVCache | None, dtype: torch.dtype) -> list[CosSin]:
        """Return cos and sin for each distinct RopeConfig; the longest document or planned length selects its factors."""
        max_length = cache.max_length if cache else positions.max() + 1
        return [rotary(positions, max_length, dtype) for rotary in self.rotaries]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within the context, modules are created in this dtype."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def add_neftune_noise(x: Tensor, alpha: float, targets: Tensor, document_ids: Tensor | None) -> Tensor:
    """Add NEFTune noise (arXiv 2310.05914) to embeddings (B, T, C): uniform within alpha / sqrt(L C).

    L is the length of the sample: the tokens of its document in a packed row, otherwise the tokens up to the row's last
    target, since later ones are padding or do not affect the loss. So the noise does not depend on the length of other rows.
    """
    if document_ids is None:
        index = torch.arange(1, x.size(1) + 1, device=x.device)
        lengths = torch.where(targets != IGNORED, index, 1).amax(1, keepdim=True)  # (B, 1)
    else:
        lengths = (document_ids[:, :, None] == document_ids[:, None, :]).sum(2)  # (B, T)
    bound = alpha / (lengths * x.size(2)).sqrt()
    return x + ((torch.rand_like(x, dtype=torch.float32) * 2 - 1) * bound[..., None]).to(x.dtype)


def default_positions(tokens: Tensor, document_ids: Tensor | None, offset: int) -> Tensor:
    """Return positions `offset`, `offset` + 1, ..., restarting at 0 with each document; (1, T), or (B, T) with documents."""
    index = torch.arange(offset, offset + tokens.size(1), device=tokens.device)[None]
    if document_ids is None:
        return index
    is_start = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)
    return index - torch.where(is_start, index, 0).cummax(dim=1).values
