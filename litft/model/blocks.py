"""Softmax attention as a layer, and the blocks of the network.

Differences are values of `Config`, applied when built.
"""

import torch
from torch import Tensor, nn

from litft.model.attention import attend
from litft.model.config import Config, LayerConfig
from litft.model.kv_cache import LayerCache
from litft.model.latent_attention import LatentAttention
from litft.model.linear import Linear, apply_linears
from litft.model.mixers import make_mixer
from litft.model.mlp import make_mlp
from litft.model.norm import Norm, apply_norm, make_qk_norm, scaled
from litft.model.packed_sequences import PackedSequences
from litft.model.per_layer_input import BlockExtra, TokenInput
from litft.model.positions import add_alibi
from litft.model.rope import CosSin, rotate, rotate_interleaved

# B batch, T tokens, C channels, H query heads, K key/value heads, D head dim


class Attention(nn.Module):
    """Self-attention with grouped key/value heads (arXiv 2305.13245)."""

    alibi_slopes: Tensor | None  # (H,)

    def __init__(self, config: Config, layer: LayerConfig) -> None:
        super().__init__()
        self.head_dim = layer.head_dim or config.head_dim
        self.window = layer.window
        self.scale = layer.attention_scale
        self.kv_sharing = layer.kv_sharing
        kv_heads = layer.n_kv_heads or config.n_kv_heads
        self.softcap = config.attention_softcap
        self.clip = config.qkv_clip
        self.rotate = rotate_interleaved if config.rope_interleaved else rotate
        width = config.n_heads * self.head_dim
        kv_width = kv_heads * self.head_dim

        # a layer that reuses an earlier layer's keys and values computes queries alone
        has_kv = layer.kv_sharing != "reuse"
        self.q_proj = Linear(config.dim, width, bias=config.qkv_bias)
        if has_kv:
            self.k_proj = Linear(config.dim, kv_width, bias=config.qkv_bias)
        else:
            self.k_proj = None
        # without v_proj, the keys before their norm and rotation are the values
        has_values = has_kv and not layer.key_is_value
        if has_values:
            self.v_proj = Linear(config.dim, kv_width, bias=config.qkv_bias)
        else:
            self.v_proj = None
        self.o_proj = Linear(width, config.dim, bias=config.o_bias)

        if config.attention_gate == "head":
            gate_width = config.n_heads
        else:
            gate_width = width
        if config.attention_gate:
            self.gate_proj = Linear(config.dim, gate_width, bias=False)
        else:
            self.gate_proj = None

        if layer.qk_norm:
            self.q_norm = make_qk_norm(config, config.n_heads, self.head_dim)
        else:
            self.q_norm = None
        if layer.qk_norm and has_kv:
            self.k_norm = make_qk_norm(config, kv_heads, self.head_dim)
        else:
            self.k_norm = None
        if config.value_norm and has_kv:
            self.v_norm = Norm(config.value_norm, self.head_dim)
        else:
            self.v_norm = None
        self.norm_after_rope = config.qk_norm_after_rope
        self.out_scale = config.attention_out_scale

        # on the host until the weights are allocated, since nothing fills it from a file
        if config.alibi:
            slopes = torch.tensor(config.alibi, dtype=torch.float32, device="cpu")
        else:
            slopes = None
        self.register_buffer("alibi_slopes", slopes, persistent=False)
        if config.alibi and self.scale is None:
            self.scale = config.head_dim**-0.5  # of the head without ALiBi's entries
        if config.sinks:
            self.sinks = nn.Parameter(torch.zeros(config.n_heads))
        else:
            self.sinks = None

    def forward(
        self,
        x: Tensor,
        cos_sin: CosSin | None,
        documents: PackedSequences | None,
        cache: LayerCache | None,
        extra: BlockExtra | None = None,
    ) -> Tensor:
        """Return (B, T, C) for x (B, T, C)."""
        if self.kv_sharing == "reuse":
            return self.reuse(x, cos_sin, documents, cache, extra)
        # (B, T, heads, D)
        q, k, v = map(self.split, self.projections(x))
        if not self.norm_after_rope:
            q = apply_norm(self.q_norm, q)
            k = apply_norm(self.k_norm, k)

        # (B, heads, T, D) from here on
        q = self.heads(q)
        k = self.heads(k)
        v = self.heads(apply_norm(self.v_norm, v))
        # a rope of 0 entries rotates nothing, but may scale the queries by their position
        if cos_sin is not None:
            q, k = self.apply_rotary(q, k, cos_sin) if cos_sin.cos.size(-1) else (q, k)
            q = q if cos_sin.query_scale is None else q * cos_sin.query_scale
        if self.norm_after_rope:
            q = apply_norm(self.q_norm, q)
            k = apply_norm(self.k_norm, k)

        # with a cache, the later layers read the keys from there
        if self.kv_sharing == "store" and cache is None:
            # `GPT.block_extras` gives it to layers that share keys
            assert extra is not None
            extra.shared.by_window[self.window] = k, v

        y = self.add_attended(q, self.attend(q, k, v, documents, cache)).transpose(1, 2)
        if self.gate_proj is not None:
            # gates (B, T, H, D), or (B, T, H, 1) with one number a head
            y = y * torch.sigmoid(self.gate_proj(x)).unflatten(2, (y.size(2), -1))
        return scaled(self.o_proj(y.flatten(2)), self.out_scale)

    def reuse(
        self,
        x: Tensor,
        cos_sin: CosSin | None,
        documents: PackedSequences | None,
        cache: LayerCache | None,
        extra: BlockExtra | None,
    ) -> Tensor:
        """Attend with x (B, T, C) to the keys and values of an earlier layer; return (B, T, C)."""
        assert cos_sin is not None  # every layer that shares keys has RoPE
        q = self.heads(apply_norm(self.q_norm, self.split(self.q_proj(x))))
        q = self.rotate(q, cos_sin.cos, cos_sin.sin)
        mask = None
        if cache is None:
            # `GPT.block_extras` gives it to layers that share keys
            assert extra is not None
            k, v = extra.shared.by_window[self.window]
        else:
            k, v, mask = cache.read(self.window)
        # the earlier layer may be on another device
        k = k.to(q.device)
        v = v.to(q.device)
        mask = mask if mask is None else mask.to(q.device)
        y = attend(
            q, k, v, documents, self.window, self.softcap, scale=self.scale, mask=mask
        )
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def apply_rotary(self, q: Tensor, k: Tensor, cos_sin: CosSin) -> tuple[Tensor, ...]:
        """Rotate queries (B, H, T, D) and keys (B, K, T, D); return both in their shapes.

        In a decode step both are rotated at once, since each operation adds latency.
        """
        if q.size(2) > 1:
            return self.rotate(q, cos_sin.cos, cos_sin.sin), self.rotate(
                k, cos_sin.cos, cos_sin.sin
            )
        heads = (q.size(1), k.size(1))
        return self.rotate(torch.cat((q, k), 1), cos_sin.cos, cos_sin.sin).split_with_sizes(
            heads, 1
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: PackedSequences | None,
        cache: LayerCache | None,
    ) -> Tensor:
        """Return the attention output (B, H, T, D)."""
        # cached keys already have the two entries of their positions
        if self.alibi_slopes is not None:
            if cache is None:
                positions = torch.arange(q.size(2), device=q.device)[None]
            else:
                positions = cache.positions(q.device)
            assert self.scale is not None  # the constructor sets it for ALiBi
            q, k = add_alibi(q, k, positions, self.alibi_slopes, self.scale)
        return attend(
            q, k, v, documents, self.window, self.softcap, self.sinks, cache, self.scale
        )

    def add_attended(self, q: Tensor, y: Tensor) -> Tensor:
        """Return the attention output y (B, H, T, D); overridden where queries attend to more, such
        as a prefix."""
        return y

    def projections(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values of x (B, T, C), (B, T, heads * D); overridden where one
        matrix computes all."""
        assert self.k_proj is not None  # a layer without keys calls `reuse` instead
        if self.v_proj is None:
            q, k = apply_linears(x, self.q_proj, self.k_proj)
            return q, k, k
        return tuple(apply_linears(x, self.q_proj, self.k_proj, self.v_proj))

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return unrotated keys and values (B, K, T, D) of x (B, T, C)."""
        assert self.k_proj is not None  # only layers with keys of their own get a prefix
        k = self.split(self.k_proj(x))
        v = k if self.v_proj is None else self.split(self.v_proj(x))
        return self.heads(apply_norm(self.k_norm, k)), self.heads(
            apply_norm(self.v_norm, v)
        )

    def split(self, x: Tensor) -> Tensor:
        """(B, T, heads * D) -> (B, T, heads, D)"""
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def heads(self, x: Tensor) -> Tensor:
        """(B, T, heads, D) -> (B, heads, T, D), clamped if the architecture has a clip value"""
        if self.clip is not None:
            x = x.clamp(-self.clip, self.clip)
        return x.transpose(1, 2)


class Block(nn.Module):
    """Attention, then MLP or experts, each added to the residual stream, with norms before, after,
    or both."""

    def __init__(self, config: Config, layer: LayerConfig) -> None:
        super().__init__()
        norm_position = layer.norm_position or config.norm_position
        before = norm_position in ("before", "both")
        # "residual" places the same norms after the sums, see PostNormBlock
        after = norm_position != "before"
        self.scale = config.residual_scale
        mixes = bool(layer.attention or layer.mixer)
        beside_dense = bool(layer.experts and layer.experts.beside_dense)
        # which has norms of its own
        has_mlp_norm = before and not config.shared_norm and not beside_dense

        if before and mixes:
            self.attention_norm = Norm(config.norm, config.dim)
        else:
            self.attention_norm = None
        self.attention = make_attention(config, layer)
        self.mixer = make_mixer(config, layer)
        if after and mixes:
            self.attention_post_norm = Norm(config.post_norm or config.norm, config.dim)
        else:
            self.attention_post_norm = None

        if has_mlp_norm and layer.mlp:
            self.mlp_norm = Norm(config.norm, config.dim)
        else:
            self.mlp_norm = None
        self.mlp = make_mlp(config, layer) if layer.mlp else None
        if after and layer.mlp:
            self.mlp_post_norm = Norm(config.post_norm or config.norm, config.dim)
        else:
            self.mlp_post_norm = None
        self.token_input = TokenInput(config) if config.per_layer_dim else None
        if config.layer_scale:
            self.layer_scale = nn.Parameter(torch.ones(1))
        else:
            self.layer_scale = None

    def forward(
        self,
        x: Tensor,
        cos_sin: CosSin | None,
        documents: PackedSequences | None,
        cache: LayerCache | None,
        extra: BlockExtra | None = None,
    ) -> Tensor:
        """Return the residual stream after the block, (B, T, C), for x (B, T, C)."""
        if self.attention is not None or self.mixer is not None:
            y = self.mix(
                apply_norm(self.attention_norm, x), cos_sin, documents, cache, extra
            )
            x = x + scaled(apply_norm(self.attention_post_norm, y), self.scale)
        if self.mlp is not None:
            y = self.mlp(apply_norm(self.mlp_norm, x))
            x = x + scaled(apply_norm(self.mlp_post_norm, y), self.scale)
        if self.token_input is not None:
            # the network has per-layer embeddings
            assert extra is not None
            assert extra.token_input is not None
            x = self.token_input(x, extra.token_input)

        if self.layer_scale is None:
            return x
        # a constant of the checkpoint, which no method trains
        return x * self.layer_scale.detach()

    def mix(
        self,
        x: Tensor,
        cos_sin: CosSin | None,
        documents: PackedSequences | None,
        cache: LayerCache | None,
        extra: BlockExtra | None,
    ) -> Tensor:
        """Return what attention, a recurrent mixer, or the sum of both computes from x (B, T, C),
        in the same shape."""
        extras = () if extra is None else (extra,)
        if self.mixer is None:
            # `forward` asks only a block with one of the two
            assert self.attention is not None
            return self.attention(x, cos_sin, documents, cache, *extras)
        y = self.mixer(x, documents, cache)
        if self.attention is None:
            return y
        return y + self.attention(x, cos_sin, documents, cache, *extras)


def make_attention(
    config: Config, layer: LayerConfig
) -> Attention | LatentAttention | None:
    """Build the attention of a layer, or return None if it has none."""
    if not layer.attention:
        return None
    if layer.latent:
        return LatentAttention(config, layer, layer.latent)
    return Attention(config, layer)


class PostNormBlock(Block):
    """Attention, then MLP, with a norm of each sum, as in the original transformer."""

    # every block of this class has all parts
    attention: Attention | LatentAttention
    attention_post_norm: Norm
    mlp: nn.Module
    mlp_post_norm: Norm

    def forward(
        self,
        x: Tensor,
        cos_sin: CosSin | None,
        documents: PackedSequences | None,
        cache: LayerCache | None,
    ) -> Tensor:
        """Return the residual stream after the block, (B, T, C), for x (B, T, C)."""
        x = self.attention_post_norm(x + self.attention(x, cos_sin, documents, cache))
        return self.mlp_post_norm(x + self.mlp(x))


class ParallelBlock(Block):
    """Attention and MLP in parallel on the same input, as in GPT-J; with `shared_norm` both use one
    norm."""

    # every block of this class has both parts, and the first norm
    attention: Attention | LatentAttention
    attention_norm: Norm
    mlp: nn.Module

    def forward(
        self,
        x: Tensor,
        cos_sin: CosSin | None,
        documents: PackedSequences | None,
        cache: LayerCache | None,
    ) -> Tensor:
        """Return the residual stream after the block, (B, T, C), for x (B, T, C)."""
        y = self.attention_norm(x)
        attended = x + self.attention(y, cos_sin, documents, cache)
        # a norm of the MLP's input
        if self.mlp_norm is not None:
            y = self.mlp_norm(x)
        return attended + self.mlp(y)
