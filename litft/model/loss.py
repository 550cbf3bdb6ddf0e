"""Cross-entropy of target tokens, summed or each, in chunks, so that the logits of a whole batch
never exist at once."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from litft.model.device_type import device_type, is_planned

IGNORED = -100
# rows of logits per chunk: 1,024 x 128,256 x 2 bytes = 0.26 GB for Llama 3 in bf16
LOGIT_ROWS = 1024
# fp32 logits per softmax: on a CPU they stay in its cache between passes
SOFTMAX_CHUNK = {"cpu": 2**20, "cuda": 2**24}

# B batch, T tokens, N supervised tokens, n of them in a chunk, C channels, V vocabulary


def summed_cross_entropy(
    hidden: Tensor,
    head: nn.Linear,
    targets: Tensor,
    softcap: float | None = None,
    smoothing: float = 0.0,
    target_indices: Tensor | None = None,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the loss of hidden (B, T, C) against targets (B, T), where IGNORED marks positions
    without a target.

    softcap: logits become softcap * tanh(logit / softcap) (Gemma 2, arXiv 2408.00118). smoothing:
    the share of each target's probability that is spread over the whole vocabulary (label
    smoothing, arXiv 1512.00567, section 7).
    target_indices: (N,), indices of the targets among the flattened positions; computing them here
    needs a GPU sync.
    compiled: compile the softmax and its gradient, where both are needed and the head is plain.

    Returns the *sum* over target tokens (fp32 scalar) and their count (int64 scalar): a mean over
    micro-batches, packs and ranks is correct only if it divides by the global count. Positions
    without a target are dropped before the head. A frozen head gets no gradient buffer. The tests
    compare with the unchunked form.
    """
    count = (targets != IGNORED).sum()
    if target_indices is None:
        target_indices = target_indices_of(targets)

    # positions without a target are dropped here: the head is not computed for them
    hidden = hidden.flatten(0, 1).index_select(0, target_indices)
    targets = targets.flatten().index_select(0, target_indices)  # (N, C), (N,)

    if is_plain(head):
        training = torch.is_grad_enabled()
        # autograd functions take no keywords
        loss = _ChunkedLoss.apply(
            hidden,
            head.weight,
            head.bias,
            targets,
            softcap,
            smoothing,
            training,
            compiled and training,
        )
        return loss, count
    # a head changed by a method computes its own logits; recomputing them in backward limits memory
    # to one chunk
    # The sum times 0 connects the result with `hidden` even if there is no target.
    total = hidden.sum(dtype=torch.float32) * 0.0
    for losses in _head_losses(head, hidden, targets, softcap, smoothing=smoothing):
        total = total + losses.sum()
    return total, count


def token_cross_entropy(
    hidden: Tensor,
    head: nn.Linear,
    targets: Tensor,
    softcap: float | None = None,
    target_indices: Tensor | None = None,
    compiled: bool = False,
    temperature: float = 1.0,
) -> Tensor:
    """Compute the loss of each target token, (N,) fp32, in the order of the flattened positions.

    temperature: the logits are divided by it. Other arguments and chunks as in
    `summed_cross_entropy`. For losses of whole sequences, such as DPO's,
    whose gradient for a
    token depends on all tokens: it is known only in the backward pass. A frozen head's gradients
    are computed in the forward pass and scaled in the backward pass; a trained head's logits are
    computed again.
    """
    if target_indices is None:
        target_indices = target_indices_of(targets)
    hidden = hidden.flatten(0, 1).index_select(0, target_indices)  # (N, C)
    targets = targets.flatten().index_select(0, target_indices)  # (N,)
    if is_plain(head):
        training = torch.is_grad_enabled()
        bias = head.bias
        # c tanh((W x + b) / c) / t = (c / t) tanh((W x / t + b / t) / (c / t))
        if temperature != 1.0:
            hidden = hidden / temperature
            bias = bias / temperature if bias is not None else None
            softcap = softcap / temperature if softcap is not None else None
        return _ChunkedTokenLoss.apply(
            hidden, head.weight, bias, targets, softcap, training, compiled and training
        )
    losses = _head_losses(
        head, hidden, targets, softcap, smoothing=0.0, temperature=temperature
    )
    return torch.cat(list(losses))


def _head_losses(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    softcap: float | None,
    smoothing: float,
    temperature: float = 1.0,
) -> Iterator[Tensor]:
    """Yield the losses of each chunk of tokens with a head that computes its own logits, which
    backward computes again."""
    for hidden_chunk, target_chunk in zip(
        hidden.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True
    ):
        yield checkpoint(
            _head_loss,
            head,
            hidden_chunk,
            target_chunk,
            softcap,
            smoothing,
            temperature,
            use_reentrant=False,
        )


def target_indices_of(targets: Tensor) -> Tensor:
    """Return the indices of the targets among the flattened positions, (N,) int64."""
    return (targets != IGNORED).flatten().nonzero()[:, 0]


def is_plain(head: nn.Module) -> bool:
    """Return whether a head only applies its weight and bias."""
    # LoRA and others subclass the head at run time: the class that defines `forward` decides
    owner = next(cls for cls in type(head).__mro__ if "forward" in vars(cls))
    return vars(owner).get("is_plain", owner is nn.Linear) and not head.weight.is_mkldnn


def _head_loss(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    softcap: float | None,
    smoothing: float,
    temperature: float,
) -> Tensor:
    return F.cross_entropy(
        apply_softcap(head(hidden).float(), softcap) / temperature,
        targets,
        reduction="none",
        label_smoothing=smoothing,
    )


def apply_softcap(logits: Tensor, softcap: float | None) -> Tensor:
    """Limit logits of any shape smoothly to (-softcap, softcap)."""
    if softcap is None:
        return logits
    return softcap * torch.tanh(logits / softcap)


def _softmax_loss(
    logits: Tensor, targets: Tensor, softcap: float | None, smoothing: float, training: bool
) -> Tensor:
    """Return the fp32 losses (n,) of logits (n, V); in training, replace the logits by their
    gradient."""
    scores = apply_softcap(logits.float(), softcap)
    if softcap is None or not training:
        softcap_slope = None
    else:
        # the derivative of c tanh(z / c) is 1 - tanh(z / c)^2
        softcap_slope = 1 - (scores / softcap) ** 2

    # in place: torch's logsumexp would allocate a copy
    scores -= scores.amax(-1, keepdim=True)
    # the loss is log(sum(exp(scores))) minus the expected score of the target distribution
    losses = -(1 - smoothing) * scores.gather(-1, targets[:, None])[:, 0]
    if smoothing:
        losses -= smoothing * scores.mean(-1)
    sums = scores.exp_().sum(-1, keepdim=True)
    losses += sums.log()[:, 0]

    # gradient of the logits: softmax minus the target distribution
    if training:
        scores /= sums
        scores[torch.arange(len(targets), device=targets.device), targets] -= (
            1.0 - smoothing
        )
        if smoothing:
            scores -= smoothing / scores.size(-1)
        if softcap_slope is not None:
            scores *= softcap_slope
        # of fp32 logits without softcap, `scores` is the same tensor
        if scores is not logits:
            logits.copy_(scores)
    return losses


def fused_softmax_loss(
    logits: Tensor, targets: Tensor, softcap: float | None, smoothing: float, training: bool
) -> Tensor:
    """Return the fp32 losses (n,) of logits (n, V) against targets (n,), like `_softmax_loss`; in
    training, replace the logits by their gradient.

    A compiler fuses these operations into few kernels without fp32 logits in memory.
    """
    scores = apply_softcap(logits.float(), softcap)
    log_sums = scores.logsumexp(-1, keepdim=True)
    losses = (log_sums - (1 - smoothing) * scores.gather(-1, targets[:, None]))[:, 0]
    if smoothing:
        losses = losses - smoothing * scores.mean(-1)
    if training:
        is_target = torch.arange(scores.size(1), device=targets.device) == targets[:, None]
        grad = (
            (scores - log_sums).exp()
            - smoothing / scores.size(1)
            - torch.where(is_target, 1 - smoothing, 0.0)
        )
        if softcap is not None:
            # the derivative of the soft cap
            grad = grad * (1 - (scores / softcap) ** 2)
        logits.copy_(grad)
    return losses


@cache
def _compiled_softmax_loss() -> Callable[..., Tensor]:
    return torch.compile(fused_softmax_loss, dynamic=True)


def _chunk_losses(
    logits: Tensor,
    targets: Tensor,
    softcap: float | None,
    smoothing: float,
    training: bool,
    compiled: bool,
) -> Tensor:
    """Return the losses (n,) of a chunk's logits (n, V); in training, replace the logits by their
    gradient."""
    if compiled:
        # nothing to plan: compiled code has no fp32 logits in memory
        if is_planned():
            return logits.new_zeros(len(logits), dtype=torch.float32)
        # only the number of tokens varies
        torch._dynamo.mark_static(logits, 1)
        return _compiled_softmax_loss()(logits, targets, softcap, smoothing, training)

    count = rows_of_a_softmax(logits, logits.size(1))
    parts = zip(logits.split(count), targets.split(count), strict=True)
    return torch.cat([_softmax_loss(*part, softcap, smoothing, training) for part in parts])


def rows_of_a_softmax(values: Tensor, vocab_size: int) -> int:
    """Return how many tokens keep a softmax below its limit of fp32 numbers, on the device of
    `values`."""
    if device_type(values) == "cpu":
        limit = SOFTMAX_CHUNK["cpu"]
    else:
        limit = SOFTMAX_CHUNK["cuda"]
    return max(1, limit // vocab_size)


def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the logits (n, V) of hidden (n, C), in its dtype."""
    weight = weight.to(hidden.dtype)
    if bias is not None:
        bias = bias.to(hidden.dtype)
    return F.linear(hidden, weight, bias)


def chunks(hidden: Tensor) -> Iterator[slice]:
    """Yield the slices of LOGIT_ROWS tokens that hidden (N, C) is divided into."""
    for start in range(0, hidden.size(0), LOGIT_ROWS):
        yield slice(start, start + LOGIT_ROWS)


class HeadGradients:
    """The gradients of a head's input, weight and bias, accumulated over chunks of tokens; None
    where not needed."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> None:
        # needed: which of the three
        self.inputs = hidden, weight
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        # fp32, since a bf16 sum would lose the contribution of later chunks
        if needed[1]:
            self.weight = torch.zeros_like(weight, dtype=torch.float32)
        else:
            self.weight = None
        if bias is not None and needed[2]:
            self.bias = torch.zeros_like(bias, dtype=torch.float32)
        else:
            self.bias = None

    def add(self, chunk: slice, d_logits: Tensor) -> None:
        """Add the gradients of a chunk of tokens, whose logits have the gradient d_logits (n,
        V)."""
        hidden, weight = self.inputs
        if self.bias is not None:
            self.bias += d_logits.sum(0, dtype=torch.float32)
        if self.hidden is not None:
            torch.mm(d_logits, weight.to(hidden.dtype), out=self.hidden[chunk])
        if self.weight is not None:
            self.weight += d_logits.t() @ hidden[chunk]

    def save(self, ctx, bias: Tensor | None) -> None:
        """Keep the gradients in the context of an autograd function, for `scaled_gradients`."""
        ctx.save_for_backward(self.hidden, self.weight, self.bias)
        ctx.dtypes = self.inputs[1].dtype, bias.dtype if bias is not None else None


def scaled_gradients(
    ctx, grad: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of a head's input, weight and bias, which are saved for a loss with
    weight 1, for one with the gradient `grad`."""
    d_hidden, d_weight, d_bias = ctx.saved_tensors
    return (
        d_hidden * grad.to(d_hidden.dtype) if d_hidden is not None else None,
        (d_weight * grad).to(ctx.dtypes[0]) if d_weight is not None else None,
        (d_bias * grad).to(ctx.dtypes[1]) if d_bias is not None else None,
    )


class _ChunkedLoss(torch.autograd.Function):
    """Computes the gradients together with the loss, so that each chunk's logits are computed once
    and then freed.

    The softmax and all sums are in fp32. Follows Cut Cross-Entropy (arXiv 2411.09009) and Liger
    (arXiv 2410.10989).
    """

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        softcap: float | None,
        smoothing: float,
        training: bool,
        compiled: bool,
    ) -> Tensor:
        needed = [needs_grad and training for needs_grad in ctx.needs_input_grad[:3]]
        total = torch.zeros((), device=hidden.device, dtype=torch.float32)
        grads = HeadGradients(hidden, weight, bias, needed)
        for chunk in chunks(hidden):
            logits = head_logits(hidden[chunk], weight, bias)
            total += _chunk_losses(
                logits, targets[chunk], softcap, smoothing, any(needed), compiled
            ).sum()
            grads.add(chunk, logits)  # which now contain their gradient
            # free them before the next chunk is computed
            del logits
        grads.save(ctx, bias)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        # one None for each argument after the bias
        return *scaled_gradients(ctx, grad), *[None] * 5


class _ChunkedTokenLoss(torch.autograd.Function):
    """Computes each token's loss, and its gradient for one that arrives with the backward pass."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        softcap: float | None,
        training: bool,
        compiled: bool,
    ) -> Tensor:
        # Each token's weight in the loss is known in the backward pass only. A frozen head's input
        # gradients can be scaled then; a trained head's sum over tokens cannot.
        trains_head = any(ctx.needs_input_grad[1:3]) and training
        keeps_grad = ctx.needs_input_grad[0] and training and not trains_head
        losses = torch.empty(hidden.size(0), device=hidden.device, dtype=torch.float32)
        grads = HeadGradients(hidden, weight, bias, (keeps_grad, False, False))
        for chunk in chunks(hidden):
            logits = head_logits(hidden[chunk], weight, bias)
            losses[chunk] = _chunk_losses(
                logits, targets[chunk], softcap, 0.0, keeps_grad, compiled and keeps_grad
            )
            grads.add(chunk, logits)  # which now contain their gradient
            # free them before the next chunk is computed
            del logits
        ctx.options = softcap, compiled
        if trains_head:
            ctx.save_for_backward(hidden, weight, bias, targets)
        else:
            ctx.save_for_backward(grads.hidden)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        if len(ctx.saved_tensors) == 1:
            (d_hidden,) = ctx.saved_tensors
            if d_hidden is not None:
                # frozen head: one factor for each token's gradient
                d_hidden.mul_(grad.to(d_hidden.dtype)[:, None])
            return d_hidden, *[None] * 6

        # trained head: compute the logits again, and weight the gradient of each token's
        hidden, weight, bias, targets = ctx.saved_tensors
        softcap, compiled = ctx.options
        grads = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        for chunk in chunks(hidden):
            logits = head_logits(hidden[chunk], weight, bias)
            _chunk_losses(logits, targets[chunk], softcap, 0.0, True, compiled)
            logits *= grad[chunk, None].to(logits.dtype)
            grads.add(chunk, logits)
            del logits
        if grads.weight is not None:
            d_weight = grads.weight.to(weight.dtype)
        else:
            d_weight = None
        d_bias = grads.bias.to(bias.dtype) if grads.bias is not None else None
        return grads.hidden, d_weight, d_bias, *[None] * 4
