"""Log-probabilities of the answers of examples, which preferences compare."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from litft.data.packing import BatchLayout, MicroBatch
from litft.data.sample import Sample
from litft.model.transformer import eval_mode


def sequence_log_probs(model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return the summed log-probability of each sequence's targets, (D,) fp64, and the number of
    targets, (D,) fp64."""
    losses = model(batch.tokens, **batch.inputs(), reduction="none")  # (N,)
    # a process without samples, which must still take part in the backward pass
    if batch.sequences is None:
        return losses.double()[:0], losses.double()[:0]
    # the number of each target's sequence, (N,)
    numbers = batch.sequences.numbers.flatten().index_select(0, batch.target_indices)
    zeros = torch.zeros_like(batch.sequences.references)
    return zeros.index_add(0, numbers, -losses.double()), zeros.index_add(
        0, numbers, torch.ones_like(losses.double())
    )


def sample_batches(
    samples: Sequence[Sample], layout: BatchLayout, rank: int
) -> Iterator[tuple[list[int], MicroBatch]]:
    """Yield a rank's micro-batches, each with the numbers of its samples in the order of its
    rows."""
    planned = layout.plan_samples(samples)
    for rows in planned[rank :: layout.ranks]:
        samples_of_rows = []
        order: list[int] = []
        for row in rows:
            samples_of_rows.append([samples[index] for index in row])
            order.extend(row)
        yield order, layout.collate_rows(samples_of_rows)


@torch.no_grad()
def document_log_probs(
    model: nn.Module,
    samples: Sequence[Sample],
    layout: BatchLayout,
    device: torch.device,
    rank: int = 0,
    before_batch: Callable[[], object] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """Return the summed log-probability of each document's targets, and the number of targets: both
    (S, D) fp64.

    For S samples with D documents each. Rows of samples that another rank computes are 0.
    """
    log_probs, lengths = torch.zeros(
        2,
        len(samples),
        len(samples[0].document_lengths),
        dtype=torch.float64,
        device=device,
    )
    with eval_mode(model):
        for order, batch in sample_batches(samples, layout, rank):
            before_batch()
            batch = batch.to(device)
            # of all documents of the micro-batch, one after the other
            batch_log_probs, batch_lengths = sequence_log_probs(model, batch)
            log_probs[order] = batch_log_probs.view(-1, log_probs.size(1))
            lengths[order] = batch_lengths.view(-1, log_probs.size(1))
    return log_probs, lengths


def sample_log_probs(
    model: nn.Module,
    samples: Sequence[Sample],
    layout: BatchLayout,
    device: torch.device,
    rank: int = 0,
    before_batch: Callable[[], object] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """Return the summed log-probability of each sample's targets, and their number: both (S,) fp64.

    The rest is as in `document_log_probs`.
    """
    # each its own sequence
    alone = [replace(sample, documents=(sample.tokens.numel(),)) for sample in samples]
    log_probs, lengths = document_log_probs(
        model, alone, layout, device, rank, before_batch
    )
    return log_probs[:, 0], lengths[:, 0]


@torch.no_grad()
def target_log_probs(
    model: nn.Module,
    samples: Sequence[Sample],
    layout: BatchLayout,
    device: torch.device,
    rank: int = 0,
) -> list[Tensor | None]:
    """Return the log-probability of each target of each sample, (N,) fp32; None for a sample that
    another rank computes."""
    log_probs: list[Tensor | None] = [None] * len(samples)
    with eval_mode(model):
        for order, batch in sample_batches(samples, layout, rank):
            batch = batch.to(device)
            losses = model(batch.tokens, **batch.inputs(), reduction="none")  # (N,)
            # the host keeps them until a micro-batch needs them
            parts = (-losses).cpu().split([samples[index].supervised for index in order])
            for index, part in zip(order, parts, strict=True):
                log_probs[index] = part
    return log_probs


def label_margins(
    rewards: Tensor, desirable: Tensor, weights: Sequence[float] = ()
) -> Tensor:
    """Return values whose mean, with these weights, is how much higher the mean reward of desirable
    answers is than that of undesirable ones: (S,), from (S,) each. Of answers of one kind: the
    rewards with the label's sign.

    weights: how many answers each stands for; empty: 1. The values are the margin with each
    answer's influence on it, so that their spread is that of the margin: a change that all rewards
    have in common is in none.
    """
    counts = torch.ones_like(rewards)
    if weights:
        counts = torch.as_tensor(weights, dtype=rewards.dtype, device=rewards.device)
    of_desirable = counts * desirable
    of_undesirable = counts * ~desirable
    if not of_desirable.any() or not of_undesirable.any():
        return torch.where(desirable, rewards, -rewards)
    high = (of_desirable * rewards).sum() / of_desirable.sum()
    low = (of_undesirable * rewards).sum() / of_undesirable.sum()
    influence = torch.where(
        desirable,
        (rewards - high) * (counts.sum() / of_desirable.sum()),
        (low - rewards) * (counts.sum() / of_undesirable.sum()),
    )
    return high - low + influence


# differences of log-probabilities below it are rounding errors: before the first step, all are 0
TIE = 1e-5


def wins(margins: Tensor) -> Tensor:
    """Return 1 for each pair whose chosen answer has the higher value, one half for a tie, else 0:
    (P,) fp64, of differences (P,)."""
    return (margins > TIE).double() + (margins.abs() <= TIE).double() / 2
