"""The memory of the loss and of its gradient, by running them on fake tensors."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from litft.model.device_type import device_type
from litft.model.distillation import Distillation, TeacherTargets, distillation_loss
from litft.model.loss import LOGIT_ROWS, summed_cross_entropy, token_cross_entropy
from litft.model.transformer import GPT
from litft.training.memory.activations import Shape
from litft.training.memory.allocations import AllocationTracker, stepping_in_backward
from litft.training.optimizers.rounded import OptimizerInBackward

# measured bytes: the plans that a run compares have the same head
LOSS_CACHE: dict[tuple, int] = {}


def trace_loss(
    model: GPT,
    shape: Shape,
    dtype: torch.dtype,
    optimizer: OptimizerInBackward | None,
    compiled: bool,
) -> int:
    """Return the temporary bytes of one micro-batch's loss and its gradient."""
    num_tokens = shape.rows * shape.tokens
    head = model.lm_head
    count = min(shape.max_targets or num_tokens, num_tokens)
    rows = min(count, LOGIT_ROWS)  # the loss is computed chunk by chunk
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]

    def run() -> None:
        hidden = torch.empty(1, rows, model.config.dim, dtype=dtype, requires_grad=True)
        if model.config.tied:
            # a tied weight is stepped later, when the embedding's gradient is added
            stepping = nullcontext()
        else:
            stepping = stepping_in_backward(optimizer)
        with stepping:
            _loss(model, shape, hidden, compiled).backward()

    if optimizer and trained:
        with AllocationTracker():
            # the first step creates the optimizer's state
            run()
    if shape.accumulated:
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)

    # the bytes do not depend on anything else, but for an optimizer: such peaks are not cached
    key = (
        rows,
        dtype,
        device_type(head.weight),
        compiled,
        shape.per_token,
        shape.teacher_tokens,
        shape.accumulated,
        model.config.logit_softcap,
        *_head_facts(head),
    )
    peak = None
    if optimizer is None:
        peak = LOSS_CACHE.get(key)
    if peak is None:
        # without a cached value, the loss is traced once
        with AllocationTracker() as tracker:
            run()
        peak = tracker.peak
    if optimizer is None:
        LOSS_CACHE[key] = peak
    for parameter in trained:
        parameter.grad = None
    # hidden states outside the traced chunk: all of them,
    # those with a target, and the gradient of the latter
    other_rows = (num_tokens - rows) + 2 * (count - rows)
    return peak + other_rows * model.config.dim * dtype.itemsize


def _loss(model: GPT, shape: Shape, hidden: Tensor, compiled: bool) -> Tensor:
    """Return the loss of hidden (1, N, C), which all have targets, in the form that the objective
    needs."""
    count = hidden.size(1)
    targets = torch.zeros(1, count, dtype=torch.int64)
    softcap = model.config.logit_softcap
    options: dict[str, Any] = {"softcap": softcap, "target_indices": torch.arange(count)}
    if shape.teacher_tokens:
        how = _distillation(shape.teacher_tokens, count)
        return distillation_loss(hidden, model.lm_head, targets, how, **options)[0]
    options["compiled"] = compiled
    if shape.per_token:
        return token_cross_entropy(hidden, model.lm_head, targets, **options).sum()
    return summed_cross_entropy(hidden, model.lm_head, targets, **options)[0]


def _distillation(top_k: int, count: int) -> Distillation:
    """Return the loss of `count` targets against a teacher's top_k tokens."""
    # one token fewer than the vocabulary may have, so that there are always others
    num_ids = max(1, top_k - 1)
    teacher = TeacherTargets(
        torch.zeros(count, num_ids, dtype=torch.int32),
        torch.zeros(count, num_ids + 1, dtype=torch.float16),
        torch.ones(count, dtype=torch.bool),
    )
    # the temperature has a softmax of its own, so it is the larger case
    return Distillation(teacher, 0.5, 0.5, beta=0.5, temperature=2.0)


def _head_facts(head: nn.Module) -> Iterator[Any]:
    """Yield all of a head that the bytes of a loss depend on."""
    yield tuple(map(type, head.modules()))
    yield getattr(head, "lora_dropout", 0) > 0
    for parameter in head.parameters():
        yield parameter.shape, parameter.dtype, parameter.requires_grad
