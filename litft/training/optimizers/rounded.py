"""Optimizers that step one weight at a time: bf16 weights with stochastic rounding, and weights in
the backward pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from litft.model.placement import local, shard_as

Groups = list[dict[str, Any]]
State = dict[str, Any]

# A large weight is stepped in slices of so many elements, which bounds the temporary memory.
SLICE = 2**24
# temporary bytes per element while a bf16 weight is stepped: weight and gradient in fp32
FP32_BYTES = 8
# and while it is rounded: bits, noise and their sum in int32
ROUNDING_BYTES = 12


class StochasticRounding(Optimizer):
    """An optimizer for bf16 weights: each is stepped in fp32, and rounded up or down stochastically
    (arXiv 2010.06192).

    Rounding to nearest would lose an update smaller than half the distance between two bf16
    numbers. Stochastic rounding is
    unbiased: the mean over many steps is right. The moments are fp32; only one weight at a time has
    an fp32 copy. With sharded parameters, each process steps its local shard, which is correct for
    elementwise optimizers.
    """

    def __init__(
        self, groups: Groups, make: Callable[[Groups], Optimizer], in_slices: bool
    ) -> None:
        """make: returns the optimizer of one weight. in_slices: it steps each element without the
        others, so that only a slice of a large weight has an fp32 copy at a time."""
        super().__init__(groups, {})
        self.in_slices = in_slices
        self.inner: dict[nn.Parameter, Optimizer] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                # the number of dimensions decides how an optimizer steps it, so the empty copy
                # needs them too
                fp32 = nn.Parameter(
                    torch.empty(0, *local(parameter).shape[1:], device=parameter.device)
                )
                self.inner[parameter] = make([{**group, "params": [fp32]}])

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """Step every weight that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_one(parameter, group["lr"])

    def step_one(self, parameter: nn.Parameter, rate: float) -> None:
        """Step one weight, which has a gradient."""
        assert parameter.grad is not None  # the callers have looked
        inner = self.inner[parameter]
        (group,) = inner.param_groups
        group["lr"] = rate
        shard = local(parameter.data)
        gradient = local(parameter.grad)
        if self._slice_size(shard) < shard.numel():
            state = _step_in_slices(inner, shard, gradient)
        else:
            state = _step_whole(inner, shard, gradient)

        # in a checkpoint, the state of a shard must be a shard too
        if isinstance(parameter, DTensor):
            sharded_state = {}
            for kind, value in state.items():
                if isinstance(value, Tensor) and value.shape == shard.shape:
                    sharded_state[kind] = shard_as(parameter, value)
                else:
                    sharded_state[kind] = value
            state = sharded_state
        self.state[parameter] = state

    def bytes_of_step(self, parameter: nn.Parameter) -> int:
        """Return the temporary bytes of the step of a bf16 weight."""
        shard = local(parameter.data)
        rounded = min(shard.numel(), SLICE)
        return FP32_BYTES * self._slice_size(shard) + ROUNDING_BYTES * rounded

    def _slice_size(self, shard: Tensor) -> int:
        """Return how many elements are stepped at a time."""
        if self.in_slices and shard.is_contiguous():
            return min(shard.numel(), SLICE)
        return shard.numel()


def _step_whole(inner: Optimizer, shard: Tensor, gradient: Tensor) -> State:
    """Step a weight, and return the optimizer's state of it."""
    (fp32,) = inner.param_groups[0]["params"]
    fp32.data = shard.float()
    fp32.grad = gradient.float()
    inner.step()
    _store(fp32, shard)

    # the fp32 copies are freed at once, only the state stays
    fp32.data = fp32.data.new_empty(0)
    fp32.grad = None
    return inner.state[fp32]


def _step_in_slices(inner: Optimizer, shard: Tensor, gradient: Tensor) -> State:
    """Do as `_step_whole` with an elementwise optimizer, which sees a slice of the flattened weight
    at a time."""
    (fp32,) = inner.param_groups[0]["params"]
    before = inner.state.pop(fp32, {})
    after: State = {}
    flat_shard = shard.view(-1)
    flat_gradient = gradient.reshape(-1)
    for begin in range(0, shard.numel(), SLICE):
        part = slice(begin, begin + SLICE)
        fp32.data = flat_shard[part].float()
        fp32.grad = flat_gradient[part].float()
        # the first step makes the state
        if before:
            inner.state[fp32] = _state_of_part(before, shard, part)
        inner.step()
        _store(fp32, flat_shard[part])

        # elementwise state is collected in tensors of the weight's shape
        for kind, value in inner.state.pop(fp32).items():
            if not isinstance(value, Tensor) or value.shape != fp32.shape:
                after[kind] = value
            elif before:
                # a view was stepped in place
                after[kind] = before[kind]
            else:
                if kind not in after:
                    after[kind] = value.new_empty(shard.shape)
                after[kind].view(-1)[part] = value

    # the fp32 copies are freed at once, only the state stays
    fp32.data = fp32.data.new_empty(0)
    fp32.grad = None
    inner.state[fp32] = after
    return after


def _state_of_part(state: State, shard: Tensor, part: slice) -> State:
    """Return the state of a slice: views of what has the weight's shape, and copies of counters,
    which every slice advances."""
    of_part: State = {}
    for kind, value in state.items():
        if not isinstance(value, Tensor):
            of_part[kind] = value
        elif value.shape == shard.shape:
            of_part[kind] = value.view(-1)[part]
        else:
            of_part[kind] = value.clone()
    return of_part


def _store(fp32: Tensor, shard: Tensor) -> None:
    """Copy a stepped weight into its shard of the same shape, rounded if that is bf16."""
    if shard.dtype == torch.float32:
        shard.copy_(fp32)
    elif shard.numel() <= SLICE or not shard.is_contiguous():
        shard.copy_(stochastically_rounded(fp32))
    else:
        parts = fp32.detach().view(-1).split(SLICE)
        for target, part in zip(shard.view(-1).split(SLICE), parts, strict=True):
            target.copy_(stochastically_rounded(part))


class OptimizerInBackward(StochasticRounding):
    """Steps each weight in the backward pass once its gradient is complete, then frees the gradient
    (arXiv 2306.09782).

    The gradients of all weights never exist at once. So their norm cannot be clipped, nor NaN
    found, before the first weight is stepped. It steps only within `stepping`.
    """

    def __init__(
        self, groups: Groups, make: Callable[[Groups], Optimizer], in_slices: bool
    ) -> None:
        super().__init__(groups, make, in_slices)
        self.is_stepping = False
        self.is_discarding = False
        self.squared_norms = []
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(
                    partial(self._on_gradient, group)
                )

    def _on_gradient(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        if self.is_discarding:
            # allocated and freed at once, so that the peak has what rounding would take
            if parameter.dtype == torch.bfloat16:
                torch.empty(
                    self.bytes_of_step(parameter),
                    dtype=torch.uint8,
                    device=parameter.device,
                )
            parameter.grad = None
        elif self.is_stepping:
            gradient = parameter.grad
            assert gradient is not None  # autograd calls this once it is complete
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
            self.squared_norms.append(norm.square())
            self.step_one(parameter, group["lr"])
            parameter.grad = None

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Within the context, a backward pass steps the weights."""
        self.is_stepping = True
        self.squared_norms = []
        try:
            yield
        finally:
            self.is_stepping = False

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Within the context, a backward pass allocates the memory of a step, discards gradients
        and changes no weight."""
        self.is_discarding = True
        try:
            yield
        finally:
            self.is_discarding = False

    def norm(self) -> Tensor:
        """Return the L2 norm of the last step's gradients."""
        return torch.stack(self.squared_norms).sum().sqrt()


def stochastically_rounded(fp32: Tensor) -> Tensor:
    """Round fp32 to one of its two bf16 neighbours, with a probability that falls linearly with the
    distance; both in any shape."""
    bits = fp32.detach().view(torch.int32)
    # bf16 drops the lower 16 bits: adding a random number below 2^16 carries into the upper bits
    # with the right probability
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device)
    return ((bits + noise) & ~0xFFFF).view(torch.float32).bfloat16()
