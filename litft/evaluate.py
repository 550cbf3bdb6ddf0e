"""Scores on held-out examples: the mean loss a token, and answers that are right to the letter."""

import torch
from lightning_fabric import Fabric

from litft.data.samples import Sample
from litft.data.steps import in_order
from litft.generate import prompt_ids, stream_ids
from litft.model import GPT
from litft.tokenizer import Tokenizer


@torch.no_grad()
def validation_loss(fabric: Fabric, model: GPT, samples: list[Sample], rows: int, max_batches: int | None) -> float:
    """Summed loss over the count of target tokens, both over all ranks; `rows` samples a micro-batch."""
    if max_batches is not None:
        samples = samples[: max_batches * rows * fabric.world_size]
    training = model.training
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=fabric.device)
    for batch in in_order(samples, rows, fabric.world_size, fabric.global_rank):
        batch = batch.to(fabric.device)
        loss, count = model(batch.tokens, targets=batch.targets)
        totals += torch.stack((loss.double(), count.double()))
    model.train(training)
    loss, count = fabric.all_reduce(totals, reduce_op="sum").tolist()
    return loss / count


def exact_match(fabric: Fabric, model: GPT, tokenizer: Tokenizer, samples: list[Sample]) -> float:
    """The part of the samples whose last answer is generated greedily to the letter, surrounding whitespace aside."""
    training = model.training
    model.eval()
    right = torch.zeros((), dtype=torch.float64, device=fabric.device)
    for sample in samples[fabric.global_rank :: fabric.world_size]:
        expected = sample.messages[-1]["content"]
        right += answer(model, tokenizer, sample, len(tokenizer.encode(expected, bos=False)) + 8) == expected.strip()
    model.train(training)
    return float(fabric.all_reduce(right, reduce_op="sum")) / len(samples)


def answer(model: GPT, tokenizer: Tokenizer, sample: Sample, max_new_tokens: int) -> str:
    """The model's greedy answer in place of a sample's last message."""
    ids = prompt_ids(tokenizer, sample.messages[:-1])[-model.config.context + 1 :]
    new = stream_ids(model, ids, max_new_tokens=max_new_tokens, stop_ids=tokenizer.stop_ids)
    return tokenizer.decode(list(new)).strip()
