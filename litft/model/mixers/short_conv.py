"""The gated short convolution of LFM2 (arXiv 2511.23404)."""

from torch import Tensor

from litft.model.config import Config, ShortConvConfig
from litft.model.kv_cache import LayerCache
from litft.model.linear import Linear
from litft.model.mixers.mixer import CausalConv, Mixer, causal_conv
from litft.model.packed_sequences import PackedSequences

# B batch, T tokens, C channels


class ShortConv(Mixer):
    """y = out(c * conv(b * x)), where b, c and x are projections of the input."""

    def __init__(self, config: Config, conv: ShortConvConfig) -> None:
        super().__init__()
        self.in_proj = Linear(config.dim, 3 * config.dim, bias=conv.bias)
        self.conv = CausalConv(config.dim, conv.width, conv.bias)
        self.out_proj = Linear(config.dim, config.dim, bias=conv.bias)
        self.flops_per_token = 2.0 * config.dim * conv.width

    def forward(
        self, x: Tensor, documents: PackedSequences | None, cache: LayerCache | None
    ) -> Tensor:
        """Return the mixed x (B, T, C), in the same shape; see Mixer."""
        return self.out_proj(
            self.recompute_mix(
                documents, cache, self.in_proj(x), self.conv.weight, self.conv.bias
            )
        )

    def mix(
        self,
        documents: PackedSequences | None,
        cache: LayerCache | None,
        projected: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """Return the gated convolution (B, T, C) of `projected` (B, T, 3 C), with the convolution's
        weight (C, width) and bias (C,)."""
        # b, c and x of the class's docstring, (B, T, C) each
        before, after, x = projected.chunk(3, dim=-1)
        return after * causal_conv(before * x, weight, bias, documents, cache)
