"""The feed-forward half of a block: one dense MLP, gated or plain, or a mixture of gated experts."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litft.config import Config, Experts, Layer

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
        return lambda gate, up: act(gate) * up
    return lambda gate, up: act(gate.clamp(max=limit)) * (up.clamp(-limit, limit) + 1)


class GatedMLP(nn.Module):
    """The gated feed-forward layer (arXiv 2002.05202)."""

    def __init__(self, config: Config, hidden_dim: int) -> None:
        super().__init__()
        self.gated = gate_function(config)
        self.gate_proj = nn.Linear(config.dim, hidden_dim, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.dim, hidden_dim, bias=config.mlp_bias)
        self.down_proj = nn.Linear(hidden_dim, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gated(self.gate_proj(x), self.up_proj(x)))


class PlainMLP(nn.Module):
    """The transformer's original feed-forward layer (arXiv 1706.03762)."""

    def __init__(self, config: Config, hidden_dim: int) -> None:
        super().__init__()
        self.activation = activation(config)
        self.up_proj = nn.Linear(config.dim, hidden_dim, bias=config.mlp_bias)
        self.down_proj = nn.Linear(hidden_dim, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))


def route(scores: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """A router's scores (tokens, E) to the chosen experts' probabilities and numbers, (tokens, top_k) each."""
    best, chosen = scores.float().softmax(-1).topk(top_k, dim=-1)
    if renormalize:
        best = best / best.sum(-1, keepdim=True)
    return best.to(scores.dtype), chosen


class ExpertLinear(nn.Module):
    """One Linear an expert, stacked: weight (E, out, in). What a method mixes over, as it does over nn.Linear."""

    def __init__(self, count: int, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.count, self.in_features, self.out_features = count, in_features, out_features
        self.weight = nn.Parameter(torch.zeros(count, out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(count, out_features)) if bias else None

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        """x (N, in), sorted by expert, of which expert e gets the next counts[e] rows; returns (N, out)."""
        return expert_linear(x, self.weight, self.bias, counts)


def expert_linear(x: Tensor, weight: Tensor, bias: Tensor | None, counts: list[int]) -> Tensor:
    """x (N, in), sorted by expert, through each expert's own weight (E, out, in) and bias (E, out)."""
    biases = bias.unbind() if bias is not None else [None] * len(counts)
    # unbind, not weight[e]: the backward of an index would fill a gradient of the whole stack for each expert
    parts = zip(x.split(counts), weight.unbind(), biases, strict=True)
    return torch.cat([F.linear(rows, w, b) for rows, w, b in parts])


def by_expert(values: Tensor, counts: list[int]) -> Tensor:
    """What each expert has, (E, out), for rows sorted by expert: (N, out)."""
    return values.repeat_interleave(torch.tensor(counts, device=values.device), dim=0, output_size=sum(counts))


class ExpertStack(nn.Module):
    """Gated MLPs, one an expert (arXiv 2101.03961), as three stacks."""

    def __init__(self, config: Config, experts: Experts) -> None:
        super().__init__()
        self.gated = gate_function(config)
        self.gate_proj = ExpertLinear(experts.count, config.dim, experts.hidden_dim, experts.bias)
        self.up_proj = ExpertLinear(experts.count, config.dim, experts.hidden_dim, experts.bias)
        self.down_proj = ExpertLinear(experts.count, experts.hidden_dim, config.dim, experts.bias)

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        """x (N, C), sorted by expert; returns (N, C)."""
        return self.down_proj(self.gated(self.gate_proj(x, counts), self.up_proj(x, counts)), counts)


CHOOSERS = (
    ".router",
    ".shared_gate",
)  # how the names of modules end that choose experts: a few outputs, and all depends on them


class MoE(nn.Module):
    """A mixture of experts (arXiv 2401.04088), with an expert that every token shares where the architecture has one."""

    def __init__(self, config: Config, experts: Experts) -> None:
        super().__init__()
        self.count, self.top_k, self.renormalize = experts.count, experts.top_k, experts.renormalize
        self.router = nn.Linear(config.dim, experts.count, bias=experts.router_bias)
        self.experts = ExpertStack(config, experts)
        self.shared = GatedMLP(config, experts.shared_dim) if experts.shared_dim else None
        self.shared_gate = nn.Linear(config.dim, 1, bias=False) if experts.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, C); each token's chosen experts, weighted, and the shared one. Returns (B, T, C)."""
        flat = x.flatten(0, 1)  # (B T, C)
        weights, chosen = route(self.router(flat), self.top_k, self.renormalize)  # (B T, top_k)
        order = chosen.flatten().argsort(stable=True)
        counts = self.counts(chosen)
        y = self.experts(flat[order // chosen.size(1)], counts)
        # back to the tokens' order by a gather, which is deterministic, where adding into place would not be
        y = y[order.argsort()].unflatten(0, chosen.shape)  # (B T, top_k, C)
        y = (y * weights[..., None]).sum(1)
        if self.shared is not None:
            shared = self.shared(flat)
            y = y + (shared if self.shared_gate is None else shared * torch.sigmoid(self.shared_gate(flat)))
        return y.view_as(x)

    def counts(self, chosen: Tensor) -> list[int]:
        """How many rows each expert gets; the seam of plan.py, which has no values to count."""
        return chosen.flatten().bincount(minlength=self.count).tolist()


def make_mlp(config: Config, layer: Layer) -> nn.Module:
    """The feed-forward part of one layer."""
    if layer.experts is not None:
        return MoE(config, layer.experts)
    return (GatedMLP if config.gated else PlainMLP)(config, config.hidden_dim)
