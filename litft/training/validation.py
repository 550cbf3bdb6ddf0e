"""The validations of a run: its scores by step, and sample answers to look at."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from lightning_fabric import Fabric

from litft.args import EvalArgs, PreferenceArgs
from litft.atomic import atomic_write
from litft.data.dataset import DataSplits
from litft.data.encoder import Sample
from litft.data.packing import Layout
from litft.data.tokenizer import Tokenizer
from litft.distributed.process_group import HostGroup
from litft.inference.generation import prompt_ids
from litft.model.transformer import GPT, eval_mode
from litft.training.metrics import Row
from litft.training.objectives import Objective, Supervised
from litft.training.scoring import evenly_spaced, exact_match, greedy_answers, validation_scores

PROMPT_CANDIDATES = 16  # first validation samples, among which a default prompt is searched


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
        objective: Objective | None = None,
    ) -> None:
        self.fabric, self.hosts, self.model = fabric, hosts, model
        self.objective = objective or Supervised(PreferenceArgs())
        self.tokenizer, self.args, self.path = tokenizer, args, path
        self.samples: Sequence[Sample] = data.val
        self.before_batch: Callable[[], None] = lambda: None  # called before each batch; it may raise
        self.losses: dict[int, float] = {}  # by step
        self.scores: dict[int, Row] = {}  # the objective's other scores, by step
        self.matches: dict[int, float] = {}  # exact match by step
        self.num_answers = 0  # examples with an answer to match
        self.answers: list[dict[str, str | int]] = []  # step, prompt, answer
        self.prompts = list(_prompts(args, tokenizer, data)) if args.max_new_tokens else []

    def restore(self, rows: list[Row]) -> None:
        """Restore scores and sample answers from an interrupted run's metrics rows and samples.jsonl."""
        self.losses = {int(row["step"]): row["val_loss"] for row in rows if "val_loss" in row}
        self.matches = {int(row["step"]): row["exact_match"] for row in rows if "exact_match" in row}
        names = {f"val_{name}" for name in self.objective.scores}
        self.scores = {int(row["step"]): {n: row[n] for n in names & row.keys()} for row in rows if "val_loss" in row}
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
            subject = self.fabric, self.objective, self.model
            self.losses[step], *scores = validation_scores(*subject, samples, layout, self.before_batch)
            names = (f"val_{name}" for name in self.objective.scores)
            self.scores[step] = {n: score for n, score in zip(names, scores, strict=True) if not math.isnan(score)}
        loss = self.losses[step]
        values = {"val_loss": loss} | self.scores[step]
        if self.objective.data == "supervised":
            values["val_perplexity"] = math.exp(min(loss, 700))
        if with_exact_match and self.args.exact_match:
            setup = self.fabric, self.hosts, self.model, self.tokenizer
            matches, self.num_answers = exact_match(*setup, samples, layout.rows, self.before_batch)
            if self.num_answers:
                values["exact_match"] = self.matches[step] = matches / self.num_answers
        return values

    def generate_answers(self, step: int) -> Iterator[dict[str, str | int]]:
        """Generate and yield the model's answers to the prompts after `step` steps, and write them to samples.jsonl."""
        for text, ids in self.prompts:
            self.before_batch()
            with eval_mode(self.model):
                (completion,) = greedy_answers(self.model, self.tokenizer, [(ids, self.args.max_new_tokens)])
            self.answers.append({"step": step, "prompt": text, "answer": completion.text.strip()})
            yield self.answers[-1]
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
