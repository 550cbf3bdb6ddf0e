"""Mamba-2 (arXiv 2405.21060): a linear recurrence whose keys, queries and step sizes depend on the
input."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litft.model.config import Config, Mamba2Config
from litft.model.kv_cache import LayerCache
from litft.model.linear import Linear
from litft.model.mixers.mixer import CausalConv, GatedNorm, Mixer, causal_conv
from litft.model.mixers.recurrence import CHUNK_TOKENS, recurrence
from litft.model.norm import scaled
from litft.model.packed_sequences import PackedSequences

# B batch, T tokens, C channels, H heads, D head dim, G groups, S state dim


class Mamba2(Mixer):
    """The state space model of Mamba-2, with a convolution before it and a gated norm after it."""

    conv_scales: Tensor

    def __init__(self, config: Config, mamba: Mamba2Config) -> None:
        super().__init__()
        self.mamba = mamba
        width = mamba.n_heads * mamba.head_dim
        state_width = mamba.n_groups * mamba.state_dim
        self.widths = (width, state_width, state_width)

        self.gate_proj = Linear(config.dim, width, bias=mamba.bias)
        # values, keys and queries
        self.conv_proj = Linear(config.dim, sum(self.widths), bias=mamba.bias)
        self.step_proj = Linear(config.dim, mamba.n_heads, bias=mamba.bias)
        self.out_proj = Linear(width, config.dim, bias=mamba.out_bias)
        self.conv = CausalConv(sum(self.widths), mamba.conv_width, mamba.conv_bias)

        # one number a head: A_log, dt_bias and D in the paper's code
        self.log_rate = nn.Parameter(torch.zeros(mamba.n_heads))
        self.step_bias = nn.Parameter(torch.zeros(mamba.n_heads))
        self.skip = nn.Parameter(torch.ones(mamba.n_heads))
        if mamba.norm:
            self.norm = GatedNorm(
                width, mamba.norm_eps, "silu", mamba.gate_first, mamba.n_groups
            )
        else:
            self.norm = None
        # on the CPU also when the network is built on meta: no file has these values
        if mamba.scales:
            parts = []
            for size, scale in zip(self.widths, mamba.scales[1:4], strict=True):
                parts.append(torch.full((size,), scale, device="cpu"))
            self.register_buffer("conv_scales", torch.cat(parts), persistent=False)
        self.flops_per_token = (
            2
            * mamba.n_heads
            * (CHUNK_TOKENS + 2 * mamba.state_dim)
            * (mamba.state_dim + mamba.head_dim)
        )

    def forward(
        self, x: Tensor, documents: PackedSequences | None, cache: LayerCache | None
    ) -> Tensor:
        """Return the mixed x (B, T, C), in the same shape; see Mixer."""
        mamba = self.mamba
        gate, conv, step = self.projections(scaled(x, mamba.input_scale))
        parameters = (
            self.conv.weight,
            self.conv.bias,
            self.log_rate,
            self.step_bias,
            self.skip,
        )
        y = self.recompute_mix(documents, cache, conv, step, *parameters)
        if self.norm is None:
            y = y * F.silu(gate)
        else:
            y = self.norm(y, gate)
        return scaled(self.out_proj(y), mamba.output_scale)

    def mix(
        self,
        documents: PackedSequences | None,
        cache: LayerCache | None,
        conv: Tensor,
        step: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        log_rate: Tensor,
        step_bias: Tensor,
        skip: Tensor,
    ) -> Tensor:
        """Return the recurrence over convolved values, keys and queries, and what skips it: (B, T,
        H D).

        conv: the input of the convolution (B, T, D H + 2 G S); step: (B, T, H). The others are
        parameters.
        """
        mamba = self.mamba
        convolved = F.silu(causal_conv(conv, weight, bias, documents, cache))
        v, k, q = convolved.split(self.widths, dim=-1)
        v = v.unflatten(-1, (mamba.n_heads, -1)).float()  # (B, T, H, D)
        k = k.unflatten(-1, (mamba.n_groups, -1))
        q = q.unflatten(-1, (mamba.n_groups, -1))

        # dt of the paper: it scales what a token writes, and the rate -exp(A_log) of the decay
        step = F.softplus(step.float() + step_bias.float())  # (B, T, H)
        step = step.clamp(*mamba.step_limits)
        state = None if cache is None else cache.states[1]
        decay = -log_rate.float().exp() * step
        y, state = recurrence(q, k, v * step[..., None], decay, None, documents, state)
        if cache is not None:
            assert state is not None  # there are no documents with a cache
            cache.store(1, state)
        y = y + skip.float()[:, None] * v
        return y.flatten(2).to(conv.dtype)

    def projections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gate (B, T, H D), the input of the convolution (B, T, H D + 2 G S) and the
        step sizes (B, T, H) of x (B, T, C).

        They are scaled as in Falcon-H1's muP.
        """
        scales = self.mamba.scales
        gate = self.gate_proj(x)
        conv = self.conv_proj(x)
        step = self.step_proj(x)
        if not scales:
            return gate, conv, step
        return gate * scales[0], conv * self.conv_scales.to(conv.dtype), step * scales[4]
