"""The loss of a student against the probabilities of a teacher, in chunks like the cross-entropy.

A teacher's probabilities are those of its K likeliest tokens, and of all others together. The
divergence is between these K + 1 probabilities and the student's of the same K + 1 events, which is
at most that over the whole vocabulary, and equal to it where K is the vocabulary.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from litft.model.loss import (
    LOGIT_ROWS,
    HeadGradients,
    apply_softcap,
    chunks,
    head_logits,
    is_plain,
    rows_of_a_softmax,
    scaled_gradients,
    target_indices_of,
)

# log-probabilities below it are stored as it: e^-30 is no probability that anything learns from
LOWEST = -30.0

# N target tokens, n of them in a chunk, C channels, V vocabulary, K tokens of the teacher


class TeacherTargets(NamedTuple):
    """What a teacher says of N target tokens."""

    ids: Tensor  # (N, K) int: its likeliest tokens
    # (N, K + 1): of these tokens, and of all others together; (N, K) if there are no others
    log_probs: Tensor
    is_label: Tensor  # (N,) bool: the target is from the data, so its cross-entropy counts

    def part(self, chunk: slice) -> "TeacherTargets":
        """Return those of a chunk of the targets, as the loss computes with them: probabilities
        that add up to 1, in fp32."""
        log_probs = self.log_probs[chunk].float().log_softmax(-1)
        return TeacherTargets(self.ids[chunk].long(), log_probs, self.is_label[chunk])


class TeacherQuestion(NamedTuple):
    """What is asked of a teacher: its `count` likeliest tokens among the student's vocab_size
    tokens, at a temperature."""

    count: int
    vocab_size: int
    temperature: float


class Distillation(NamedTuple):
    """The loss, a weighted sum of the cross-entropy of labels and of the divergence."""

    teacher: TeacherTargets
    label_weight: float
    teacher_weight: float
    # the divergence, see `divergence`
    beta: float
    # the student's logits are divided by it in the divergence, as the teacher's were
    temperature: float


def divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the divergence of each row, (n,), of log-probabilities (n, K).

    beta 0: forward KL, the teacher's expectation of log(teacher / student). beta 1: reverse KL, the
    student's of log(student / teacher). Between: the generalized Jensen-Shannon divergence
    (arXiv 2306.13649), beta KL(teacher | mixture) + (1 - beta) KL(student | mixture), where the
    mixture has the weight beta of the teacher.
    """
    if beta == 0:
        return _kl_divergence(teacher, student)
    if beta == 1:
        return _kl_divergence(student, teacher)
    from_student = student + math.log(1 - beta)
    from_teacher = teacher + math.log(beta)
    mixture = torch.logaddexp(from_student, from_teacher)
    of_teacher = _kl_divergence(teacher, mixture)
    of_student = _kl_divergence(student, mixture)
    return beta * of_teacher + (1 - beta) * of_student


def _kl_divergence(first: Tensor, second: Tensor) -> Tensor:
    """Return the expectation of log(first / second) under the first, (n,)."""
    differences = first - second
    return (first.exp() * differences).sum(-1)


def distillation_loss(
    hidden: Tensor,
    head: nn.Linear,
    targets: Tensor,
    how: Distillation,
    softcap: float | None = None,
    target_indices: Tensor | None = None,
) -> Tensor:
    """Return (3,) fp32: the summed loss of hidden (B, T, C) against targets (B, T), and, without a
    gradient, the summed cross-entropy of labels and the summed divergence.

    softcap, target_indices and chunks as in `litft.model.loss.summed_cross_entropy`.
    """
    if target_indices is None:
        target_indices = target_indices_of(targets)
    hidden = hidden.flatten(0, 1).index_select(0, target_indices)  # (N, C)
    targets = targets.flatten().index_select(0, target_indices)  # (N,)
    if is_plain(head):
        loss, sums = _ChunkedDistillation.apply(
            hidden, head.weight, head.bias, targets, how, softcap, torch.is_grad_enabled()
        )
        return torch.cat([loss[None], sums])
    # a head changed by a method computes its own logits, and again in the backward pass
    # the sum times 0 connects the result with `hidden` even if there is no target
    total = (hidden.sum(dtype=torch.float32) * 0.0).expand(3)
    # without targets, an empty chunk: the gradients of the head's parameters are reduced over all
    # processes, so each of them must have some
    for chunk in list(chunks(hidden)) or [slice(0, 0)]:
        part = how._replace(teacher=how.teacher.part(chunk))
        total = total + checkpoint(
            _head_losses,
            head,
            hidden[chunk],
            targets[chunk],
            part,
            softcap,
            use_reentrant=False,
        )
    return torch.cat([total[:1], total[1:].detach()])


def _head_losses(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    how: Distillation,
    softcap: float | None,
) -> Tensor:
    """Return (3,): the sums of a chunk with a head that computes its own logits."""
    return summed_losses(apply_softcap(head(hidden).float(), softcap), targets, how)


def summed_losses(logits: Tensor, targets: Tensor, how: Distillation) -> Tensor:
    """Return (3,) as `distillation_loss` does, of fp32 logits (n, V) and a `part` of the
    teacher's."""
    losses = F.cross_entropy(logits, targets, reduction="none") * how.teacher.is_label
    log_probs = F.log_softmax(logits / how.temperature, dim=-1)
    differences = divergence(
        _events(log_probs, how.teacher), how.teacher.log_probs, how.beta
    )
    sums = torch.stack([losses.sum(), differences.sum()])
    return _with_total(sums, how)


def _with_total(sums: Tensor, how: Distillation) -> Tensor:
    """Return (3,): the loss, and the sums (2,) that it consists of."""
    total = how.label_weight * sums[0] + how.teacher_weight * sums[1]
    return torch.cat([total[None], sums])


def _events(log_probs: Tensor, teacher: TeacherTargets) -> Tensor:
    """Return the log-probabilities (n, K + 1) of the teacher's events in the student, whose
    log-probabilities are (n, V)."""
    own = log_probs.gather(1, teacher.ids)
    if teacher.log_probs.size(1) == own.size(1):
        return own
    others = log_probs.scatter(1, teacher.ids, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([own, others], dim=1)


def _losses_and_gradient(
    logits: Tensor,
    targets: Tensor,
    how: Distillation,
    softcap: float | None,
    training: bool,
) -> Tensor:
    """Return (3,) of a chunk's logits (n, V); in training, replace the logits by their gradient.

    With h the gradient of the divergence with respect to the logarithms of the student's events,
    that of a logit is h of its event, times its share of the event, minus its probability times the
    sum of h.
    """
    teacher = how.teacher
    scores = apply_softcap(logits.float(), softcap)
    log_probs = scores.log_softmax(-1)
    losses = -log_probs.gather(1, targets[:, None])[:, 0] * teacher.is_label
    if how.temperature == 1:
        softened = log_probs
    else:
        softened = (scores / how.temperature).log_softmax(-1)
    events = _events(softened, teacher)
    with torch.enable_grad():
        leaf = events.detach().requires_grad_(training)
        differences = divergence(leaf, teacher.log_probs, how.beta).sum()
    sums = torch.stack([losses.sum(), differences.detach()])
    if not training:
        return _with_total(sums, how)

    # of the divergence
    (slopes,) = torch.autograd.grad(differences, leaf)  # (n, K + 1)
    num_ids = teacher.ids.size(1)
    gradient = softened.exp() * -slopes.sum(1, keepdim=True)
    gradient.scatter_add_(1, teacher.ids, slopes[:, :num_ids])
    if slopes.size(1) > num_ids:
        # the shares of the other tokens in their event; the teacher's tokens have none
        shares = (softened - events[:, num_ids:]).exp_().scatter_(1, teacher.ids, 0.0)
        gradient += shares.mul_(slopes[:, num_ids:])
    gradient *= how.teacher_weight / how.temperature

    # of the cross-entropy: softmax minus the label
    if how.label_weight:
        weights = how.label_weight * teacher.is_label[:, None].float()
        gradient += log_probs.exp_().mul_(weights)
        gradient.scatter_add_(1, targets[:, None], -weights)
    if softcap is not None:
        # the derivative of c tanh(z / c) is 1 - tanh(z / c)^2
        gradient *= 1 - (scores / softcap) ** 2
    logits.copy_(gradient)
    return _with_total(sums, how)


class _ChunkedDistillation(torch.autograd.Function):
    """Computes the gradients together with the loss, so that each chunk's logits are computed once
    and then freed."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        how: Distillation,
        softcap: float | None,
        training: bool,
    ) -> tuple[Tensor, Tensor]:
        needed = [needs_grad and training for needs_grad in ctx.needs_input_grad[:3]]
        total = torch.zeros(3, device=hidden.device, dtype=torch.float32)
        grads = HeadGradients(hidden, weight, bias, needed)
        rows = rows_of_a_softmax(hidden, weight.size(0))
        for chunk in chunks(hidden):
            logits = head_logits(hidden[chunk], weight, bias)
            # as many tokens as keep a softmax small
            for start in range(chunk.start, min(chunk.stop, len(hidden)), rows):
                part = slice(start, min(start + rows, chunk.stop))
                total += _losses_and_gradient(
                    logits[start - chunk.start : part.stop - chunk.start],
                    targets[part],
                    how._replace(teacher=how.teacher.part(part)),
                    softcap,
                    any(needed),
                )
            grads.add(chunk, logits)  # which now contain their gradient
            # free them before the next chunk is computed
            del logits
        grads.save(ctx, bias)
        sums = total[1:].clone()
        ctx.mark_non_differentiable(sums)
        return total[0].clone(), sums

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _: Tensor):
        # one None for each argument after the bias
        return *scaled_gradients(ctx, grad), *[None] * 4


@torch.no_grad()
def likeliest_tokens(
    hidden: Tensor,
    head: nn.Module,
    question: TeacherQuestion,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens of a teacher, (N, K) int32, and their log-probabilities with that
    of all others together, (N, K + 1) fp16, for hidden (N, C).

    Without others there are no (N, K + 1), but (N, K) log-probabilities.
    """
    all_ids = []
    all_log_probs = []
    # of no tokens, one empty chunk
    for chunk in hidden.split(LOGIT_ROWS):
        logits = apply_softcap(head(chunk).float(), softcap)[:, : question.vocab_size]
        log_probs = (logits / question.temperature).log_softmax(-1)
        own, ids = log_probs.topk(min(question.count, logits.size(1)), dim=-1)
        if ids.size(1) < question.vocab_size:
            others = log_probs.scatter_(1, ids, -torch.inf).logsumexp(1, keepdim=True)
            own = torch.cat([own, others], dim=1)
        all_ids.append(ids.int())
        all_log_probs.append(own.clamp(min=LOWEST).half())
    return torch.cat(all_ids), torch.cat(all_log_probs)
