"""Gated DeltaNet (arXiv 2412.06464) and Kimi Delta Attention (arXiv 2510.26692)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litft.model.config import Config, DeltaNetConfig
from litft.model.kv_cache import LayerCache
from litft.model.linear import Linear
from litft.model.mixers.mixer import CausalConv, GatedNorm, Mixer, causal_conv
from litft.model.mixers.recurrence import CHUNK_TOKENS, recurrence
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
        self.query_conv = CausalConv(key_width, delta.conv_width, bias=False)
        self.key_conv = CausalConv(key_width, delta.conv_width, bias=False)
        self.value_conv = CausalConv(value_width, delta.conv_width, bias=False)

        if delta.row_decay:
            # Kimi Delta Attention: decay and output gate are low-rank projections of the input
            decay_width = delta.n_heads * delta.key_dim
            self.decay_a_proj = Linear(config.dim, delta.value_dim, bias=False)
            self.gate_a_proj = Linear(config.dim, delta.value_dim, bias=False)
            self.decay_proj = Linear(delta.value_dim, decay_width, bias=False)
            self.gate_proj = Linear(delta.value_dim, value_width, bias=False)
        else:
            decay_width = delta.n_heads
            self.decay_proj = Linear(config.dim, decay_width, bias=False)
            self.gate_proj = Linear(config.dim, value_width, bias=False)

        self.log_rate = nn.Parameter(torch.zeros(delta.n_heads))
        self.decay_bias = nn.Parameter(torch.zeros(decay_width))
        gate = "sigmoid" if delta.row_decay else "silu"
        self.norm = GatedNorm(delta.value_dim, delta.norm_eps, gate, gate_first=False)
        self.flops_per_token = (
            2
            * delta.n_heads
            * (2 * CHUNK_TOKENS + 2 * delta.key_dim)
            * (delta.key_dim + delta.value_dim)
        )

    def forward(
        self, x: Tensor, documents: PackedSequences | None, cache: LayerCache | None
    ) -> Tensor:
        """Return the mixed x (B, T, C), in the same shape; see Mixer."""
        y = self.recompute_mix(documents, cache, *self.mix_inputs(x))
        if self.delta.row_decay:
            gate = self.gate_proj(self.gate_a_proj(x))
        else:
            gate = self.gate_proj(x)
        y = self.norm(y, gate.unflatten(-1, (self.delta.n_heads, -1)))
        return self.out_proj(y.flatten(2))

    def mix_inputs(self, x: Tensor) -> list[Tensor]:
        """Return the tensors that `mix` reads of x (B, T, C), in the order in which it unpacks
        them.

        They are queries and keys (B, T, G K), values (B, T, H V), write strengths (B, T, H), and
        decays (B, T, H) or, for each row of the state, (B, T, H K). The parameters follow: the
        weights of the three convolutions, (G K, width) twice and (H V, width), the rate (H,), and
        the bias (H,) or (H K,) of the decays.
        """
        projections = (self.query_proj, self.key_proj, self.value_proj, self.beta_proj)
        inputs = [proj(x) for proj in projections]
        if self.delta.row_decay:
            inputs.append(self.decay_proj(self.decay_a_proj(x)))
        else:
            inputs.append(self.decay_proj(x))
        inputs += (self.query_conv.weight, self.key_conv.weight, self.value_conv.weight)
        inputs += (self.log_rate, self.decay_bias)
        return inputs

    def mix(
        self, documents: PackedSequences | None, cache: LayerCache | None, *inputs: Tensor
    ) -> Tensor:
        """Return the gated delta rule over convolved queries, keys and values: (B, T, H, V)."""
        delta = self.delta
        dtype = inputs[0].dtype
        beta, rows, *weights, log_rate, decay_bias = inputs[3:]
        q, k, v = _convolved(inputs[:3], weights, documents, cache)
        q, k = (normalized(part.unflatten(-1, (delta.n_key_heads, -1))) for part in (q, k))
        v = v.unflatten(-1, (delta.n_heads, -1))

        # For a unit key, I - beta k^T k has an eigenvalue of 1 - beta; a beta above 1 makes it
        # negative (arXiv 2411.12537).
        highest = 2 if delta.negative_eigenvalues else 1
        beta = beta.float().sigmoid() * highest
        # state 3 of the cache; the others belong to the convolutions
        state = None if cache is None else cache.states[3]
        decay = self.decay(rows, log_rate, decay_bias)
        y, state = recurrence(q * delta.key_dim**-0.5, k, v, decay, beta, documents, state)
        if cache is not None:
            assert state is not None  # there are no documents with a cache
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


def _convolved(
    projections: Sequence[Tensor],
    weights: Sequence[Tensor],
    documents: PackedSequences | None,
    cache: LayerCache | None,
) -> list[Tensor]:
    """Return the convolved queries, keys and values; states 0, 1 and 2 of the cache are the inputs
    of the three convolutions."""
    convolved = []
    for number, (part, weight) in enumerate(zip(projections, weights, strict=True)):
        y = causal_conv(part, weight, None, documents, cache, number)
        convolved.append(F.silu(y))
    return convolved


def normalized(x: Tensor) -> Tensor:
    """Return x (..., K) divided by its norm over the last dimension, in fp32 and the same shape."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
