"""Scores on held-out examples: the mean loss a token, and answers that are right to the letter; and answers to look at."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from lightning_fabric import Fabric
from torch import Tensor

from litft.args import EvalArgs
from litft.data.dataset import DataSplits
from litft.data.encoder import Sample
from litft.data.packing import Layout, MicroBatch
from litft.data.tokenizer import Tokenizer
from litft.distributed.process_group import HostGroup, join_uneven
from litft.inference.decoder import Decoder
from litft.inference.generation import Completion, Request, prompt_ids, whole_answers
from litft.inference.sampling import Sampling
from litft.model.transformer import GPT
from litft.run_dir import write_whole
from litft.training.metrics import Row

BLOCK = 64  # samples a rank holds and lays out at once
LOOKED_AT = 16  # validation samples, of which the first with an answer is the prompt of sample answers


@torch.no_grad()
def validation_loss(
    fabric: Fabric, model: GPT, samples: Sequence[Sample], layout: Layout, pause: Callable[[], None] = lambda: None
) -> float:
    """Summed loss over the count of target tokens, both over all ranks. pause: called before each micro-batch."""
    training = model.training
    model.eval()
    batches = layout.in_blocks(samples, BLOCK * fabric.world_size, fabric.global_rank)
    totals = summed_loss(model, batches, fabric.device, pause)
    model.train(training)
    loss, count = fabric.all_reduce(totals, reduce_op="sum").tolist()
    return loss / count


def summed_loss(
    model: GPT, batches: Iterable[MicroBatch], device: torch.device, pause: Callable[[], None] = lambda: None
) -> Tensor:
    """The loss and the count of targets (2,), in fp64, each summed over micro-batches. pause: called before each."""
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        pause()
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
    pause: Callable[[], None] = lambda: None,
) -> tuple[int, int]:
    """How many of the samples' last whole answers are generated greedily to the letter (stripped), and of how many.

    rows: how many answers each rank makes at once. pause: called before they are begun, by all ranks alike.
    """
    training = model.training
    model.eval()
    right = count = 0
    ranks, rank = fabric.world_size, fabric.global_rank
    for start in range(0, len(samples), ranks * rows):
        pause()
        mine = [samples[index] for index in range(start + rank, min(start + ranks * rows, len(samples)), ranks)]
        asked = [[ids.tolist() for ids in sample.answer] for sample in mine if sample.answer]
        with join_uneven(model, hosts):
            found = greedy_answers(model, tokenizer, [(prompt, len(expected) + 8) for prompt, expected in asked])
        pairs = zip(found, asked, strict=True)
        right += sum(said.ended and said.text.strip() == tokenizer.decode(ids).strip() for said, (_, ids) in pairs)
        count += len(asked)
    model.train(training)
    totals = torch.tensor((right, count), dtype=torch.float64, device=fabric.device)
    right, count = map(int, fabric.all_reduce(totals, reduce_op="sum").tolist())
    return right, count


def spread(samples: Sequence[Sample], most: int) -> Sequence[Sample]:
    """At most this many samples, taken evenly from all of them, so that each of several files has its part."""
    if most >= len(samples):
        return samples
    return [samples[number * len(samples) // most] for number in range(most)]


class Validation:
    """A run's validations one after the other: losses by step, and the model's answers to the same prompts each time."""

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
        self.pause: Callable[[], None] = lambda: None  # called again and again; it may raise
        self.losses: dict[int, float] = {}  # by step
        self.matches: dict[int, float] = {}
        self.asked = 0  # examples with an answer to match
        self.answers: list[dict[str, str | int]] = []  # step, prompt, answer
        self.prompts = list(_prompts(args, tokenizer, data)) if args.max_new_tokens else []

    def go_on(self, rows: list[Row]) -> None:
        """Take over what an interrupted run's rows, and the answers beside them, say."""
        self.losses = {int(row["step"]): row["val_loss"] for row in rows if "val_loss" in row}
        self.matches = {int(row["step"]): row["exact_match"] for row in rows if "exact_match" in row}
        lines = self.path.read_text("utf-8", errors="replace").split("\n") if self.path.is_file() else []
        last = max((int(row["step"]) for row in rows), default=-1)
        self.answers = [item for item in filter(None, map(_kept_answer, lines)) if item["step"] <= last]
        self.fabric.barrier()  # all have read it
        self._write()

    def measured(self, size: int) -> int:
        """How many samples are measured, where `size` are a batch."""
        return min(len(self.samples), (self.args.max_batches or len(self.samples)) * size)

    def measure(self, step: int, layout: Layout, size: int, final: bool) -> Row:
        """The scores after `step` steps; `size` samples are a batch. Exact match is only measured at the `final` ones."""
        samples = spread(self.samples, self.measured(size))
        if step not in self.losses:
            self.losses[step] = validation_loss(self.fabric, self.model, samples, layout, self.pause)
        loss = self.losses[step]
        values = {"val_loss": loss, "val_perplexity": math.exp(min(loss, 700))}
        if final and self.args.exact_match:
            parts = self.fabric, self.hosts, self.model, self.tokenizer
            right, self.asked = exact_match(*parts, samples, layout.rows, self.pause)
            if self.asked:
                values["exact_match"] = self.matches[step] = right / self.asked
        return values

    def ask(self, step: int) -> Iterator[dict[str, str | int]]:
        """The model's answers after `step` steps."""
        training = self.model.training
        self.model.eval()
        for text, ids in self.prompts:
            self.pause()
            (new,) = greedy_answers(self.model, self.tokenizer, [(ids, self.args.max_new_tokens)])
            self.answers.append({"step": step, "prompt": text, "answer": new.text.strip()})
            yield self.answers[-1]
        self.model.train(training)
        self._write()

    def _write(self) -> None:
        if self.fabric.global_rank == 0 and (self.answers or self.path.is_file()):
            write_whole(self.path, "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in self.answers))

    @property
    def best(self) -> int | None:
        """The step with the lowest loss, the first of equals; None before any."""
        return min(filter(None, self.losses), key=lambda step: (self.losses[step], step), default=None)

    @property
    def stale(self) -> int:
        """How many validations there were since the best."""
        best = self.best or 0
        return sum(step > best for step in self.losses)


def _kept_answer(line: str) -> dict[str, str | int] | None:
    """A line of samples.jsonl; None where a crash has left something else."""
    try:
        item = json.loads(line)
        return item if isinstance(item["step"], int) and {"prompt", "answer"} <= item.keys() else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _prompts(args: EvalArgs, tokenizer: Tokenizer, data: DataSplits) -> Iterator[tuple[str, list[int]]]:
    """What to ask, as text and as the model reads it; ValueError where the model cannot read it."""
    if not args.prompts and (found := next((s.answer for s in islice(data.val, LOOKED_AT) if s.answer), None)):
        ids = found[0].tolist()
        yield tokenizer.decode(ids).strip(), ids
    plain = all(set(report.formats) <= {"text"} for report in data.reports.values())
    for item in args.prompts:
        for text in filter(None, map(str.strip, _texts(item))):
            yield text, prompt_ids(tokenizer, text if plain else [{"role": "user", "content": text}])


def _texts(item: str) -> list[str]:
    """A prompt, or those of a file; ValueError for a file that is none of text, or not there."""
    try:
        if Path(item).is_file():
            return Path(item).read_text("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--eval.prompts {item} is no text file in UTF-8 ({error.reason} at byte {error.start})") from None
    except OSError:  # a text too long for a file's name
        return [item]
    if item.endswith((".txt", ".json", ".jsonl")) and " " not in item:
        raise ValueError(f"--eval.prompts {item}: no such file")
    return [item]


def greedy_answers(model: GPT, tokenizer: Tokenizer, asked: list[tuple[list[int], int]]) -> list[Completion]:
    """The model's greedy answers to prompts, each with the number of tokens that it may have; all are made at once."""
    requests = [greedy(model, tokenizer, prompt, most) for prompt, most in asked]
    if not requests:
        return []
    decoder = Decoder(model, len(requests), max(len(request.ids) + request.max_new_tokens for request in requests))
    return whole_answers(decoder, tokenizer, requests)


def greedy(model: GPT, tokenizer: Tokenizer, prompt: list[int], max_new_tokens: int) -> Request:
    """For the likeliest answer to a prompt, the end of which counts where it is longer than the context."""
    return Request(prompt[-model.config.max_positions + 1 :], max_new_tokens, Sampling(temperature=0), tokenizer.stop_ids)
