"""Optimizers by name, from torch, bitsandbytes and schedulefree, with a learning rate per kind of
parameter.

Added here: the choice of parameters that decay.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Muon, Optimizer

from litft.args import TrainArgs
from litft.methods import Method
from litft.model.quantization import bitsandbytes
from litft.training.optimizers.adafactor import Adafactor
from litft.training.optimizers.rounded import (
    Groups,
    OptimizerInBackward,
    StochasticRounding,
)

BETAS = (0.9, 0.95)
# no weight decay; matched by name, since biases of stacked experts and norms of single heads are
# two-dimensional
VECTORS = ("bias", "adapter_scale", "lora_m", "norm.weight")
# matrices with one independent row per token, or per channel
INDEPENDENT_ROWS = ("embed", "lm_head", "token_rows", "adaption_prompt", "conv.weight")


class OptimizerSpec(NamedTuple):
    """How to build an optimizer from parameter groups, and the bytes of its state for a parameter
    of a given name."""

    make: Callable[[Groups], Optimizer]
    state_bytes: Callable[[str, Tensor], float]


def make_optimizer(
    args: TrainArgs, method: Method, parameters: dict[str, nn.Parameter]
) -> Optimizer:
    """Return the optimizer of the flags over the trained parameters.

    Matrices decay, vectors do not. A group's `factor` multiplies the learning rate. Weight decay is
    decoupled from the gradient (arXiv 1711.05101) in all optimizers. Raises ValueError if the
    optimizer's package is missing, or if it does not work with sharded or bf16 weights.
    """
    # parameters with the same rate, decay and kind share a group
    groups: dict[tuple, list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        if parameter.dim() > 1 and not name.endswith(VECTORS):
            decay = args.weight_decay
        else:
            decay = 0.0
        groups.setdefault(
            (method.lr_multiplier(name), decay, is_hidden(name, parameter)), []
        ).append(parameter)

    # without the flags, each optimizer keeps its own defaults
    moments: dict[str, Any] = {}
    if args.betas:
        moments["betas"] = tuple(args.betas)
    if args.eps is not None:
        moments["eps"] = args.eps
    group_list = []
    for (factor, decay, hidden), members in groups.items():
        group_list.append(
            {
                "params": members,
                "lr": args.learning_rate or 0.0,
                "factor": factor,
                "weight_decay": decay,
                "hidden": hidden,
                **moments,
            }
        )

    # combinations that would train wrongly, or not at all
    make = OPTIMIZERS[args.optimizer].make
    has_bf16 = any(parameter.dtype == torch.bfloat16 for parameter in parameters.values())
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters.values())
    if has_bf16 and sharded and args.optimizer == "muon":
        raise ValueError(
            "--train.optimizer muon needs complete matrices, but bf16-true steps each shard "
            "separately; use --precision bf16"
        )
    if has_bf16 and args.optimizer == "schedule_free":
        raise ValueError(
            "--train.optimizer schedule_free needs fp32 weights to average; use --precision bf16 "
            "or fp32"
        )

    # one weight at a time: bf16 weights in fp32, sharded ones as plain local tensors
    in_slices = args.optimizer in ELEMENTWISE
    if args.optimizer_in_backward:
        return OptimizerInBackward(group_list, make, in_slices)
    if has_bf16 or (sharded and args.optimizer in ELEMENTWISE_WITHOUT_DTENSOR):
        return StochasticRounding(group_list, make, in_slices)
    return make(group_list)


def state_bytes(name: str, parameters: Mapping[str, Tensor]) -> int:
    """Return the bytes of an optimizer's state for these parameters."""
    return round(
        sum(
            OPTIMIZERS[name].state_bytes(key, parameter)
            for key, parameter in parameters.items()
        )
    )


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of the next step; each group's `factor` multiplies it."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["factor"]


def is_hidden(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter is a matrix that multiplies activations, as Muon requires (arXiv
    2502.16982)."""
    return (
        parameter.dim() == 2
        and not name.endswith(VECTORS)
        and not any(part in name for part in INDEPENDENT_ROWS)
    )


@runtime_checkable
class AveragingOptimizer(Protocol):
    """An optimizer with two kinds of weights, between which it changes: schedule-free."""

    eval: Callable[[], None]  # computes the weights to evaluate and save
    train: Callable[[], None]  # computes those of training back


@contextmanager
def averaged_weights(optimizer: Optimizer) -> Iterator[None]:
    """Within the context, the weights are those to evaluate and save; afterwards those of training
    again, bit for bit.

    Only schedule-free has two kinds: it evaluates an average (arXiv 2405.15682). Within the context
    its training weights are in the optimizer's state as `stepped`, so that a checkpoint has both.
    """
    if not isinstance(optimizer, AveragingOptimizer):
        yield
        return
    weights = []
    for group in optimizer.param_groups:
        weights.extend(group["params"])
    for weight in weights:
        optimizer.state[weight]["stepped"] = weight.detach().clone()
    optimizer.eval()
    try:
        yield
    finally:
        # `train` computes the training weights back, with rounding errors; the copies are exact
        optimizer.train()
        for weight in weights:
            weight.detach().copy_(optimizer.state[weight].pop("stepped"))


class ChainedOptimizer(Optimizer):
    """Several optimizers over disjoint parameters, as one."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        # the same group objects: a learning rate that is set here is set in the optimizers too
        groups = []
        for optimizer in optimizers:
            groups.extend(optimizer.param_groups)
        super().__init__(groups, {})
        self.optimizers = optimizers

    def step(self, closure: Callable | None = None) -> None:
        """Step every optimizer."""
        assert closure is None
        for optimizer in self.optimizers:
            optimizer.step()
            # checkpoints read the state from here
            self.state.update(optimizer.state)


def _bitsandbytes(name: str, **settings: Any) -> Callable[[Groups], Optimizer]:
    """Return a factory of one of bitsandbytes' optimizers; the package is imported when the
    optimizer is made."""
    return lambda groups: getattr(bitsandbytes("this --train.optimizer needs").optim, name)(
        groups, **settings
    )


def _muon(groups: Groups) -> Optimizer:
    """Return Muon over hidden matrices, with updates scaled to AdamW's (arXiv 2502.16982), and
    AdamW over the rest."""
    # Muon takes only matrices that multiply activations
    hidden = [group for group in groups if group["hidden"]]
    rest = [group for group in groups if not group["hidden"]]
    optimizers: list[Optimizer] = []
    if hidden:
        optimizers.append(Muon(hidden, adjust_lr_fn="match_rms_adamw"))
    if rest:
        optimizers.append(_adamw(rest))
    if len(optimizers) == 1:
        return optimizers[0]
    return ChainedOptimizer(optimizers)


def _sgd(groups: Groups) -> Optimizer:
    """Return SGD with momentum and decoupled weight decay: torch's own decay would pass through the
    momentum."""
    undecayed = [
        {**group, "weight_decay": 0.0, "decay": group["weight_decay"]} for group in groups
    ]
    optimizer = SGD(undecayed, momentum=0.9, fused=True)
    optimizer.register_step_pre_hook(_decay)
    return optimizer


@torch.no_grad()
def _decay(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        if group["decay"]:
            factor = 1 - group["lr"] * group["decay"]
            # the stubs do not export what torch's own optimizers call
            torch._foreach_mul_(group["params"], factor)  # pyright: ignore[reportPrivateImportUsage]


def _schedule_free(groups: Groups) -> Optimizer:
    """Return AdamW that needs no learning rate decay (arXiv 2405.15682)."""
    try:
        package = import_module("schedulefree")
    except ImportError:
        raise ValueError(
            "--train.optimizer schedule_free needs the package schedulefree; pip install "
            "'litft[schedulefree]'"
        ) from None
    optimizer = package.AdamWScheduleFree(groups, betas=BETAS)
    # its `step` refuses to run in evaluation mode
    optimizer.train()
    return optimizer


def _bytes_per_element(size: float) -> Callable[[str, Tensor], float]:
    """Return a function that counts `size` bytes for each element."""
    return lambda name, parameter: size * parameter.numel()


def _bytes_in_8_bits(name: str, parameter: Tensor) -> float:
    """Return the bytes of two 8-bit moments with a scale per block of 256; bitsandbytes keeps small
    ones in fp32."""
    if parameter.numel() < 4096:
        return parameter.numel() * 8
    return parameter.numel() * (2 + 8 / 256)


def _bytes_in_factors(name: str, parameter: Tensor) -> float:
    """Return the bytes of Adafactor's row and column factors of each matrix (arXiv 1804.04235)."""
    if parameter.dim() < 2:
        return 4 * parameter.numel()
    return 4 * math.prod(parameter.shape[:-2]) * (parameter.size(-1) + parameter.size(-2))


def _bytes_of_muon(name: str, parameter: Tensor) -> float:
    """Return the bytes of Muon's moment of a hidden matrix, or of AdamW's two of another weight."""
    if is_hidden(name, parameter):
        return parameter.numel() * 4
    return parameter.numel() * 8


_adamw = partial(AdamW, betas=BETAS, fused=True)

BITSANDBYTES_OPTIMIZERS = ("adamw_8bit", "paged_adamw", "paged_adamw_8bit", "lion")
# each element is stepped without the others, and the state is plain memory (not paged)
ELEMENTWISE = ("adamw", "lion", "sgd")
# their kernels do not take DTensors
ELEMENTWISE_WITHOUT_DTENSOR = (
    "lion",
    "paged_adamw",
    "sgd",
)
OPTIMIZERS = {
    "adamw": OptimizerSpec(_adamw, _bytes_per_element(8)),
    "adamw_8bit": OptimizerSpec(_bitsandbytes("AdamW8bit", betas=BETAS), _bytes_in_8_bits),
    "paged_adamw": OptimizerSpec(
        _bitsandbytes("PagedAdamW32bit", betas=BETAS), _bytes_per_element(8)
    ),
    "paged_adamw_8bit": OptimizerSpec(
        _bitsandbytes("PagedAdamW8bit", betas=BETAS), _bytes_in_8_bits
    ),
    "lion": OptimizerSpec(_bitsandbytes("Lion32bit"), _bytes_per_element(4)),
    "adafactor": OptimizerSpec(Adafactor, _bytes_in_factors),
    "muon": OptimizerSpec(_muon, _bytes_of_muon),
    "sgd": OptimizerSpec(_sgd, _bytes_per_element(4)),
    "schedule_free": OptimizerSpec(_schedule_free, _bytes_per_element(8)),
}
