"""The modules that LoRA and DoRA adapt: a Linear, stacked experts and an embedding with a low-rank
update."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litft.methods.mixins import Mixin
from litft.model.linear import LowRankUpdate
from litft.model.mlp import ExpertLinear, Grouping, by_expert, expert_linear
from litft.model.quantization import dense_weight

# C channels, V vocabulary, E experts, N rows of expert inputs, R rank

# parameters of a LoRA module: A, B, DoRA's magnitudes, and the initial A and B of PiSSA and OLoRA
LORA_PARAMETERS = ("lora_a", "lora_b", "lora_m", "lora_a0", "lora_b0")


class LoRALinear(Mixin, LowRankUpdate):
    """A Linear y = W x with a low-rank update: y + scale * B A x (arXiv 2106.09685, section 4.1).

    DoRA (2402.09353) rescales each row of W + scale * B A to the norm `lora_m`. PiSSA (2404.02948)
    and OLoRA (2406.01775) initialize A and B from W. The initial product, of `lora_a0` and
    `lora_b0`, is subtracted, so that W is unchanged.
    """

    # of the Linear
    weight: nn.Parameter
    in_features: int
    out_features: int
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    # of PiSSA and OLoRA
    lora_a0: nn.Parameter | None
    lora_b0: nn.Parameter | None
    lora_m: nn.Parameter | None
    # DoRA: squared norms of the frozen rows, computed once the weights are loaded
    base_row_squares: Tensor | None = None

    def add_factors(
        self,
        r: int,
        scale: float,
        dropout: float,
        dora: bool = False,
        init: str = "default",
    ) -> None:
        """Register A (R, in) and B (out, R) on the weight's device, in torch's default dtype, which
        is fp32 while methods attach.

        dora: also register magnitudes (out,). init: default, pissa or olora.
        """
        # stack: (E,) for experts, otherwise empty
        *stack, out_dim, in_dim = self.weight_shape()
        self.lora_scale = scale
        self.lora_dropout = dropout
        self.init = init
        # of DoRA alone, set by `reset_parameters`
        self.base_row_squares = None

        def empty_parameter(*shape: int, trained: bool = True) -> nn.Parameter:
            return nn.Parameter(
                torch.empty(*stack, *shape, device=self.weight.device),
                requires_grad=trained,
            )

        self.lora_a = empty_parameter(r, in_dim)
        self.lora_b = empty_parameter(out_dim, r)
        # PiSSA and OLoRA begin with a product that is not zero, and that is subtracted
        from_weight = init != "default"
        initial_a = empty_parameter(r, in_dim, trained=False) if from_weight else None
        initial_b = empty_parameter(out_dim, r, trained=False) if from_weight else None
        magnitudes = empty_parameter(out_dim) if dora else None
        self.register_parameter("lora_a0", initial_a)
        self.register_parameter("lora_b0", initial_b)
        self.register_parameter("lora_m", magnitudes)
        # sharded weights are gathered for initialization only where it needs their values
        # not set to False, which would hide what another class that is mixed over the module says
        if dora or from_weight:
            self.reads_weight = True

    def reset_parameters(self) -> None:
        """Initialize A and B; DoRA's magnitudes are the norms of the rows."""
        # of the mixins alone: that of a Linear, which would overwrite its weight, is not reached
        super().reset_parameters()
        nn.init.zeros_(self.lora_b)
        self.init_factors()
        # kept, so that W + scale * (B A - B0 A0) starts as W
        if self.lora_a0 is not None and self.lora_b0 is not None:
            self.lora_a0.copy_(self.lora_a)
            self.lora_b0.copy_(self.lora_b)
        if self.lora_m is not None:
            # (out,), of the frozen rows
            self.base_row_squares = self.weight_matrix().float().square().sum(-1)
            self.lora_m.copy_(self.row_norms())

    def init_factors(self) -> None:
        """Initialize A and, for PiSSA and OLoRA, B; B is already zero.

        The default is PEFT's uniform A.
        """
        # rank 0: only DoRA's magnitudes, see `_unadapted_linears`
        if not self.lora_a.numel():
            return

        if self.init == "default":
            # experts as rows of one matrix: the bound depends only on the number of inputs
            nn.init.kaiming_uniform_(
                self.lora_a.data.view(-1, self.lora_a.size(-1)), a=math.sqrt(5)
            )
            return
        r = self.lora_a.size(-2)
        weight = self.weight_matrix().float()
        if self.init == "olora":
            # OLoRA: W = Q R, of which B has the first columns and A the first rows
            q, upper = torch.linalg.qr(weight)
            b = q[..., :r]
            a = upper[..., :r, :]
        else:
            # PiSSA: scale * B A is the part of W with the r largest singular values, split evenly
            # (v is transposed)
            u, s, v = torch.linalg.svd(weight, full_matrices=False)
            root = (s[..., :r] / self.lora_scale).sqrt()
            b = u[..., :r] * root[..., None, :]
            a = root[..., None] * v[..., :r, :]
        self.lora_b.copy_(b)
        self.lora_a.copy_(a)

    def weight_shape(self) -> tuple[int, ...]:
        """Return (out, in); the stored weight has another shape if it is quantized."""
        return (self.out_features, self.in_features)

    def weight_matrix(self) -> Tensor:
        """Return the base's weight (out, in), dequantized if necessary.

        Experts have (E, out, in). A sharded weight must have been gathered.
        """
        return dense_weight(self)

    def _apply(self, fn: Callable, recurse: bool = True) -> "LoRALinear":
        """Move `base_row_squares` with the weight, without changing its dtype."""
        super()._apply(fn, recurse)
        if self.base_row_squares is not None:
            self.base_row_squares = self.base_row_squares.to(self.weight.device)
        return self

    def remove(self) -> None:
        """Undo `add_factors`."""
        del self.lora_scale, self.lora_dropout, self.init, self.base_row_squares
        for name in LORA_PARAMETERS:
            delattr(self, name)

    def forward(self, x: Tensor, *grouping: Grouping) -> Tensor:
        """Return the module's output (..., out) plus the update, with DoRA's row norms, for x
        (..., in).

        Experts take x (N, in) and a grouping, and return (N, out). An embedding takes tokens (...)
        and returns (..., C). Linears that read the same input are called by `apply_linears`
        (`model/linear.py`) instead, through `forward_projected`.
        """
        y = super().forward(x, *grouping)
        if not self.enabled:
            return y
        return self.rescale_rows(self.add_update(y, x, *grouping), *grouping)

    def forward_projected(self, x: Tensor, projected: Tensor) -> Tensor:
        """Return what `forward` returns for x (..., in), given x A^T (..., R)."""
        y = self.add_projected(super().forward(x), projected)
        return self.rescale_rows(y)

    @property
    def shares_input(self) -> bool:
        """Whether A's product may be computed together with others: not if the module drops inputs
        of its own, or has factors as large as the weight, whose products cancel (PiSSA, OLoRA)."""
        drops = self.training and self.lora_dropout > 0
        return self.enabled and not drops and self.lora_a0 is None

    def rescale_rows(self, y: Tensor, *grouping: Grouping) -> Tensor:
        """Return y (..., out) with DoRA's row norms, if the module has magnitudes."""
        if self.lora_m is None:
            return y
        # y + y * (ratio - 1): a ratio of 1 leaves y bitwise unchanged, and a ratio close to 1 is
        # not rounded to 1
        ratios = norm_ratios(self.lora_m, self.row_norms())
        change = self.broadcast_rows(ratios - 1, *grouping).to(y.dtype)
        # DoRA scales rows of the weight, not the bias, so the bias is taken out first
        bias = getattr(self, "bias", None)
        if bias is None:
            return torch.addcmul(y, y, change)
        # one that is trained is in fp32
        bias = self.broadcast_rows(bias, *grouping).to(y.dtype)
        return torch.addcmul(y, y - bias, change)

    def add_update(self, y: Tensor, x: Tensor) -> Tensor:
        """Return y (..., out) plus the update for x (..., in), rounded once: `addmm` accumulates in
        fp32, so that a small update is kept."""
        x = F.dropout(x, self.lora_dropout, self.training)
        return self.add_projected(y, F.linear(x, self.input_factor(x.dtype)))

    def add_projected(self, y: Tensor, projected: Tensor) -> Tensor:
        """Return y (..., out) plus scale * B times x A^T (..., R)."""
        b = self.output_factor(y.dtype)  # (out, R)
        return torch.addmm(y.flatten(0, -2), projected.flatten(0, -2), b.mT).view_as(y)

    def input_factor(self, dtype: torch.dtype) -> Tensor:
        """Return A (R, in) in `dtype`; experts have (E, R, in).

        For PiSSA and OLoRA the update has twice the rank: scale * (B A - B0 A0) = scale * (B (A -
        A0) + (B - B0) A0). The differences are computed in fp32; after rounding A and A0 little of
        them would be left.
        """
        a = self.lora_a
        if self.lora_a0 is not None:
            a = torch.cat((a - self.lora_a0, self.lora_a0), -2)
        return a.to(dtype)

    def output_factor(self, dtype: torch.dtype) -> Tensor:
        """Return scale * B (out, R) in `dtype`; experts have (E, out, R). See `input_factor`."""
        b = self.lora_b
        if self.lora_b0 is not None:
            b = torch.cat((b, b - self.lora_b0), -1)
        return (b * self.lora_scale).to(dtype)

    @torch.no_grad()
    def row_norms(self) -> Tensor:
        """Return the 2-norm of each row of W + scale * B A, (out,), or (E, out) for experts, as a
        constant (arXiv 2402.09353, section 4.3).

        |w + s b A|^2 = |w|^2 + 2 s (w A^T) b + s^2 b (A A^T) b^T needs no matrix of W's size,
        except a dequantized W.
        """
        a = self.lora_a
        b = self.lora_b
        scale = self.lora_scale
        if self.lora_a0 is not None and self.lora_b0 is not None:
            a = torch.cat((a, self.lora_a0), dim=-2)
            b = torch.cat((b, -self.lora_b0), dim=-1)
        weight = self.weight_matrix()
        # w A^T, (out, R); the weight is not copied to fp32
        cross = (weight @ a.to(weight.dtype).mT).to(a.dtype)
        # set with the magnitudes, which use the norms
        assert self.base_row_squares is not None
        squares = (
            self.base_row_squares.to(b.device)
            + 2 * scale * (cross * b).sum(-1)
            + scale * scale * ((b @ (a @ a.mT)) * b).sum(-1)
        )
        # rounding can make the square of a small norm negative
        return self.sum_over_processes(squares).clamp(min=0).sqrt()

    def sum_over_processes(self, squares: Tensor) -> Tensor:
        """Return the squared norms of full rows, (out,), or (E, out) for experts, given those of
        this process's part of each row.

        Overridden for tensor parallelism, where rows are sharded.
        """
        return squares

    def broadcast_rows(self, values: Tensor) -> Tensor:
        """Return values (out,) in a shape that broadcasts to the output (..., out)."""
        return values


class LoRAExpertLinear(LoRALinear):
    """LoRA for each expert of an ExpertLinear: A (E, R, in), B (E, out, R)."""

    count: int  # of the ExpertLinear: E

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return A (E, R, in) and scale * B (E, out, R), with the rank padded to a multiple of 8,
        which grouped_mm requires on a GPU."""
        a = self.input_factor(dtype)
        b = self.output_factor(dtype)
        padding = -a.size(-2) % 8
        # rows and columns of zeros change no product
        if padding:
            return (F.pad(a, (0, 0, 0, padding)), F.pad(b, (0, padding)))
        return (a, b)

    def weight_shape(self) -> tuple[int, ...]:
        """Return (E, out, in)."""
        return (self.count, self.out_features, self.in_features)

    def add_update(self, y: Tensor, x: Tensor, grouping: Grouping) -> Tensor:
        """Return y (N, out), its rows sorted by expert, plus each expert's update for x (N, in)."""
        if not self.lora_a.numel():  # rank 0: only DoRA's magnitudes
            return y
        a, b = self.factors(x.dtype)
        # (N, R)
        projected = expert_linear(
            F.dropout(x, self.lora_dropout, self.training), a, None, grouping
        )
        return y + expert_linear(projected, b, None, grouping)

    def broadcast_rows(self, values: Tensor, grouping: Grouping) -> Tensor:
        """Return the values (E, out) of each row's expert, (N, out)."""
        return by_expert(values, grouping)


class LoRAEmbedding(LoRALinear):
    """LoRA for an embedding, seen as a Linear with one-hot inputs: A (R, V), initially zero, and B
    (C, R)."""

    # of the nn.Embedding
    num_embeddings: int
    embedding_dim: int

    def weight_shape(self) -> tuple[int, ...]:
        """Return (C, V), the transpose of the stored weight's shape."""
        return (self.embedding_dim, self.num_embeddings)

    def weight_matrix(self) -> Tensor:
        """Return the weight as (C, V)."""
        return self.weight.detach().mT

    def init_factors(self) -> None:
        """Initialize A to zero and B from a normal distribution, like PEFT."""
        nn.init.zeros_(self.lora_a)
        nn.init.normal_(self.lora_b)

    def add_update(self, y: Tensor, tokens: Tensor) -> Tensor:
        """Return y (..., C) plus the update for tokens (...).

        Dropout is not applied: on one-hot inputs it would drop whole tokens.
        """
        tokens = tokens.clamp(max=self.num_embeddings - 1)
        return (
            y + F.linear(F.embedding(tokens, self.lora_a.mT), self.lora_b) * self.lora_scale
        ).to(y.dtype)


def lora_class(module: nn.Module) -> type[LoRALinear]:
    """Return the mixin that adds LoRA to a module."""
    if isinstance(module, nn.Embedding):
        return LoRAEmbedding
    if isinstance(module, ExpertLinear):
        return LoRAExpertLinear
    return LoRALinear


def norm_ratios(target_norms: Tensor, norms: Tensor) -> Tensor:
    """Return the factors that scale rows from `norms` to `target_norms`, all in one shape, (out,)
    or (E, out); 1 for a row of zeros."""
    return torch.where(norms == 0, 1.0, target_norms / torch.where(norms == 0, 1.0, norms))
