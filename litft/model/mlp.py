"""The feed-forward half of a block: one dense MLP, gated or plain, or a mixture of gated experts."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from litft.model.config import Config, ExpertsConfig, LayerConfig
from litft.model.linear import Linear

# B batch, T tokens, C channels, I hidden size, E experts, N tokens of a batch that reach an expert (each top_k times)

ACTIVATIONS = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def activation(config: Config) -> Callable[[Tensor], Tensor]:
    """The activation that config.json names; ValueError for one that is not supported."""
    if config.activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"config.json: activation {config.activation!r} is not supported; known: {known}")
    return ACTIVATIONS[config.activation]


def gate_function(config: Config) -> Callable[[Tensor, Tensor], Tensor]:
    """activation(gate) * up; with a limit, gpt-oss's clamped form of it (arXiv 2508.10925), activation(gate) * (up + 1)."""
    act, limit = activation(config), config.activation_limit
    if limit is None:

        def gated(gate: Tensor, up: Tensor) -> Tensor:
            kept = torch.is_grad_enabled() and not torch.compiler.is_compiling()
            return _Gated.apply(gate, up, act) if kept else act(gate) * up

        return gated
    return lambda gate, up: act(gate.clamp(max=limit)) * (up.clamp(-limit, limit) + 1)


class _Gated(torch.autograd.Function):
    """activation(gate) * up that keeps its inputs alone: the activation is made again where the gradient asks for it."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.act = act
        ctx.save_for_backward(gate, up)
        return act(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            gate = gate.detach().requires_grad_()
            active = ctx.act(gate)
        (d_gate,) = torch.autograd.grad(active, gate, grad * up)
        return d_gate, active.detach().mul_(grad), None


class GatedMLP(nn.Module):
    """The gated feed-forward layer (arXiv 2002.05202)."""

    def __init__(self, config: Config, hidden_dim: int) -> None:
        super().__init__()
        self.gated = gate_function(config)
        self.gate_proj = Linear(config.dim, hidden_dim, bias=config.mlp_bias)
        self.up_proj = Linear(config.dim, hidden_dim, bias=config.mlp_bias)
        self.down_proj = Linear(hidden_dim, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gated(*self.projections(x)))

    def projections(self, x: Tensor) -> tuple[Tensor, ...]:
        """Gate and up: the seam of those made at once."""
        return self.gate_proj(x), self.up_proj(x)


class PlainMLP(nn.Module):
    """The transformer's original feed-forward layer (arXiv 1706.03762)."""

    def __init__(self, config: Config, hidden_dim: int) -> None:
        super().__init__()
        self.activation = activation(config)
        self.up_proj = Linear(config.dim, hidden_dim, bias=config.mlp_bias)
        self.down_proj = Linear(hidden_dim, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))


def route(scores: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """A router's scores (tokens, E) to the chosen experts' probabilities and numbers, (tokens, top_k) each."""
    best, chosen = scores.float().softmax(-1).topk(top_k, dim=-1)
    if renormalize:
        best = best / best.sum(-1, keepdim=True)
    return best.to(scores.dtype), chosen


class Grouping(NamedTuple):
    """Rows sorted by expert. Both stay on the device: the host never waits to know who got what."""

    expert: Tensor  # (N,), whose each row is
    ends: Tensor  # (E,) int32, where the rows of each expert end


class ExpertLinear(nn.Module):
    """One Linear an expert, stacked: weight (E, out, in). What a method mixes over, as it does over nn.Linear."""

    def __init__(self, count: int, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.count, self.in_features, self.out_features = count, in_features, out_features
        self.weight = nn.Parameter(torch.zeros(count, out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(count, out_features)) if bias else None

    def forward(self, x: Tensor, grouping: Grouping) -> Tensor:
        """x (N, in), sorted by expert; returns (N, out)."""
        return expert_linear(x, self.weight, self.bias, grouping)


def expert_linear(x: Tensor, weight: Tensor, bias: Tensor | None, grouping: Grouping) -> Tensor:
    """x (N, in), sorted by expert, through each expert's own weight (E, out, in) and bias (E, out)."""
    y = grouped_product(x, weight.mT, grouping.ends)
    return y if bias is None else y + by_expert(bias, grouping)


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x (N, in), sorted by expert, times each expert's (E, in, out)."""
    if isinstance(x, FakeTensor):  # a plan's: its sizes are those of one expert with all rows
        return x @ weight[0]
    aligned = all(width * x.element_size() % 16 == 0 for width in weight.shape[1:])  # what grouped_mm asks of rows
    if aligned and (x.dtype == torch.bfloat16 or x.is_cpu):
        return F.grouped_mm(x, weight, offs=ends)
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()  # a GPU groups bf16 alone, and is waited for otherwise
    return torch.cat([rows @ each for rows, each in zip(x.split(counts), weight.unbind(), strict=True)])


def by_expert(values: Tensor, grouping: Grouping) -> Tensor:
    """What each expert has, (E, out), for rows sorted by expert: (N, out)."""
    return F.embedding(grouping.expert, values)


class ExpertStack(nn.Module):
    """Gated MLPs, one an expert (arXiv 2101.03961), as three stacks."""

    def __init__(self, config: Config, experts: ExpertsConfig) -> None:
        super().__init__()
        self.gated = gate_function(config)
        self.gate_proj = ExpertLinear(experts.count, config.dim, experts.hidden_dim, experts.bias)
        self.up_proj = ExpertLinear(experts.count, config.dim, experts.hidden_dim, experts.bias)
        self.down_proj = ExpertLinear(experts.count, experts.hidden_dim, config.dim, experts.bias)

    def forward(self, x: Tensor, grouping: Grouping) -> Tensor:
        """x (N, C), sorted by expert; returns (N, C)."""
        return self.down_proj(self.gated(self.gate_proj(x, grouping), self.up_proj(x, grouping)), grouping)


CHOOSERS = (
    ".router",
    ".shared_gate",
)  # how the names of modules end that choose experts: a few outputs, and all depends on them


class MoE(nn.Module):
    """A mixture of experts (arXiv 2401.04088), with an expert that every token shares where the architecture has one."""

    def __init__(self, config: Config, experts: ExpertsConfig) -> None:
        super().__init__()
        self.count, self.top_k, self.renormalize = experts.count, experts.top_k, experts.renormalize
        self.router = Linear(config.dim, experts.count, bias=experts.router_bias)
        self.experts = ExpertStack(config, experts)
        self.shared = GatedMLP(config, experts.shared_dim) if experts.shared_dim else None
        self.shared_gate = Linear(config.dim, 1, bias=False) if experts.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, C); each token's chosen experts, weighted, and the shared one. Returns (B, T, C)."""
        flat = x.flatten(0, 1)  # (B T, C)
        weights, chosen = route(self.router(flat), self.top_k, self.renormalize)  # (B T, top_k)
        expert, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(expert, torch.arange(self.count, device=x.device), right=True, out_int32=True)
        y = self.experts(flat[order // chosen.size(1)], Grouping(expert, ends))
        # back to the tokens' order by a gather, which is deterministic, where adding into place would not be
        y = y[order.argsort()].unflatten(0, chosen.shape)  # (B T, top_k, C)
        y = (y * weights[..., None]).sum(1)
        if self.shared is not None:
            shared = self.shared(flat)
            y = y + (shared if self.shared_gate is None else shared * torch.sigmoid(self.shared_gate(flat)))
        return y.view_as(x)


def make_mlp(config: Config, layer: LayerConfig) -> nn.Module:
    """The feed-forward part of one layer."""
    if layer.experts is not None:
        return MoE(config, layer.experts)
    return (GatedMLP if config.gated else PlainMLP)(config, config.hidden_dim)
