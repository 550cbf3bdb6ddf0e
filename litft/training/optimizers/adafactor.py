"""Adafactor without a number that the host reads from the GPU."""

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
            # row and column factors of matrices, variances of vectors, and step counts
            parameters, gradients, *state = [], [], [], [], [], []
            self._init_group(group, parameters, gradients, *state)
            eps1, eps2 = group["eps"]
            for parameter, gradient, row_var, col_var, variance, count in zip(
                parameters, gradients, *state, strict=True
            ):
                count += 1
                step = count.item()  # on the host

                # the weight of the new gradient in the second moment, which falls from step to step
                decay = step ** group["beta2_decay"]
                # the learning rate is an upper bound of the relative step size
                rate = min(group["lr"], step**-0.5)
                smallest = torch.finfo(parameter.dtype).eps if eps1 is None else eps1

                # the update is scaled by the parameter's root mean square, which is at least eps2
                size = (parameter.norm() / parameter.numel() ** 0.5).clamp(min=eps2)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                update = _second_moment(gradient, row_var, col_var, variance, decay, smallest)

                # divided by the root of the second moment, and
                # clipped to a root mean square of at most d
                update = update.clamp_(min=smallest * smallest).rsqrt_().mul_(gradient)
                excess = (update.norm() / (update.numel() ** 0.5 * group["d"])).clamp(min=1.0)
                parameter.sub_(update.mul_(rate * size / excess))


def _second_moment(
    gradient: Tensor,
    row_var: Tensor | None,
    col_var: Tensor | None,
    variance: Tensor | None,
    decay: float,
    smallest: float,
) -> Tensor:
    """Return the mean of the squared gradient after its state has taken in `gradient`; for
    matrices, of rank one."""
    if variance is not None:
        return variance.lerp_(gradient * gradient, decay).clone()
    # (..., R, 1) and (..., 1, C)
    for state, dim in ((row_var, -1), (col_var, -2)):
        norms = torch.linalg.vector_norm(gradient, dim=dim, keepdim=True)
        state.lerp_(norms.square_().div_(gradient.size(dim)), decay)
    return (row_var @ col_var).div_(row_var.mean(dim=-2, keepdim=True).clamp_(min=smallest))
