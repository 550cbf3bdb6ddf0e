"""The feed-forward part of a block: a dense MLP, gated or plain, or a mixture of gated experts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from litft.model.config import Config, ExpertsConfig, LayerConfig
from litft.model.linear import Linear

# B batch, T tokens, C channels, E experts, N rows: B x T x top_k, one per token and selected expert

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
    """Return the activation that config.json names; raise ValueError if it is not supported."""
    if config.activation not in ACTIVATIONS:
        supported = ", ".join(ACTIVATIONS)
        raise ValueError(f"config.json: activation {config.activation!r} is not supported; known: {supported}")
    return ACTIVATIONS[config.activation]


def gate_function(config: Config) -> Callable[[Tensor, Tensor], Tensor]:
    """Return activation(gate) * up or, with a limit, gpt-oss's clamped activation(gate) * (up + 1) (arXiv 2508.10925)."""
    act, limit = activation(config), config.activation_limit
    if limit is None:

        def gated(gate: Tensor, up: Tensor) -> Tensor:
            needs_graph = torch.is_grad_enabled() and not torch.compiler.is_compiling()
            return _Gated.apply(gate, up, act) if needs_graph else act(gate) * up

        return gated
    return lambda gate, up: act(gate.clamp(max=limit)) * (up.clamp(-limit, limit) + 1)


class _Gated(torch.autograd.Function):
    """activation(gate) * up that saves only its inputs; the backward recomputes the activation."""

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
    """Gated feed-forward layer (arXiv 2002.05202)."""

    def __init__(self, config: Config, hidden_dim: int) -> None:
        super().__init__()
        self.gated = gate_function(config)
        self.gate_proj = Linear(config.dim, hidden_dim, bias=config.mlp_bias)
        self.up_proj = Linear(config.dim, hidden_dim, bias=config.mlp_bias)
        self.down_proj = Linear(hidden_dim, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gated(*self.projections(x)))

    def projections(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return gate and up; overridden where one matrix computes both."""
        return self.gate_proj(x), self.up_proj(x)


class PlainMLP(nn.Module):
    """Feed-forward layer of the original transformer (arXiv 1706.03762)."""

    def __init__(self, config: Config, hidden_dim: int) -> None:
        super().__init__()
        self.activation = activation(config)
        self.up_proj = Linear(config.dim, hidden_dim, bias=config.mlp_bias)
        self.down_proj = Linear(hidden_dim, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))


def route(scores: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Select experts from router scores (tokens, E); return their probabilities and indices, (tokens, top_k) each."""
    weights, chosen = scores.float().softmax(-1).topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(scores.dtype), chosen


class Grouping(NamedTuple):
    """Describes rows sorted by expert. Both tensors stay on the device, so the host never waits for them."""

    expert: Tensor  # (N,), the expert of each row
    ends: Tensor  # (E,) int32, end of each expert's rows


class ExpertLinear(nn.Module):
    """One Linear per expert with a stacked weight (E, out, in). Methods extend it as they extend nn.Linear."""

    def __init__(self, count: int, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.count, self.in_features, self.out_features = count, in_features, out_features
        self.weight = nn.Parameter(torch.zeros(count, out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(count, out_features)) if bias else None

    def forward(self, x: Tensor, grouping: Grouping) -> Tensor:
        """Apply to x (N, in), sorted by expert; return (N, out)."""
        return expert_linear(x, self.weight, self.bias, grouping)


def expert_linear(x: Tensor, weight: Tensor, bias: Tensor | None, grouping: Grouping) -> Tensor:
    """Apply each expert's weight (E, out, in) and bias (E, out) to its rows of x (N, in), sorted by expert."""
    y = grouped_product(x, weight.mT, grouping.ends)
    return y if bias is None else y + by_expert(bias, grouping)


@torch.library.custom_op("litft::looped_product", mutates_args=())
def looped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Do the same as `grouped_product`, expert by expert. On a GPU the host waits for it, to read the number of rows."""
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([rows @ matrix for rows, matrix in zip(x.split(counts), weight.unbind(), strict=True)])


@torch.library.custom_op("litft::looped_outer_product", mutates_args=())
def looped_outer_product(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Return x^T y over the rows of each expert, (E, in, out): the gradient of `looped_product`'s weight."""
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.stack([rows.mT @ others for rows, others in zip(x.split(counts), y.split(counts), strict=True)])


looped_product.register_fake(lambda x, weight, ends: x.new_empty(x.size(0), weight.size(2)))
looped_outer_product.register_fake(lambda x, y, ends: x.new_empty(ends.size(0), x.size(1), y.size(1)))


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _looped_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    needs_x, needs_weight, _ = ctx.needs_input_grad
    d_x = looped_product(grad, weight.mT, ends) if needs_x else None
    return d_x, looped_outer_product(x, grad, ends) if needs_weight else None, None


looped_product.register_autograd(_looped_gradients, setup_context=_save_for_backward)


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply x (N, in), sorted by expert, by each expert's matrix in weight (E, in, out); return (N, out)."""
    traced = torch.compiler.is_compiling() or isinstance(x, FakeTensor)
    if x.dtype != torch.bfloat16 and (traced or not x.is_cpu):  # grouped_mm has no kernel, or cannot be traced (torch 2.13)
        return looped_product(x, weight, ends)
    in_dim, out_dim = weight.shape[1:]
    # grouped_mm takes rows of a multiple of 16 bytes; zeros change no product
    in_padding, out_padding = (-dim % (16 // x.element_size()) for dim in (in_dim, out_dim))
    if in_padding or out_padding:
        x, weight = F.pad(x, (0, in_padding)), F.pad(weight, (0, out_padding, 0, in_padding))
    return F.grouped_mm(x, weight, offs=ends)[:, :out_dim]


def by_expert(values: Tensor, grouping: Grouping) -> Tensor:
    """Expand values per expert (E, out) to rows sorted by expert, (N, out)."""
    return F.embedding(grouping.expert, values)


class ExpertStack(nn.Module):
    """One gated MLP per expert (arXiv 2101.03961), as three stacked Linears."""

    def __init__(self, config: Config, experts: ExpertsConfig) -> None:
        super().__init__()
        self.gated = gate_function(config)
        self.gate_proj = ExpertLinear(experts.count, config.dim, experts.hidden_dim, experts.bias)
        self.up_proj = ExpertLinear(experts.count, config.dim, experts.hidden_dim, experts.bias)
        self.down_proj = ExpertLinear(experts.count, experts.hidden_dim, config.dim, experts.bias)

    def forward(self, x: Tensor, grouping: Grouping) -> Tensor:
        """Apply the experts to x (N, C), sorted by expert; return (N, C)."""
        return self.down_proj(self.gated(self.gate_proj(x, grouping), self.up_proj(x, grouping)), grouping)


# name suffixes of the modules that select experts; these stay in full precision, since a small error changes the selection
ROUTERS = (
    ".router",
    ".shared_gate",
)


class MoE(nn.Module):
    """A mixture of experts (arXiv 2401.04088), with a shared expert if the architecture has one."""

    def __init__(self, config: Config, experts: ExpertsConfig) -> None:
        super().__init__()
        self.count, self.top_k, self.renormalize = experts.count, experts.top_k, experts.renormalize
        self.router = Linear(config.dim, experts.count, bias=experts.router_bias)
        self.experts = ExpertStack(config, experts)
        self.shared = GatedMLP(config, experts.shared_dim) if experts.shared_dim else None
        self.shared_gate = Linear(config.dim, 1, bias=False) if experts.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, C): the weighted outputs of each token's experts of x (B, T, C), plus the shared expert's."""
        flat = x.flatten(0, 1)  # (B T, C)
        weights, chosen = route(self.router(flat), self.top_k, self.renormalize)  # (B T, top_k)
        expert, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(expert, torch.arange(self.count, device=x.device), right=True, out_int32=True)
        y = self.experts(flat[order // chosen.size(1)], Grouping(expert, ends))
        # a gather restores the token order deterministically, unlike scatter-add
        y = y[order.argsort()].unflatten(0, chosen.shape)  # (B T, top_k, C)
        y = (y * weights[..., None]).sum(1)
        if self.shared is not None:
            shared_output = self.shared(flat)
            y = y + (shared_output if self.shared_gate is None else shared_output * torch.sigmoid(self.shared_gate(flat)))
        return y.view_as(x)


def make_mlp(config: Config, layer: LayerConfig) -> nn.Module:
    """Build the feed-forward part of one layer."""
    if layer.experts is not None:
        return MoE(config, layer.experts)
    return (GatedMLP if config.gated else PlainMLP)(config, config.hidden_dim)
