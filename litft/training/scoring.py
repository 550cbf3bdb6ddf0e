"""Scoring: the mean loss per target token, and exact match of greedy answers, over all processes."""

from collections.abc import Callable, Iterable, Sequence

import torch
from lightning_fabric import Fabric
from torch import Tensor

from litft.data.encoder import Sample
from litft.data.packing import Layout, MicroBatch
from litft.data.tokenizer import Tokenizer
from litft.distributed.process_group import HostGroup, join_uneven
from litft.inference.decoder import Decoder
from litft.inference.generation import Completion, Request, generate_completions
from litft.inference.sampling import Sampling
from litft.model.transformer import GPT, eval_mode
from litft.training.objectives import Objective

BLOCK = 64  # samples that a rank loads and lays out at once


@torch.no_grad()
def validation_scores(
    fabric: Fabric,
    objective: Objective,
    model: GPT,
    samples: Sequence[Sample],
    layout: Layout,
    before_batch: Callable[[], None] = lambda: None,
) -> list[float]:
    """Return the objective's loss and scores over the samples of all ranks. before_batch: called before each micro-batch."""
    with eval_mode(model):
        objective.before_step(fabric, model, samples, layout, before_batch)
        totals = objective.totals(samples)
        values = torch.zeros(1 + len(objective.scores), dtype=torch.float64, device=fabric.device)
        for batch in layout.iter_batches(samples, BLOCK * fabric.world_size, fabric.global_rank):
            before_batch()
            values += objective(model, batch.to(fabric.device), totals)
    return fabric.all_reduce(values, reduce_op="sum").tolist()


def summed_loss(model: GPT, batches: Iterable[MicroBatch], device: torch.device) -> Tensor:
    """Return (2,) in fp64: the loss and the target count, summed over micro-batches."""
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        batch = batch.to(device)
        loss, count = model(batch.tokens, **batch.inputs())
        totals += torch.stack((loss.double(), count.double()))
    return totals


def exact_match(
    fabric: Fabric,
    hosts: HostGroup,
    model: GPT,
    tokenizer: Tokenizer,
    samples: Sequence[Sample],
    rows: int = 1,
    before_batch: Callable[[], None] = lambda: None,
) -> tuple[int, int]:
    """Return how many samples' answers greedy decoding reproduces exactly (after stripping), and the number of answers.

    rows: answers that each rank generates at once. before_batch: called by all ranks before each of these batches.
    """
    matches = count = 0
    ranks, rank = fabric.world_size, fabric.global_rank
    with eval_mode(model):
        for start in range(0, len(samples), ranks * rows):
            before_batch()
            block = [samples[index] for index in range(start + rank, min(start + ranks * rows, len(samples)), ranks)]
            answered = [sample.answer for sample in block if sample.answer and sample.desirable is not False]
            questions = [[ids.tolist() for ids in answer] for answer in answered]
            with join_uneven(model, hosts):
                answers = greedy_answers(model, tokenizer, [(prompt, len(expected) + 8) for prompt, expected in questions])
            pairs = zip(answers, questions, strict=True)
            matches += sum(is_exact(answer, tokenizer.decode(ids)) for answer, (_, ids) in pairs)
            count += len(questions)
    totals = torch.tensor((matches, count), dtype=torch.float64, device=fabric.device)
    matches, count = map(int, fabric.all_reduce(totals, reduce_op="sum").tolist())
    return matches, count


def is_exact(answer: Completion, expected: str) -> bool:
    """Return whether an answer has ended by itself and is the expected one, apart from white space at its ends."""
    return answer.ended and answer.text.strip() == expected.strip()


def evenly_spaced(samples: Sequence[Sample], max_count: int) -> Sequence[Sample]:
    """Return at most `max_count` samples at even distances, so that every data file has its share."""
    if max_count >= len(samples):
        return samples
    return [samples[number * len(samples) // max_count] for number in range(max_count)]


def greedy_answers(model: GPT, tokenizer: Tokenizer, prompts: list[tuple[list[int], int]]) -> list[Completion]:
    """Return the model's greedy answers to pairs of (prompt, max_new_tokens), generated in one batch."""
    requests = [greedy_request(model, tokenizer, prompt, max_new_tokens) for prompt, max_new_tokens in prompts]
    if not requests:
        return []
    decoder = Decoder(model, len(requests), max(len(request.ids) + request.max_new_tokens for request in requests))
    return generate_completions(decoder, tokenizer, requests)


def greedy_request(model: GPT, tokenizer: Tokenizer, prompt: list[int], max_new_tokens: int) -> Request:
    """Return a request for a greedy answer; only the end of a prompt longer than the context is used."""
    return Request(prompt[-model.config.max_positions + 1 :], max_new_tokens, Sampling(temperature=0), tokenizer.stop_ids)
