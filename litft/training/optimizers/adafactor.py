"""Adafactor without a number that the host reads from the GPU."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, optim


class Adafactor(optim.Adafactor):
    """torch's Adafactor (arXiv 1804.04235), whose own step waits for the GPU twice for each
    parameter.

    The state, and so a checkpoint, is the same. The update is scaled by tensors instead of numbers.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            parameters: list[Tensor] = []
            gradients: list[Tensor] = []
            row_vars: list[Tensor | None] = []
            col_vars: list[Tensor | None] = []
            variances: list[Tensor | None] = []
            counts: list[Tensor] = []
            self._init_group(
                group, parameters, gradients, row_vars, col_vars, variances, counts
            )
            moments = map(_Moments, row_vars, col_vars, variances)
            for parameter, gradient, moment, count in zip(
                parameters, gradients, moments, counts, strict=True
            ):
                count += 1
                _update(group, parameter, gradient, moment, count.item())


class _Moments(NamedTuple):
    """The second moment of a parameter's gradient: of a matrix two factors, else its variance."""

    row_var: Tensor | None  # (..., R, 1)
    col_var: Tensor | None  # (..., 1, C)
    variance: Tensor | None


def _update(
    group: dict[str, Any],
    parameter: Tensor,
    gradient: Tensor,
    moments: _Moments,
    step: float,
) -> None:
    """Update a parameter. step: from 1."""
    eps1, eps2 = group["eps"]
    if eps1 is None:
        smallest = torch.finfo(parameter.dtype).eps
    else:
        smallest = eps1
    # the weight of the new gradient in the second moment, which falls from step to step
    decay = step ** group["beta2_decay"]
    # the learning rate is an upper bound of the relative step size
    rate = min(group["lr"], step**-0.5)

    # the update is scaled by the parameter's root mean square, which is at least eps2
    root_mean_square = parameter.norm() / parameter.numel() ** 0.5
    size = root_mean_square.clamp(min=eps2)
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    update = _second_moment(gradient, moments, decay, smallest)

    # divided by the root of the second moment
    update = update.clamp_(min=smallest * smallest).rsqrt_().mul_(gradient)
    # clipped to a root mean square of at most d
    largest_norm = update.numel() ** 0.5 * group["d"]
    excess = (update.norm() / largest_norm).clamp(min=1.0)
    parameter.sub_(update.mul_(rate * size / excess))


def _second_moment(
    gradient: Tensor, moments: _Moments, decay: float, smallest: float
) -> Tensor:
    """Return the mean of the squared gradient after its state has taken in `gradient`; for
    matrices, of rank one."""
    if moments.variance is not None:
        return moments.variance.lerp_(gradient * gradient, decay).clone()
    row_var = moments.row_var
    col_var = moments.col_var
    # what has no variance is a matrix, which has both factors
    assert row_var is not None
    assert col_var is not None
    for state, dim in ((row_var, -1), (col_var, -2)):
        norms = torch.linalg.vector_norm(gradient, dim=dim, keepdim=True)
        state.lerp_(norms.square_().div_(gradient.size(dim)), decay)
    return (row_var @ col_var).div_(row_var.mean(dim=-2, keepdim=True).clamp_(min=smallest))
