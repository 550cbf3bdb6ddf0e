"""The Linear layer of the network."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """nn.Linear whose weight can be packed into oneDNN's layout on a CPU, which is 1.3 to 2.5 times
    as fast.

    A packed weight has the same shape and values (`to_dense()` returns them), and no gradient.
    """

    # the output is x W^T + b: the loss may use the weight and bias of a head directly
    is_plain = True
    # whether something reads the weight besides `forward`
    reads_weight = False

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b, (..., out), for x (..., in)."""
        if self.weight.is_mkldnn:
            return torch.ops.mkldnn._linear_pointwise(
                x, self.weight, self.bias, "none", [], ""
            )
        return F.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Pack a frozen weight, if the CPU kernels support its dtype."""
        if can_pack(self.weight):
            packed = torch.ops.mkldnn._reorder_linear_weight(
                self.weight.detach().contiguous(), None
            )
            self.weight = nn.Parameter(packed, requires_grad=False)


class LowRankUpdate:
    """What a method mixes over a Linear whose update begins with a product of few rows.

    Linears that read the same input compute these products as one.
    """

    @property
    def shares_input(self) -> bool:
        """Whether that product may be computed together with others."""
        raise NotImplementedError

    def input_factor(self, dtype: torch.dtype) -> Tensor:
        """Return the rows (R, in) of that product in `dtype`."""
        raise NotImplementedError

    def forward_projected(self, x: Tensor, projected: Tensor) -> Tensor:
        """Return what `forward` returns for x (..., in), given its product with the rows
        (..., R)."""
        raise NotImplementedError


def apply_linears(x: Tensor, *linears: nn.Module) -> list[Tensor]:
    """Return the output of each Linear, (..., out), for one x (..., in)."""
    sharing = []
    for linear in linears:
        if isinstance(linear, LowRankUpdate) and linear.shares_input:
            sharing.append(linear)
    if len(sharing) < 2:
        return [linear(x) for linear in linears]

    # one product reads x once
    factors = [linear.input_factor(x.dtype) for linear in sharing]
    widths = [factor.size(0) for factor in factors]
    parts = iter(F.linear(x, torch.cat(factors)).split_with_sizes(widths, -1))
    outputs = []
    for linear in linears:
        if isinstance(linear, LowRankUpdate) and linear.shares_input:
            outputs.append(linear.forward_projected(x, next(parts)))
        else:
            outputs.append(linear(x))
    return outputs


def can_pack(weight: Tensor) -> bool:
    """Return whether oneDNN is available and has kernels for this weight (out, in)."""
    supported = (
        torch.backends.mkldnn.is_available() and weight.is_cpu and not weight.requires_grad
    )
    # not every CPU has kernels for bf16
    if weight.dtype == torch.bfloat16:
        return supported and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return supported and weight.dtype == torch.float32
