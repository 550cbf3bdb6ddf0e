"""The feed-forward part of a block: a dense MLP, gated or plain, or a mixture of gated experts."""

from collections.abc import Callable
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from litft.model.config import Config, ExpertsConfig, LayerConfig, NormConfig
from litft.model.linear import Linear, apply_linears
from litft.model.norm import Norm, scaled
from litft.model.recomputation import recomputable

# B batch, T tokens, C channels, I hidden size of an MLP, E experts, N rows: B x T x top_k, one per
# token and selected expert

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


class XIELU(nn.Module):
    """The activation xIELU (arXiv 2411.13010), with two trained scalars; beta and eps are constants
    of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.zeros(1))
        self.alpha_n = nn.Parameter(torch.zeros(1))
        self.beta = nn.Parameter(torch.full((), 0.5))
        self.eps = nn.Parameter(torch.full((), -1e-6))

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of each entry of x, which may have any shape."""
        alpha_p = F.softplus(self.alpha_p)
        beta = self.beta.detach()
        alpha_n = beta + F.softplus(self.alpha_n)
        # Without the minimum, exp of a large x would be infinite, and its gradient NaN, although
        # `where` takes the other branch.
        negative = (torch.expm1(torch.minimum(x, self.eps.detach())) - x) * alpha_n
        return torch.where(x > 0, alpha_p * x * x, negative) + beta * x


# name suffixes of parameters that no method trains
CONSTANTS = (".correction_bias", ".activation.beta", ".activation.eps", ".layer_scale")


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter in a network of `dtype`: bf16 would not distinguish corrected
    scores of experts."""
    if name.endswith(".correction_bias"):
        return torch.float32
    return dtype


def activation(config: Config) -> Callable[[Tensor], Tensor]:
    """Return the activation that config.json names, a function of the entries of a tensor of any
    shape.

    Raises ValueError if it is not supported.
    """
    if config.activation == "xielu":
        return XIELU()
    if config.activation not in ACTIVATIONS:
        supported = ", ".join(ACTIVATIONS)
        raise ValueError(
            f"config.json: activation {config.activation!r} is not supported; known: {supported}"
        )
    return ACTIVATIONS[config.activation]


def activated(act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the activation of x, of any shape; a block that recomputes does not save it."""
    # parameters may be sharded when it would be computed again
    if isinstance(act, nn.Module):
        return act(x)
    return recomputable(act, x)


def gate_function(config: Config) -> Callable[[Tensor, Tensor], Tensor]:
    """Return activation(gate) * up or, with a limit, gpt-oss's clamped activation(gate) * (up + 1)
    (arXiv 2508.10925).

    The function takes a gate and an up of one shape, which may be any shape.
    """
    act = activation(config)
    limit = config.activation_limit
    if limit is None:

        def gated(gate: Tensor, up: Tensor) -> Tensor:
            # the compiler chooses itself what it saves
            needs_graph = torch.is_grad_enabled() and not torch.compiler.is_compiling()
            if not needs_graph:
                return act(gate) * up
            # parameters may be sharded when it would be computed again
            if isinstance(act, nn.Module):
                return _Gated.apply(gate, up, act)
            return recomputable(lambda gate, up: _Gated.apply(gate, up, act), gate, up)

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
        # only the activation is computed again; it has one input, so its graph is enough
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
        self.gate_scale = config.mlp_gate_scale
        self.out_scale = config.mlp_out_scale
        self.gate_proj = Linear(config.dim, hidden_dim, bias=config.mlp_bias)
        self.up_proj = Linear(config.dim, hidden_dim, bias=config.mlp_bias)
        self.down_proj = Linear(hidden_dim, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., C) for x (..., C); a shared expert reads x as (B T, C)."""
        gate, up = self.projections(x)
        y = self.down_proj(self.activate(scaled(gate, self.gate_scale), up))
        return scaled(y, self.out_scale)

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the hidden values (..., I) from gate and up, (..., I) each."""
        return self.gated(gate, up)

    def projections(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return gate and up, (..., I) each, of x (..., C); overridden where one matrix computes
        both."""
        return tuple(apply_linears(x, self.gate_proj, self.up_proj))


class SparseMLP(GatedMLP):
    """Gated feed-forward layer that uses only the largest gate values (Gemma 3n; arXiv 2506.06644).

    Of values with a normal distribution, the share `sparsity` is below the threshold that is
    subtracted.
    """

    def __init__(self, config: Config, hidden_dim: int, sparsity: float) -> None:
        super().__init__(config, hidden_dim)
        self.deviations = NormalDist().inv_cdf(sparsity)

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the hidden values (..., I) from gate and up, (..., I) each; see GatedMLP."""
        # (B, T, 1): of each token's gate values
        threshold = (
            gate.mean(-1, keepdim=True)
            + gate.std(-1, keepdim=True, unbiased=False) * self.deviations
        )
        return self.gated(F.relu(gate - threshold), up)


class PlainMLP(nn.Module):
    """Feed-forward layer of the original transformer (arXiv 1706.03762)."""

    def __init__(self, config: Config, hidden_dim: int) -> None:
        super().__init__()
        self.activation = activation(config)
        self.up_proj = Linear(config.dim, hidden_dim, bias=config.mlp_bias)
        self.down_proj = Linear(hidden_dim, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., C) for x (..., C); a shared expert reads x as (B T, C)."""
        return self.down_proj(activated(self.activation, self.up_proj(x)))


def route(
    logits: Tensor, experts: ExpertsConfig, correction_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Select experts from router logits (B T, E); return their weights and indices, (B T, top_k)
    each.

    correction_bias: (E,).
    """
    if experts.scoring == "sparsemixer":
        return _sparse_mixer(logits, experts.jitter)

    # fp32: bf16 would not distinguish close scores
    if experts.scoring == "sigmoid":
        scores = logits.float().sigmoid()
    else:
        scores = logits.float().softmax(-1)

    # The correction balances the load of the experts. It
    # decides which are chosen, but not their weights.
    if correction_bias is None:
        priority = scores
    else:
        priority = scores + correction_bias
    if experts.groups > 1:
        # (tokens, groups, E / groups)
        grouped = priority.unflatten(-1, (experts.groups, -1))
        if experts.group_score == "top2":
            group_scores = grouped.topk(2, dim=-1).values.sum(-1)
        else:
            group_scores = grouped.amax(-1)
        # True for all groups except the best; their experts cannot be chosen
        excluded = torch.ones_like(group_scores, dtype=torch.bool)
        excluded = excluded.scatter(
            -1, group_scores.topk(experts.top_groups, dim=-1).indices, False
        )
        priority = grouped.masked_fill(excluded[..., None], float("-inf")).flatten(-2)

    chosen = priority.topk(experts.top_k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if experts.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return (weights * experts.weight_scale).to(logits.dtype), chosen


def _sparse_mixer(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Select two experts; the weight of each is its probability among those that are close to it
    (arXiv 2310.00811)."""
    weights = []
    chosen = []
    remaining = logits
    for _ in range(2):
        highest, index = remaining.max(dim=-1, keepdim=True)
        # relative to the highest of the remaining logits; experts that are far from it take no part
        distance = (highest - logits) / logits.abs().clamp(min=highest)
        near = remaining.masked_fill(distance > 2 * jitter, float("-inf"))
        weights.append(near.softmax(-1).gather(-1, index))
        chosen.append(index)
        # the second expert is another one
        remaining = remaining.scatter(-1, index, float("-inf"))
    return torch.cat(weights, -1), torch.cat(chosen, -1)


class Grouping(NamedTuple):
    """Describes rows sorted by expert.

    Both tensors stay on the device, so the host never waits for them.
    """

    expert: Tensor  # (N,), the expert of each row
    ends: Tensor  # (E,) int32, end of each expert's rows


class ExpertLinear(nn.Module):
    """One Linear per expert with a stacked weight (E, out, in).

    Methods extend it as they extend nn.Linear.
    """

    def __init__(self, count: int, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.count = count
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.zeros(count, out_features, in_features))
        if bias:
            self.bias = nn.Parameter(torch.zeros(count, out_features))
        else:
            self.bias = None

    def forward(self, x: Tensor, grouping: Grouping) -> Tensor:
        """Apply to x (N, in), sorted by expert; return (N, out)."""
        return expert_linear(x, self.weight, self.bias, grouping)


def expert_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, grouping: Grouping
) -> Tensor:
    """Apply each expert's weight (E, out, in) and bias (E, out) to its rows of x (N, in), sorted by
    expert."""
    y = grouped_product(x, weight.mT, grouping.ends)
    if bias is None:
        return y
    return y + by_expert(bias, grouping)


@torch.library.custom_op("litft::looped_product", mutates_args=())
def looped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return the same as `grouped_product`, (N, out), expert by expert, for x (N, in) and weight
    (E, in, out).

    ends: (E,), as in `Grouping`. On a GPU the host waits for it, to read the number of rows.
    """
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat(
        [
            rows @ matrix
            for rows, matrix in zip(x.split(counts), weight.unbind(), strict=True)
        ]
    )


@torch.library.custom_op("litft::looped_outer_product", mutates_args=())
def looped_outer_product(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Return x^T y, (E, in, out), over each expert's rows of x (N, in) and y (N, out): the gradient
    of `looped_product`'s weight."""
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.stack(
        [
            rows.mT @ others
            for rows, others in zip(x.split(counts), y.split(counts), strict=True)
        ]
    )


looped_product.register_fake(lambda x, weight, ends: x.new_empty(x.size(0), weight.size(2)))
looped_outer_product.register_fake(
    lambda x, y, ends: x.new_empty(ends.size(0), x.size(1), y.size(1))
)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _looped_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    needs_x, needs_weight, _ = ctx.needs_input_grad
    # (N, out) times (E, out, in)
    d_x = looped_product(grad, weight.mT, ends) if needs_x else None
    return d_x, looped_outer_product(x, grad, ends) if needs_weight else None, None


looped_product.register_autograd(_looped_gradients, setup_context=_save_for_backward)


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply x (N, in), sorted by expert, by each expert's matrix in weight (E, in, out); return
    (N, out)."""
    traced = torch.compiler.is_compiling() or isinstance(x, FakeTensor)
    # grouped_mm has no kernel, or cannot be traced (torch 2.13)
    if x.dtype != torch.bfloat16 and (traced or not x.is_cpu):
        return looped_product(x, weight, ends)
    in_dim, out_dim = weight.shape[1:]
    # grouped_mm takes rows of a multiple of 16 bytes; zeros change no product
    multiple = 16 // x.element_size()
    in_padding = -in_dim % multiple
    out_padding = -out_dim % multiple
    if in_padding or out_padding:
        x = F.pad(x, (0, in_padding))
        weight = F.pad(weight, (0, out_padding, 0, in_padding))
    y = F.grouped_mm(x, weight, offs=ends)
    return y[:, :out_dim]


def by_expert(values: Tensor, grouping: Grouping) -> Tensor:
    """Expand values per expert (E, out) to rows sorted by expert, (N, out)."""
    return F.embedding(grouping.expert, values)


class GatedExperts(nn.Module):
    """One gated MLP per expert (arXiv 2101.03961), as stacked Linears."""

    def __init__(self, config: Config, experts: ExpertsConfig) -> None:
        super().__init__()
        self.gated = gate_function(config)
        hidden_dim = experts.hidden_dim
        self.gate_proj = ExpertLinear(experts.count, config.dim, hidden_dim, experts.bias)
        self.up_proj = ExpertLinear(experts.count, config.dim, hidden_dim, experts.bias)
        self.down_proj = ExpertLinear(experts.count, hidden_dim, config.dim, experts.bias)

    def forward(self, x: Tensor, grouping: Grouping) -> Tensor:
        """Apply the experts to x (N, C), sorted by expert; return (N, C)."""
        up = self.up_proj(x, grouping)
        return self.down_proj(self.gated(self.gate_proj(x, grouping), up), grouping)


class PlainExperts(nn.Module):
    """One MLP without a gate per expert, as stacked Linears."""

    def __init__(self, config: Config, experts: ExpertsConfig) -> None:
        super().__init__()
        self.activation = activation(config)
        self.up_proj = ExpertLinear(
            experts.count, config.dim, experts.hidden_dim, experts.bias
        )
        self.down_proj = ExpertLinear(
            experts.count, experts.hidden_dim, config.dim, experts.bias
        )

    def forward(self, x: Tensor, grouping: Grouping) -> Tensor:
        """Apply the experts to x (N, C), sorted by expert; return (N, C)."""
        hidden = activated(self.activation, self.up_proj(x, grouping))
        return self.down_proj(hidden, grouping)


# name suffixes of the modules that select experts; these are not quantized, since a small error
# changes the selection
ROUTERS = (
    ".router",
    ".shared_gate",
)


class MoE(nn.Module):
    """A mixture of experts (arXiv 2401.04088), with a shared expert if the architecture has one."""

    correction_bias: nn.Parameter | None  # (E,)

    def __init__(self, config: Config, experts: ExpertsConfig) -> None:
        super().__init__()
        self.count = experts.count
        self.top_k = experts.top_k
        self.config = experts
        self.router = Linear(config.dim, experts.count, bias=experts.router_bias)
        if config.gated:
            mlp_class = GatedMLP
            self.experts = GatedExperts(config, experts)
        else:
            mlp_class = PlainMLP
            self.experts = PlainExperts(config, experts)
        if experts.shared_dim:
            self.shared = mlp_class(config, experts.shared_dim)
        else:
            self.shared = None
        if experts.shared_gate:
            self.shared_gate = Linear(config.dim, 1, bias=False)
        else:
            self.shared_gate = None
        # fp32: a bf16 sum would not distinguish the experts' scores
        if experts.correction_bias:
            bias = nn.Parameter(torch.zeros(experts.count, dtype=torch.float32))
        else:
            bias = None
        self.register_parameter("correction_bias", bias)

    def select(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and indices of the experts of each token of flat (B T, C), (B T,
        top_k) each."""
        scores = self.router(flat)
        if self.correction_bias is None:
            return route(scores, self.config, None)
        return route(scores, self.config, self.correction_bias.detach())

    def expert_inputs(self, flat: Tensor) -> Tensor:
        """Return what the experts read of flat (B T, C), in the same shape."""
        return flat

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, C): the weighted outputs of each token's experts of x (B, T, C), plus the
        shared expert's."""
        flat = x.flatten(0, 1)  # (B T, C)
        weights, chosen = self.select(flat)  # (B T, top_k)
        flat = self.expert_inputs(flat)

        # Sort the B T top_k pairs of token and expert by expert: the rows of one expert are
        # contiguous from here on. The sort is stable, so the order of rows is deterministic.
        expert, order = chosen.flatten().sort(stable=True)
        # the number of rows that belong to experts 0 to e
        numbers = torch.arange(self.count, device=x.device)
        ends = torch.searchsorted(expert, numbers, right=True, out_int32=True)
        # (N, C): pair i belongs to token i // top_k
        rows = flat[order // chosen.size(1)]
        if self.config.weighted_input:
            rows = rows * weights.flatten()[order, None]

        y = self.experts(rows, Grouping(expert, ends))
        # a gather restores the token order deterministically, unlike scatter-add
        y = y[order.argsort()].unflatten(0, chosen.shape)  # (B T, top_k, C)
        if not self.config.weighted_input:
            y = y * weights[..., None]
        y = y.sum(1)

        if self.shared is not None:
            shared_output = self.shared(flat)
            if self.shared_gate is not None:
                shared_output = shared_output * torch.sigmoid(self.shared_gate(flat))
            y = y + shared_output
        return scaled(y, self.config.output_scale).view_as(x)


class ScaledMoE(MoE):
    """Gemma 4's experts: the router reads normalized and scaled inputs, and each expert's weight
    has a scale of its own."""

    def __init__(self, config: Config, experts: ExpertsConfig) -> None:
        super().__init__(config, experts)
        self.router_norm = Norm(
            NormConfig("rms", config.norm.eps, weight=False), config.dim
        )
        self.router_scale = nn.Parameter(torch.ones(config.dim))
        self.expert_scale = nn.Parameter(torch.ones(experts.count))
        self.norm = Norm(config.norm, config.dim)

    def select(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and indices of the experts of each token of flat (B T, C),
        (B T, top_k) each; see MoE."""
        # the router's input has a root mean square of 1 / sqrt(C), times a trained scale
        inputs = (
            self.router_norm(flat)
            * self.router_scale.to(flat.dtype)
            * flat.size(-1) ** -0.5
        )
        weights, chosen = route(self.router(inputs), self.config)
        return weights * self.expert_scale.to(weights.dtype)[chosen], chosen

    def expert_inputs(self, flat: Tensor) -> Tensor:
        """Return what the experts read of flat (B T, C), in the same shape; see MoE."""
        return self.norm(flat)


class DenseBesideExperts(nn.Module):
    """A dense MLP and experts side by side, each with a norm before and after it."""

    def __init__(self, config: Config, layer: LayerConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        self.dense_norm = Norm(config.norm, config.dim)
        self.dense_post_norm = Norm(config.norm, config.dim)
        self.dense = GatedMLP(config, layer.hidden_dim or config.hidden_dim)
        self.moe = ScaledMoE(config, experts)
        self.moe_post_norm = Norm(config.norm, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both parts, (B, T, C), for x (B, T, C)."""
        return self.dense_post_norm(self.dense(self.dense_norm(x))) + self.moe_post_norm(
            self.moe(x)
        )


def make_mlp(config: Config, layer: LayerConfig) -> nn.Module:
    """Build the feed-forward part of one layer."""
    if layer.experts is not None:
        if layer.experts.beside_dense:
            return DenseBesideExperts(config, layer, layer.experts)
        return MoE(config, layer.experts)
    hidden_dim = layer.hidden_dim or config.hidden_dim
    if layer.sparsity:
        return SparseMLP(config, hidden_dim, layer.sparsity)
    if config.gated:
        return GatedMLP(config, hidden_dim)
    return PlainMLP(config, hidden_dim)
