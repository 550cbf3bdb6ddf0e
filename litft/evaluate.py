"""Scores on held-out examples: the mean loss a token, and answers that are right to the letter."""

from collections.abc import Sequence

import torch
from lightning_fabric import Fabric

from litft.data.samples import Sample
from litft.data.steps import Layout
from litft.generate import stream_ids
from litft.model import GPT
from litft.tokenizer import Tokenizer

BLOCK = 64  # samples a rank holds and lays out at once


@torch.no_grad()
def validation_loss(fabric: Fabric, model: GPT, samples: Sequence[Sample], layout: Layout) -> float:
    """Summed loss over the count of target tokens, both over all ranks."""
    training = model.training
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=fabric.device)
    for batch in layout.in_blocks(samples, BLOCK * fabric.world_size, fabric.global_rank):
        batch = batch.to(fabric.device)
        loss, count = model(batch.tokens, **batch.inputs())
        totals += torch.stack((loss.double(), count.double()))
    model.train(training)
    loss, count = fabric.all_reduce(totals, reduce_op="sum").tolist()
    return loss / count


def exact_match(fabric: Fabric, model: GPT, tokenizer: Tokenizer, samples: Sequence[Sample]) -> float:
    """The part of the samples whose last answer is generated greedily to the letter, surrounding whitespace aside.

    A text without answers, or with an answer cut off before it begins, counts as not right.
    """
    training = model.training
    model.eval()
    right = torch.zeros((), dtype=torch.float64, device=fabric.device)
    for index in range(fabric.global_rank, len(samples), fabric.world_size):
        if (sample := samples[index]).answer:
            prompt, expected = (ids.tolist() for ids in sample.answer)
            found = answer(model, tokenizer, prompt, len(expected) + 8)
            right += found == tokenizer.decode(expected).strip()
    model.train(training)
    return float(fabric.all_reduce(right, reduce_op="sum")) / len(samples)


def answer(model: GPT, tokenizer: Tokenizer, prompt: list[int], max_new_tokens: int) -> str:
    """The model's greedy answer to a prompt, the end of which counts where it is longer than the context."""
    ids = prompt[-model.config.context + 1 :]
    new = stream_ids(model, ids, max_new_tokens=max_new_tokens, stop_ids=tokenizer.stop_ids)
    return tokenizer.decode(list(new)).strip()
