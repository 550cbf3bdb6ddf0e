"""Scores on held-out examples: the mean loss a token, and answers that are right to the letter; and answers to look at."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from lightning_fabric import Fabric

from litft.args import EvalArgs
from litft.data.load import Data
from litft.data.samples import Sample
from litft.data.steps import Layout
from litft.generate import prompt_ids, stream_ids
from litft.metrics import Row
from litft.model import GPT
from litft.runs import write_whole
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


class Validation:
    """A run's validations one after the other: losses by step, and the model's answers to the same prompts each time."""

    def __init__(self, fabric: Fabric, model: GPT, tokenizer: Tokenizer, data: Data, args: EvalArgs, path: Path) -> None:
        self.fabric, self.model, self.tokenizer, self.args, self.path = fabric, model, tokenizer, args, path
        self.samples = data.val
        self.losses: dict[int, float] = {}  # by step
        self.matches: dict[int, float] = {}
        self.answers: list[dict[str, str | int]] = []  # step, prompt, answer
        self.prompts = list(_prompts(args, tokenizer, data)) if args.max_new_tokens else []

    def go_on(self, rows: list[Row]) -> None:
        """Take over what an interrupted run's rows, and the answers beside them, say."""
        self.losses = {int(row["step"]): row["val_loss"] for row in rows if "val_loss" in row}
        self.matches = {int(row["step"]): row["exact_match"] for row in rows if "exact_match" in row}
        if self.path.is_file():
            lines = self.path.read_text("utf-8").splitlines()
            self.answers = [item for item in map(json.loads, lines) if item["step"] in self.losses]
            self._write()

    def measure(self, step: int, layout: Layout, size: int, final: bool) -> Row:
        """The scores after `step` steps; `size` samples are a batch. Exact match is only measured at the `final` ones."""
        most = self.args.max_batches and self.args.max_batches * size
        if step not in self.losses:
            self.losses[step] = validation_loss(self.fabric, self.model, self.samples[:most], layout)
        loss = self.losses[step]
        values = {"val_loss": loss, "val_perplexity": math.exp(min(loss, 700))}
        if final and self.args.exact_match:
            values["exact_match"] = exact_match(self.fabric, self.model, self.tokenizer, self.samples)
            self.matches[step] = values["exact_match"]
        return values

    def ask(self, step: int) -> Iterator[dict[str, str | int]]:
        """The model's answers after `step` steps."""
        training = self.model.training
        self.model.eval()
        for text, ids in self.prompts:
            new = answer(self.model, self.tokenizer, ids, self.args.max_new_tokens)
            self.answers.append({"step": step, "prompt": text, "answer": new})
            yield self.answers[-1]
        self.model.train(training)
        if self.prompts and self.fabric.global_rank == 0:
            self._write()

    def _write(self) -> None:
        write_whole(self.path, "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in self.answers))

    @property
    def best(self) -> int | None:
        """The step with the lowest loss, the first of equals; None before any."""
        return min(filter(None, self.losses), key=lambda step: (self.losses[step], step), default=None)

    @property
    def stale(self) -> int:
        """How many validations there were since the best."""
        return sum(step > (self.best or 0) for step in self.losses)


def _prompts(args: EvalArgs, tokenizer: Tokenizer, data: Data) -> Iterator[tuple[str, list[int]]]:
    """What to ask, as text and as the model reads it; ValueError where the model cannot read it."""
    if not args.prompts and len(data.val) and (found := data.val[0].answer):
        ids = found[0].tolist()
        yield tokenizer.decode(ids).strip(), ids
    plain = all(set(report.formats) <= {"text"} for report in data.reports.values())
    for item in args.prompts:
        lines = Path(item).read_text("utf-8").splitlines() if Path(item).is_file() else [item]
        for text in filter(None, map(str.strip, lines)):
            yield text, prompt_ids(tokenizer, text if plain else [{"role": "user", "content": text}])


def answer(model: GPT, tokenizer: Tokenizer, prompt: list[int], max_new_tokens: int) -> str:
    """The model's greedy answer to a prompt, the end of which counts where it is longer than the context."""
    ids = prompt[-model.config.context + 1 :]
    new = stream_ids(model, ids, max_new_tokens=max_new_tokens, stop_ids=tokenizer.stop_ids)
    return tokenizer.decode(list(new)).strip()
