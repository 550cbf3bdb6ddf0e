"""Gated DeltaNet (arXiv 2412.06464) and Kimi Delta Attention (arXiv 2510.26692)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litft.model.config import Config, DeltaNetConfig
from litft.model.kv_cache import LayerCache
from litft.model.linear import Linear
from litft.model.mixers.mixer import CausalConv, GatedNorm, Mixer, causal_conv
from litft.model.mixers.recurrence import CHUNK, recurrence
from litft.model.packed_sequences import PackedSequences

# B batch, T tokens, C channels, H value heads, G key heads, K key dim, V value dim


class DeltaNet(Mixer):
    """The gated delta rule over convolved queries, keys and values, with a gated norm of its
    output."""

    def __init__(self, config: Config, delta: DeltaNetConfig) -> None:
        super().__init__()
        self.delta = delta
        key_width = delta.n_key_heads * delta.key_dim
        value_width = delta.n_heads * delta.value_dim
        self.query_proj = Linear(config.dim, key_width, bias=False)
        self.key_proj = Linear(config.dim, key_width, bias=False)
        self.value_proj = Linear(config.dim, value_width, bias=False)
        self.beta_proj = Linear(config.dim, delta.n_heads, bias=False)
        self.out_proj = Linear(value_width, config.dim, bias=False)
        self.query_conv, self.key_conv, self.value_conv = (
            CausalConv(width, delta.conv_width, bias=False)
            for width in (key_width, key_width, value_width)
        )

        decay_width = delta.n_heads * (delta.key_dim if delta.row_decay else 1)
        if delta.row_decay:
            # Kimi Delta Attention: decay and output gate are low-rank projections of the input
            self.decay_a_proj, self.gate_a_proj = (
                Linear(config.dim, delta.value_dim, bias=False) for _ in range(2)
            )
            self.decay_proj = Linear(delta.value_dim, decay_width, bias=False)
            self.gate_proj = Linear(delta.value_dim, value_width, bias=False)
        else:
            self.decay_proj = Linear(config.dim, decay_width, bias=False)
            self.gate_proj = Linear(config.dim, value_width, bias=False)

        self.log_rate = nn.Parameter(torch.zeros(delta.n_heads))
        self.decay_bias = nn.Parameter(torch.zeros(decay_width))
        gate = "sigmoid" if delta.row_decay else "silu"
        self.norm = GatedNorm(delta.value_dim, delta.norm_eps, gate, gate_first=False)
        self.flops_per_token = (
            2 * delta.n_heads * (2 * CHUNK + 2 * delta.key_dim) * (delta.key_dim + delta.value_dim)
        )

    def forward(
        self, x: Tensor, documents: PackedSequences | None, cache: LayerCache | None
    ) -> Tensor:
        """See Mixer."""
        delta = self.delta
        # in the order in which `mix` unpacks them
        y = self.run_mix(
            documents,
            cache,
            *(
                proj(x)
                for proj in (self.query_proj, self.key_proj, self.value_proj, self.beta_proj)
            ),
            self.decay_proj(self.decay_a_proj(x) if delta.row_decay else x),
            *(conv.weight for conv in (self.query_conv, self.key_conv, self.value_conv)),
            self.log_rate,
            self.decay_bias,
        )
        gate = self.gate_proj(self.gate_a_proj(x) if delta.row_decay else x)
        y = self.norm(y, gate.unflatten(-1, (delta.n_heads, -1)))
        return self.out_proj(y.flatten(2))

    def mix(
        self, documents: PackedSequences | None, cache: LayerCache | None, *inputs: Tensor
    ) -> Tensor:
        """Return the gated delta rule over convolved queries, keys and values: (B, T, H, V)."""
        delta = self.delta
        dtype = inputs[0].dtype
        *projections, beta, rows, query_weight, key_weight, value_weight, log_rate, decay_bias = (
            inputs
        )

        # The cache's states 0, 1 and 2 are the inputs of the
        # three convolutions; 3 is that of the recurrence.
        q, k, v = (
            F.silu(causal_conv(part, weight, None, documents, cache, number))
            for number, (part, weight) in enumerate(
                zip(projections, (query_weight, key_weight, value_weight), strict=True)
            )
        )
        q, k = (normalized(part.unflatten(-1, (delta.n_key_heads, -1))) for part in (q, k))
        v = v.unflatten(-1, (delta.n_heads, -1))

        # For a unit key, I - beta k^T k has an eigenvalue of 1 - beta; a beta above 1 makes it
        # negative (arXiv 2411.12537).
        beta = beta.float().sigmoid() * (2 if delta.negative_eigenvalues else 1)
        state = None if cache is None else cache.states[3]
        decay = self.decay(rows, log_rate, decay_bias)
        y, state = recurrence(q * delta.key_dim**-0.5, k, v, decay, beta, documents, state)
        if cache is not None:
            cache.store(3, state)
        return y.to(dtype)

    def decay(self, rows: Tensor, log_rate: Tensor, bias: Tensor) -> Tensor:
        """Return the log decay of each token's state, in fp32: (B, T, H), or (B, T, H, K) for each
        row."""
        # as in Mamba-2: the log decay -exp(log_rate) * softplus(...) is never positive
        steps = F.softplus(rows.float() + bias.float())
        rate = log_rate.float().exp()
        if self.delta.row_decay:
            return -rate[:, None] * steps.unflatten(-1, (self.delta.n_heads, -1))
        return -rate * steps


def normalized(x: Tensor) -> Tensor:
    """Return x (..., K) divided by its norm, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
