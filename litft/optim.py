"""The optimizer: torch's own, with a rate for each parameter's kind, and rounding that loses no update of bf16 weights."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from litft.args import TrainArgs
from litft.peft import Method

BETAS = (0.9, 0.95)
VECTORS = ("bias", "adapter_scale", "lora_m")  # of stacked experts they have two dimensions, and are vectors all the same


def make_optimizer(args: TrainArgs, method: Method, parameters: dict[str, nn.Parameter]) -> Optimizer:
    """AdamW (arXiv 1711.05101) over what is trained: matrices decay, vectors do not; `factor` multiplies the rate."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        decay = args.weight_decay if parameter.dim() > 1 and not name.endswith(VECTORS) else 0.0
        groups.setdefault((method.rate(name), decay), []).append(parameter)
    listed = [{"params": p, "factor": factor, "weight_decay": decay} for (factor, decay), p in groups.items()]
    rounds = any(p.dtype == torch.bfloat16 for p in parameters.values())
    make = Rounded if rounds else AdamW
    return make(listed, lr=args.learning_rate, betas=BETAS, weight_decay=0.0, fused=True)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["factor"]


class Rounded(Optimizer):
    """AdamW on bf16 weights: each is made fp32, stepped in fp32, and rounded up or down by chance (arXiv 2010.06192).

    An update smaller than half of the distance between two bf16 numbers would be lost by rounding to the nearest; by chance
    it is made in proportion, so that the mean over many steps is right. The moments are fp32; one weight at a time is.
    """

    def __init__(self, groups: list[dict], make: Callable[..., Optimizer] = AdamW, **settings) -> None:
        super().__init__(groups, dict(settings))
        self.inner: dict[nn.Parameter, Optimizer] = {}
        for group in self.param_groups:
            own = {name: value for name, value in group.items() if name not in ("params", "factor")}
            for parameter in group["params"]:
                wide = nn.Parameter(torch.empty(0, device=parameter.device))
                self.inner[parameter] = make([wide], **own)

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """One step over every weight with a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                inner = self.inner[parameter]
                (own,) = inner.param_groups
                (wide,) = own["params"]
                own["lr"] = group["lr"]
                wide.data, wide.grad = parameter.float(), parameter.grad.float()
                inner.step()
                parameter.copy_(wide if parameter.dtype == torch.float32 else stochastically_rounded(wide))
                wide.data, wide.grad = wide.data.new_empty(0), None
                self.state[parameter] = inner.state[wide]


def stochastically_rounded(wide: Tensor) -> Tensor:
    """fp32 to bf16: to one of the two neighbours, each as likely as the value is near to it."""
    bits = wide.detach().view(torch.int32)
    # the lower 16 bits are what bf16 lacks: a random number below 2^16 carries into the upper ones as often as they say
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device)
    return ((bits + noise) & ~0xFFFF).view(torch.float32).bfloat16()
