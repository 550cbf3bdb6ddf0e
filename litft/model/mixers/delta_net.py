"""Gated DeltaNet (arXiv 2412.06464) and Kimi Delta Attention (arXiv 2510.26692)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litft.model.config import Config, DeltaNetConfig
from litft.model.kv_cache import LayerCache
from litft.model.linear import Linear
from litft.model.mixers.mixer import CausalConv, GatedNorm, Mixer
from litft.model.mixers.recurrence import CHUNK, recurrence
from litft.model.packed_sequences import PackedSequences

# B batch, T tokens, C channels, H value heads, G key heads, K key dim, V value dim


class DeltaNet(Mixer):
    """The gated delta rule over convolved queries, keys and values, with a gated norm of its output."""

    def __init__(self, config: Config, delta: DeltaNetConfig) -> None:
        super().__init__()
        self.delta = delta
        key_width, value_width = delta.n_key_heads * delta.key_dim, delta.n_heads * delta.value_dim
        self.query_proj = Linear(config.dim, key_width, bias=False)
        self.key_proj = Linear(config.dim, key_width, bias=False)
        self.value_proj = Linear(config.dim, value_width, bias=False)
        self.beta_proj = Linear(config.dim, delta.n_heads, bias=False)
        self.out_proj = Linear(value_width, config.dim, bias=False)
        self.query_conv, self.key_conv, self.value_conv = (
            CausalConv(width, delta.conv_width, bias=False) for width in (key_width, key_width, value_width)
        )
        decay_width = delta.n_heads * (delta.key_dim if delta.row_decay else 1)
        if delta.row_decay:
            self.decay_a_proj, self.gate_a_proj = (Linear(config.dim, delta.value_dim, bias=False) for _ in range(2))
            self.decay_proj = Linear(delta.value_dim, decay_width, bias=False)
            self.gate_proj = Linear(delta.value_dim, value_width, bias=False)
        else:
            self.decay_proj = Linear(config.dim, decay_width, bias=False)
            self.gate_proj = Linear(config.dim, value_width, bias=False)
        self.log_rate, self.decay_bias = nn.Parameter(torch.zeros(delta.n_heads)), nn.Parameter(torch.zeros(decay_width))
        gate = "sigmoid" if delta.row_decay else "silu"
        self.norm = GatedNorm(delta.value_dim, delta.norm_eps, gate, gate_first=False)
        self.flops_per_token = 2 * delta.n_heads * (2 * CHUNK + 2 * delta.key_dim) * (delta.key_dim + delta.value_dim)

    def forward(self, x: Tensor, documents: PackedSequences | None, cache: LayerCache | None) -> Tensor:
        """See Mixer."""
        delta = self.delta
        q = F.silu(self.query_conv(self.query_proj(x), documents, cache, 0))
        k = F.silu(self.key_conv(self.key_proj(x), documents, cache, 1))
        v = F.silu(self.value_conv(self.value_proj(x), documents, cache, 2))
        q, k = (normalized(part.unflatten(-1, (delta.n_key_heads, -1))) for part in (q, k))
        v = v.unflatten(-1, (delta.n_heads, -1))
        beta = self.beta_proj(x).float().sigmoid() * (2 if delta.negative_eigenvalues else 1)
        state = None if cache is None else cache.states[3]
        y, state = recurrence(q * delta.key_dim**-0.5, k, v, self.decay(x), beta, documents, state)
        if cache is not None:
            cache.store(3, state)
        gate = self.gate_proj(self.gate_a_proj(x) if delta.row_decay else x)
        y = self.norm(y.to(x.dtype), gate.unflatten(-1, (delta.n_heads, -1)))
        return self.out_proj(y.flatten(2))

    def decay(self, x: Tensor) -> Tensor:
        """Return the log decay of each token's state, in fp32: (B, T, H), or (B, T, H, K) for each row."""
        rows = self.decay_proj(self.decay_a_proj(x) if self.delta.row_decay else x).float() + self.decay_bias.float()
        rate = self.log_rate.float().exp()
        if self.delta.row_decay:
            return -rate[:, None] * F.softplus(rows.unflatten(-1, (self.delta.n_heads, -1)))
        return -rate * F.softplus(rows)


def normalized(x: Tensor) -> Tensor:
    """Return x (..., K) divided by its norm, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
