"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads come
from one small vector."""

import torch
from torch import Tensor, nn

from litft.model.attention import attend
from litft.model.config import Config, LatentConfig, LayerConfig
from litft.model.kv_cache import LayerCache
from litft.model.linear import Linear
from litft.model.norm import Norm, apply_norm
from litft.model.packed_sequences import PackedSequences
from litft.model.rope import CosSin, rotate, rotate_interleaved

# B batch, T tokens, S keys, C channels, H heads, N unrotated and D rotated entries of a head, V
# value dim, R latent dim

# queries of a call up to which attention in the latent space is cheaper than expanding all keys
MAX_ABSORBED = 16


class LatentAttention(nn.Module):
    """Attention whose cache has one latent vector (R) and one rotated key (D) a token, shared by
    all heads.

    Keys and values are expanded from the latent vectors in training and for prompts. A decode step
    instead multiplies the queries by the key matrix, and the output by the value matrix
    ("absorbed"), and so attends to the latent vectors.
    """

    def __init__(self, config: Config, layer: LayerConfig, latent: LatentConfig) -> None:
        super().__init__()
        self.latent = latent
        self.window = layer.window
        self.n_heads = config.n_heads
        self.softcap = None
        self.scale = layer.attention_scale or latent.head_dim**-0.5
        self.rotate = rotate_interleaved if config.rope_interleaved else rotate
        width = config.n_heads * latent.head_dim
        norm = latent.norm

        # queries: one matrix, or a product of two with a norm in between
        if latent.query_dim is None:
            self.q_proj = Linear(config.dim, width, bias=False)
        else:
            self.q_a_proj = Linear(config.dim, latent.query_dim, bias=config.qkv_bias)
            self.q_a_norm = Norm(norm, latent.query_dim)
            self.q_b_proj = Linear(latent.query_dim, width, bias=False)

        # the output is the latent vector, followed by the rotated key that all heads share
        self.kv_a_proj = Linear(
            config.dim, latent.dim + latent.rope_dim, bias=config.qkv_bias
        )
        self.kv_a_norm = Norm(norm, latent.dim)
        self.kv_b_proj = Linear(
            latent.dim, config.n_heads * (latent.nope_dim + latent.value_dim), bias=False
        )
        self.kv_b_proj.reads_weight = True  # `absorbed` reads it
        self.o_proj = Linear(
            config.n_heads * latent.value_dim, config.dim, bias=config.o_bias
        )

    def forward(
        self,
        x: Tensor,
        cos_sin: CosSin | None,
        documents: PackedSequences | None,
        cache: LayerCache | None,
    ) -> Tensor:
        """Return (B, T, C) for x (B, T, C)."""
        # (B, H, T, N + D)
        q = self.queries(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        # only a part of each head carries the position: latent vectors do not depend on it
        q_nope, q_rope = q.split((self.latent.nope_dim, self.latent.rope_dim), dim=-1)
        latents, k_rope = self.kv_a_proj(x).split(
            (self.latent.dim, self.latent.rope_dim), dim=-1
        )
        latents = apply_norm(self.kv_a_norm, latents)[:, None]
        k_rope = k_rope[:, None]  # (B, 1, T, R), (B, 1, T, D)
        if cos_sin is not None:
            q_rope, k_rope = (
                self.rotate(x, cos_sin.cos, cos_sin.sin) for x in (q_rope, k_rope)
            )
            if cos_sin.query_scale is not None:
                q_nope = q_nope * cos_sin.query_scale
                q_rope = q_rope * cos_sin.query_scale

        # With an adapter or quantization, the weight of kv_b_proj is not all of its function, and
        # it must be called.
        if (
            cache is not None
            and x.size(1) <= MAX_ABSORBED
            and type(self.kv_b_proj) is Linear
        ):
            y = self.absorbed(q_nope, q_rope, torch.cat((latents, k_rope), -1), cache)
        else:
            y = self.expanded(
                torch.cat((q_nope, q_rope), -1),
                torch.cat((latents, k_rope), -1),
                documents,
                cache,
            )
        y = self.add_attended(torch.cat((q_nope, q_rope), -1), y)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def add_attended(self, q: Tensor, y: Tensor) -> Tensor:
        """Return the attention output y (B, H, T, V); see `Attention.add_attended`."""
        return y

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return unrotated keys (B, H, T, N + D) and values (B, H, T, V) of x (B, T, C)."""
        latents, k_rope = self.kv_a_proj(x).split(
            (self.latent.dim, self.latent.rope_dim), dim=-1
        )
        return self.expand(
            torch.cat((apply_norm(self.kv_a_norm, latents), k_rope), -1)[:, None]
        )

    def expand(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys (B, H, S, N + D) and values (B, H, S, V) of every head, given latent
        vectors and shared keys (B, 1, S, R + D)."""
        latents, k_rope = keys.split((self.latent.dim, self.latent.rope_dim), dim=-1)
        kv = self.kv_b_proj(latents[:, 0]).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        k_nope, v = kv.split((self.latent.nope_dim, self.latent.value_dim), dim=-1)
        return torch.cat((k_nope, k_rope.expand(-1, self.n_heads, -1, -1)), dim=-1), v

    def queries(self, x: Tensor) -> Tensor:
        """Return the queries of x (B, T, C), (B, T, H * (N + D))."""
        if self.latent.query_dim is None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))

    def expanded(
        self,
        q: Tensor,
        keys: Tensor,
        documents: PackedSequences | None,
        cache: LayerCache | None,
    ) -> Tensor:
        """Attend with q (B, H, T, N + D) to keys and values of every head, expanded from `keys` (B,
        1, T, R + D) and those of the cache; return (B, H, T, V)."""
        mask = None
        if cache is not None:
            # the cache holds latent vectors and shared keys;
            # values are a part of them, so their size is 0
            keys, _, mask = cache.update(keys, keys[..., :0], self.window)
        return attend(
            q, *self.expand(keys), documents, self.window, scale=self.scale, mask=mask
        )

    def absorbed(
        self, q_nope: Tensor, q_rope: Tensor, keys: Tensor, cache: LayerCache
    ) -> Tensor:
        """Attend to the latent vectors: (q W_k) k = q (W_k k), and W_v is applied to their weighted
        sum.

        q_nope: (B, H, T, N); q_rope: (B, H, T, D); keys: (B, 1, T, R + D). Returns (B, H, T, V).
        """
        keys, _, mask = cache.update(keys, keys[..., :0], self.window)
        weight = self.kv_b_proj.weight.unflatten(0, (self.n_heads, -1))
        # (H, N, R), (H, V, R)
        sizes = (self.latent.nope_dim, self.latent.value_dim)
        key_weight, value_weight = weight.split(sizes, dim=1)

        q = torch.cat((q_nope @ key_weight, q_rope), dim=-1)  # (B, H, T, R + D)
        # the latent vectors are keys and values of a single head that all query heads share
        values = keys[..., : self.latent.dim]
        # (B, H, T, R)
        y = attend(q, keys, values, None, self.window, scale=self.scale, mask=mask)
        return y @ value_weight.mT
