"""The optimizers by name: torch's, bitsandbytes' and schedulefree's own, with a rate for each parameter's kind.

What is ours: which parameters decay, and rounding that loses no update of bf16 weights.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from litft.args import TrainArgs
from litft.methods import Method
from litft.model.placement import like, local
from litft.model.quantization import bitsandbytes

BETAS = (0.9, 0.95)
# of stacked experts, and of norms with a weight for each head, they have two dimensions, and are vectors all the same
VECTORS = ("bias", "adapter_scale", "lora_m", "norm.weight")
LOOKED_UP = ("embed", "lm_head", "token_rows", "adaption_prompt")  # matrices whose rows stand for themselves

Groups = list[dict[str, Any]]


class Choice(NamedTuple):
    """An optimizer: how it is made of groups, and the bytes it keeps of a trained parameter."""

    make: Callable[[Groups], Optimizer]
    state: Callable[[str, Tensor], float]


def make_optimizer(args: TrainArgs, method: Method, parameters: dict[str, nn.Parameter]) -> Optimizer:
    """The optimizer asked for, over what is trained: matrices decay, vectors do not; `factor` multiplies the rate.

    Decay is decoupled from the gradient (arXiv 1711.05101) in all of them. ValueError where its package is missing.
    """
    groups: dict[tuple, list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        decay = args.weight_decay if parameter.dim() > 1 and not name.endswith(VECTORS) else 0.0
        groups.setdefault((method.lr_multiplier(name), decay, is_hidden(name, parameter)), []).append(parameter)
    listed = [
        {"params": chosen, "lr": args.learning_rate, "factor": factor, "weight_decay": decay, "hidden": hidden}
        for (factor, decay, hidden), chosen in groups.items()
    ]
    make = OPTIMIZERS[args.optimizer].make
    speculative_rounds = any(parameter.dtype == torch.bfloat16 for parameter in parameters.values())
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters.values())
    if speculative_rounds and sharded and args.optimizer == "muon":
        raise ValueError("--train.optimizer muon needs whole matrices, and bf16-true steps parts; use --precision bf16")
    if speculative_rounds and args.optimizer == "schedule_free":
        raise ValueError("--train.optimizer schedule_free needs fp32 weights to average; use --precision bf16 or fp32")
    if args.optimizer_in_backward:
        return InBackward(listed, make)
    return (
        StochasticRounding(listed, make) if speculative_rounds or (sharded and args.optimizer in BY_PART) else make(listed)
    )


def state_bytes(name: str, parameters: dict[str, Tensor]) -> int:
    """What an optimizer keeps of these parameters."""
    return round(sum(OPTIMIZERS[name].state(key, parameter) for key, parameter in parameters.items()))


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["factor"]


def is_hidden(name: str, parameter: Tensor) -> bool:
    """Whether it is a matrix that multiplies activations: what Muon is for (arXiv 2502.16982)."""
    return parameter.dim() == 2 and not name.endswith(VECTORS) and not any(part in name for part in LOOKED_UP)


@contextmanager
def averaged(optimizer: Optimizer) -> Iterator[None]:
    """Inside, the weights are those to evaluate and to keep; afterwards, to the bit, those that the next step begins from.

    They differ with schedule-free alone, whose weights to keep are an average (arXiv 2405.15682). The others are in its
    state as `stepped` meanwhile, so that a checkpoint holds both.
    """
    if not hasattr(optimizer, "eval"):
        yield
        return
    weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for weight in weights:
        optimizer.state[weight]["stepped"] = weight.detach().clone()
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        for weight in weights:
            weight.detach().copy_(optimizer.state[weight].pop("stepped"))


class ChainedOptimizer(Optimizer):
    """Several optimizers, each with parameters of its own, as one."""

    def __init__(self, parts: list[Optimizer]) -> None:
        # the very groups of the parts: a rate that is set in one is set in the other
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts

    def step(self, closure: Callable | None = None) -> None:
        """One step of each."""
        assert closure is None
        for part in self.parts:
            part.step()
            self.state.update(part.state)


# bytes that stepping a bf16 weight takes for each of its numbers: the weight and its gradient in fp32, and in int32 what is
# drawn, what it is added to, and their sum
ROUNDING = 20


class StochasticRounding(Optimizer):
    """An optimizer on bf16 weights: each is made fp32, stepped in fp32, and rounded up or down by chance (arXiv 2010.06192).

    Of what is sharded each process steps its part, which is right for an optimizer that looks at every number by itself.

    An update smaller than half of the distance between two bf16 numbers would be lost by rounding to the nearest; by chance
    it is made in proportion, so that the mean over many steps is right. The moments are fp32; one weight at a time is.
    """

    def __init__(self, groups: Groups, make: Callable[[Groups], Optimizer]) -> None:
        super().__init__(groups, {})
        self.inner: dict[nn.Parameter, Optimizer] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                # its shape decides how it is stepped, so it has one from the beginning
                wide = nn.Parameter(torch.empty(0, *local(parameter).shape[1:], device=parameter.device))
                self.inner[parameter] = make([{**group, "params": [wide]}])

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """One step over every weight with a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_one(parameter, group["lr"])

    def step_one(self, parameter: nn.Parameter, rate: float) -> None:
        """One step of one weight."""
        inner = self.inner[parameter]
        (own,) = inner.param_groups
        (wide,) = own["params"]
        own["lr"] = rate
        mine = local(parameter.data)
        wide.data, wide.grad = mine.float(), local(parameter.grad).float()
        inner.step()
        mine.copy_(wide if parameter.dtype == torch.float32 else stochastically_rounded(wide))
        kept, shape = inner.state[wide], wide.shape
        wide.data, wide.grad = wide.data.new_empty(0), None
        if isinstance(parameter, DTensor):  # a checkpoint has to know that these are parts
            kept = {k: like(parameter, v) if isinstance(v, Tensor) and v.shape == shape else v for k, v in kept.items()}
        self.state[parameter] = kept


class InBackward(StochasticRounding):
    """Each weight is stepped as soon as its gradient is there, which is then forgotten (LOMO, arXiv 2306.09782).

    So gradients of all weights never exist together; nothing can be known of them before the first weight is stepped, no
    norm to clip and no NaN. It steps only within `stepping`.
    """

    def __init__(self, groups: Groups, make: Callable[[Groups], Optimizer]) -> None:
        super().__init__(groups, make)
        self.steps, self.forgets, self.squares = False, False, []
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, group))

    def _arrived(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        if self.forgets:
            if parameter.dtype == torch.bfloat16:
                torch.empty(ROUNDING * parameter.numel(), dtype=torch.uint8, device=parameter.device)
            parameter.grad = None
        elif self.steps:
            self.squares.append(parameter.grad.float().square().sum())
            self.step_one(parameter, group["lr"])
            parameter.grad = None

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Inside, a backward pass is a step."""
        self.steps, self.squares = True, []
        try:
            yield
        finally:
            self.steps = False

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Inside, a backward pass takes the memory of a step, and changes nothing."""
        self.forgets = True
        try:
            yield
        finally:
            self.forgets = False

    def norm(self) -> Tensor:
        """Of the gradients of the last step."""
        return torch.stack(self.squares).sum().sqrt()


def stochastically_rounded(wide: Tensor) -> Tensor:
    """fp32 to bf16: to one of the two neighbours, each as likely as the value is near to it."""
    bits = wide.detach().view(torch.int32)
    # the lower 16 bits are what bf16 lacks: a random number below 2^16 carries into the upper ones as often as they say
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device)
    return ((bits + noise) & ~0xFFFF).view(torch.float32).bfloat16()


def _bitsandbytes(name: str, **settings: Any) -> Callable[[Groups], Optimizer]:
    """One of the package's, imported when it is made."""
    return lambda groups: getattr(bitsandbytes("this --train.optimizer needs").optim, name)(groups, **settings)


def _muon(groups: Groups) -> Optimizer:
    """Muon over hidden matrices, with steps as large as AdamW's (arXiv 2502.16982), and AdamW over the rest."""
    hidden, rest = ([group for group in groups if group["hidden"] is kind] for kind in (True, False))
    parts = [Muon(hidden, adjust_lr_fn="match_rms_adamw")] if hidden else []
    parts += [_adamw(rest)] if rest else []
    return parts[0] if len(parts) == 1 else ChainedOptimizer(parts)


def _sgd(groups: Groups) -> Optimizer:
    """With momentum; torch's own decay would go through it, so it is made before the step."""
    listed = [{**group, "weight_decay": 0.0, "decay": group["weight_decay"]} for group in groups]
    optimizer = SGD(listed, momentum=0.9, fused=True)
    optimizer.register_step_pre_hook(_decay)
    return optimizer


@torch.no_grad()
def _decay(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        if group["decay"]:
            torch._foreach_mul_(group["params"], 1 - group["lr"] * group["decay"])


def _schedule_free(groups: Groups) -> Optimizer:
    """AdamW whose rate needs no fall (arXiv 2405.15682)."""
    try:
        package = import_module("schedulefree")
    except ImportError:
        raise ValueError("--train.optimizer schedule_free needs its package; pip install 'litft[schedulefree]'") from None
    optimizer = package.AdamWScheduleFree(groups, betas=BETAS)
    optimizer.train()
    return optimizer


def _each(size: float) -> Callable[[str, Tensor], float]:
    """So many bytes for each number."""
    return lambda name, parameter: size * parameter.numel()


def _in_8_bits(name: str, parameter: Tensor) -> float:
    """Two moments of a byte and the scales of blocks of 256; bitsandbytes keeps fp32 of what is small."""
    return parameter.numel() * (2 + 8 / 256 if parameter.numel() >= 4096 else 8)


def _in_factors(name: str, parameter: Tensor) -> float:
    """Adafactor's (arXiv 1804.04235) rows and columns of each matrix."""
    if parameter.dim() < 2:
        return 4 * parameter.numel()
    return 4 * math.prod(parameter.shape[:-2]) * (parameter.size(-1) + parameter.size(-2))


_adamw = partial(AdamW, betas=BETAS, fused=True)

BY_KERNELS = ("adamw_8bit", "paged_adamw", "paged_adamw_8bit", "lion")  # of bitsandbytes
BY_PART = ("lion", "paged_adamw", "sgd")  # whose kernels know no DTensors, and look at every number by itself
OPTIMIZERS = {
    "adamw": Choice(_adamw, _each(8)),
    "adamw_8bit": Choice(_bitsandbytes("AdamW8bit", betas=BETAS), _in_8_bits),
    "paged_adamw": Choice(_bitsandbytes("PagedAdamW32bit", betas=BETAS), _each(8)),
    "paged_adamw_8bit": Choice(_bitsandbytes("PagedAdamW8bit", betas=BETAS), _in_8_bits),
    "lion": Choice(_bitsandbytes("Lion32bit"), _each(4)),
    "adafactor": Choice(partial(Adafactor, foreach=False), _in_factors),
    "muon": Choice(_muon, lambda name, parameter: parameter.numel() * (4 if is_hidden(name, parameter) else 8)),
    "sgd": Choice(_sgd, _each(4)),
    "schedule_free": Choice(_schedule_free, _each(8)),
}
