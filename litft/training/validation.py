"""Scores on the validation set: the mean loss per target token and exact match; and sample answers to look at."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from lightning_fabric import Fabric
from torch import Tensor

from litft.args import EvalArgs
from litft.atomic import atomic_write
from litft.data.dataset import DataSplits
from litft.data.encoder import Sample
from litft.data.packing import Layout, MicroBatch
from litft.data.tokenizer import Tokenizer
from litft.distributed.process_group import HostGroup, join_uneven
from litft.inference.decoder import Decoder
from litft.inference.generation import Completion, Request, generate_completions, prompt_ids
from litft.inference.sampling import Sampling
from litft.model.transformer import GPT
from litft.training.metrics import Row

BLOCK = 64  # samples that a rank loads and lays out at once
PROMPT_CANDIDATES = 16  # first validation samples, among which a default prompt is searched


@torch.no_grad()
def validation_loss(
    fabric: Fabric, model: GPT, samples: Sequence[Sample], layout: Layout, before_batch: Callable[[], None] = lambda: None
) -> float:
    """Return the mean loss per target token over all ranks. before_batch: called before each micro-batch."""
    training = model.training
    model.eval()
    batches = layout.iter_batches(samples, BLOCK * fabric.world_size, fabric.global_rank)
    totals = summed_loss(model, batches, fabric.device, before_batch)
    model.train(training)
    loss, count = fabric.all_reduce(totals, reduce_op="sum").tolist()
    return loss / count


def summed_loss(
    model: GPT, batches: Iterable[MicroBatch], device: torch.device, before_batch: Callable[[], None] = lambda: None
) -> Tensor:
    """Return (2,) in fp64: the loss and the target count, summed over micro-batches. before_batch: called before each."""
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        before_batch()
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
    training = model.training
    model.eval()
    matches = count = 0
    ranks, rank = fabric.world_size, fabric.global_rank
    for start in range(0, len(samples), ranks * rows):
        before_batch()
        local_samples = [samples[index] for index in range(start + rank, min(start + ranks * rows, len(samples)), ranks)]
        questions = [[ids.tolist() for ids in sample.answer] for sample in local_samples if sample.answer]
        with join_uneven(model, hosts):
            answers = greedy_answers(model, tokenizer, [(prompt, len(expected) + 8) for prompt, expected in questions])
        pairs = zip(answers, questions, strict=True)
        matches += sum(is_exact(answer, tokenizer.decode(ids)) for answer, (_, ids) in pairs)
        count += len(questions)
    model.train(training)
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


class Validation:
    """The validations of a run: scores by step, and the model's answers to the same prompts each time."""

    def __init__(
        self,
        fabric: Fabric,
        hosts: HostGroup,
        model: GPT,
        tokenizer: Tokenizer,
        data: DataSplits,
        args: EvalArgs,
        path: Path,
    ) -> None:
        self.fabric, self.hosts, self.model = fabric, hosts, model
        self.tokenizer, self.args, self.path = tokenizer, args, path
        self.samples = data.val
        self.before_batch: Callable[[], None] = lambda: None  # called before each batch; it may raise
        self.losses: dict[int, float] = {}  # by step
        self.matches: dict[int, float] = {}  # exact match by step
        self.num_answers = 0  # examples with an answer to match
        self.answers: list[dict[str, str | int]] = []  # step, prompt, answer
        self.prompts = list(_prompts(args, tokenizer, data)) if args.max_new_tokens else []

    def restore(self, rows: list[Row]) -> None:
        """Restore scores and sample answers from an interrupted run's metrics rows and samples.jsonl."""
        self.losses = {int(row["step"]): row["val_loss"] for row in rows if "val_loss" in row}
        self.matches = {int(row["step"]): row["exact_match"] for row in rows if "exact_match" in row}
        lines = self.path.read_text("utf-8", errors="replace").split("\n") if self.path.is_file() else []
        last = max((int(row["step"]) for row in rows), default=-1)
        self.answers = [item for item in filter(None, map(_parse_answer, lines)) if item["step"] <= last]
        self.fabric.barrier()  # all ranks have read the file
        self._write()

    def num_samples(self, batch_size: int) -> int:
        """Return the number of samples of a validation with batches of `batch_size`."""
        return min(len(self.samples), (self.args.max_batches or len(self.samples)) * batch_size)

    def measure(self, step: int, layout: Layout, batch_size: int, with_exact_match: bool) -> Row:
        """Return the scores after `step` steps. Exact match is measured only if `with_exact_match`."""
        samples = evenly_spaced(self.samples, self.num_samples(batch_size))
        if step not in self.losses:
            self.losses[step] = validation_loss(self.fabric, self.model, samples, layout, self.before_batch)
        loss = self.losses[step]
        values = {"val_loss": loss, "val_perplexity": math.exp(min(loss, 700))}
        if with_exact_match and self.args.exact_match:
            setup = self.fabric, self.hosts, self.model, self.tokenizer
            matches, self.num_answers = exact_match(*setup, samples, layout.rows, self.before_batch)
            if self.num_answers:
                values["exact_match"] = self.matches[step] = matches / self.num_answers
        return values

    def generate_answers(self, step: int) -> Iterator[dict[str, str | int]]:
        """Generate and yield the model's answers to the prompts after `step` steps, and write them to samples.jsonl."""
        training = self.model.training
        self.model.eval()
        for text, ids in self.prompts:
            self.before_batch()
            (completion,) = greedy_answers(self.model, self.tokenizer, [(ids, self.args.max_new_tokens)])
            self.answers.append({"step": step, "prompt": text, "answer": completion.text.strip()})
            yield self.answers[-1]
        self.model.train(training)
        self._write()

    def _write(self) -> None:
        if self.fabric.global_rank == 0 and (self.answers or self.path.is_file()):
            atomic_write(self.path, "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in self.answers))

    @property
    def best(self) -> int | None:
        """Return the first step with the lowest loss; None if no step has one."""
        return min(filter(None, self.losses), key=lambda step: (self.losses[step], step), default=None)

    @property
    def stale(self) -> int:
        """Return the number of validations since the best one."""
        best = self.best or 0
        return sum(step > best for step in self.losses)


def _parse_answer(line: str) -> dict[str, str | int] | None:
    """Parse a line of samples.jsonl; return None for a line damaged by a crash."""
    try:
        item = json.loads(line)
        return item if isinstance(item["step"], int) and {"prompt", "answer"} <= item.keys() else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _prompts(args: EvalArgs, tokenizer: Tokenizer, data: DataSplits) -> Iterator[tuple[str, list[int]]]:
    """Yield the prompts as text and as token ids. Raises ValueError if the model cannot read one."""
    if not args.prompts and (question := next((s.answer for s in islice(data.val, PROMPT_CANDIDATES) if s.answer), None)):
        ids = question[0].tolist()
        yield tokenizer.decode(ids).strip(), ids
    is_text = all(set(report.formats) <= {"text"} for report in data.reports.values())
    for item in args.prompts:
        for text in filter(None, map(str.strip, _texts(item))):
            yield text, prompt_ids(tokenizer, text if is_text else [{"role": "user", "content": text}])


def _texts(item: str) -> list[str]:
    """Return the prompt itself, or the lines of a file. Raises ValueError if the file does not exist or is not text."""
    try:
        if Path(item).is_file():
            return Path(item).read_text("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--eval.prompts {item} is not a UTF-8 text file ({error.reason} at byte {error.start})") from None
    except OSError:  # the prompt is too long to be a file name
        return [item]
    if item.endswith((".txt", ".json", ".jsonl")) and " " not in item:
        raise ValueError(f"--eval.prompts {item}: no such file")
    return [item]


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
