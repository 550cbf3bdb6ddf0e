"""The command `run_eval`: scores of a model and of what it came from, side by side in one table."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from litft.args import RunEvalArgs
from litft.data.load import load_data
from litft.data.samples import Sample
from litft.data.steps import Layout
from litft.evaluate import BLOCK, greedy, summed_loss
from litft.opened import Opened, open_model, source_of
from litft.runs import write_whole
from litft.streaming import answers
from litft.tokenizer import Tokenizer


@dataclass
class Subject:
    """A model that is scored, as what is found out."""

    name: str
    scores: dict[str, float] = field(default_factory=dict)
    answers: list[str] = field(default_factory=list)  # to the examples' prompts
    harness: dict[str, Any] = field(default_factory=dict)  # the harness's own results


@dataclass(frozen=True)
class Example:
    """An example that has an answer."""

    prompt: list[int]
    expected: str
    tokens: int  # of the answer


def run_eval(args: RunEvalArgs) -> None:
    """Print the table, and answers to look at; write everything to --out."""
    ask = _harness(args) if args.tasks else None
    subjects, shown = [], []
    for subject, opened, answering in _subjects(args):
        with answering:
            shown = _measure(subject, opened, args) if args.data.path else shown
            if ask:
                ask(subject, opened)
        subjects.append(subject)
    _print(subjects, shown[: args.show])
    if args.out:
        write_whole(Path(args.out), json.dumps(_everything(subjects, shown), indent=2, ensure_ascii=False) + "\n")


def _subjects(args: RunEvalArgs) -> Iterator[tuple[Subject, Opened, AbstractContextManager]]:
    """What is scored, one after the other: first what the model is held against. Inside the third it answers."""
    asked = args.model(args.checkpoint_dir, args.base_dir)
    source = source_of(asked)
    name = "tuned" if source.adapter and args.against in (None, "none") else source.name
    if args.against not in (None, "none"):
        other = args.model(args.against)
        theirs = source_of(other).name
        yield Subject(theirs if theirs != name else args.against), open_model(other), nullcontext()
    opened = open_model(asked)
    if source.adapter and args.against is None:
        yield Subject("base"), opened, opened.as_base()
    yield Subject(name), opened, nullcontext()


@torch.no_grad()
def _measure(subject: Subject, opened: Opened, args: RunEvalArgs) -> list[tuple[str, str]]:
    """The scores on --data; returns what is asked there, and what is expected."""
    model, tokenizer = opened.model, opened.tokenizer
    data = load_data(args.data, tokenizer, model.config.vocab_size, model.config.context)
    chosen = data.val if len(data.val) else data.train
    samples = [chosen[index] for index in range(min(len(chosen), args.limit or len(chosen)))]
    loss, count = summed_loss(model, Layout(rows=args.batch_size).in_blocks(samples, BLOCK, 0), model.embed.weight.device)
    mean = float(loss) / float(count)
    subject.scores |= {"examples": len(samples), "loss": mean, "perplexity": math.exp(min(mean, 700))}
    examples = list(_examples(samples, tokenizer))
    if examples:
        subject.answers = _answers(opened, examples, args)
        right = [found == example.expected for found, example in zip(subject.answers, examples, strict=True)]
        subject.scores["exact_match"] = sum(right) / len(right)
    return [(tokenizer.decode(example.prompt).strip(), example.expected) for example in examples]


def _examples(samples: Sequence[Sample], tokenizer: Tokenizer) -> Iterator[Example]:
    for sample in samples:
        if sample.answer:
            prompt, expected = (ids.tolist() for ids in sample.answer)
            yield Example(prompt, tokenizer.decode(expected).strip(), len(expected))


def _answers(opened: Opened, examples: list[Example], args: RunEvalArgs) -> list[str]:
    """Greedy ones, as many at once as --batch_size."""
    model, tokenizer = opened.model, opened.tokenizer
    asked = [greedy(model, tokenizer, own.prompt, args.max_new_tokens or own.tokens + 8) for own in examples]
    capacity = max(len(request.ids) + request.max_new_tokens for request in asked)
    decoder, texts = opened.decoder(min(args.batch_size, len(asked)), capacity), [""] * len(asked)
    for number, piece in answers(decoder, tokenizer, asked):
        texts[number] += piece
    return [text.strip() for text in texts]


def _harness(args: RunEvalArgs) -> Callable[[Subject, Opened], None]:
    """What has the harness ask a subject, once it is known that it has the tasks."""
    from litft.harness import known_tasks, run_tasks  # here, since the package need not be there

    manager = known_tasks(args.tasks, args.include_path)
    settings = {"num_fewshot": args.num_fewshot, "limit": args.limit, "apply_chat_template": args.chat_template}

    def ask(subject: Subject, opened: Opened) -> None:
        subject.harness = run_tasks(opened, args.tasks, manager, args.batch_size, settings)["results"]
        for task, found in subject.harness.items():
            for key, value in found.items():  # "acc,none": a score, and the filter that answers went through
                if "," in key and "_stderr" not in key and isinstance(value, float):
                    subject.scores[f"{task}: {key.removesuffix(',none')}"] = value

    return ask


def _print(subjects: list[Subject], shown: list[tuple[str, str]]) -> None:
    """A table in Markdown, and below it what was answered."""
    table = Table(box=box.MARKDOWN)
    table.add_column("")
    for subject in subjects:
        table.add_column(subject.name, justify="right")
    for name in dict.fromkeys(name for subject in subjects for name in subject.scores):
        numbers = [subject.scores.get(name, math.nan) for subject in subjects]
        table.add_row(name, *(f"{number:,}" if isinstance(number, int) else f"{number:.4f}" for number in numbers))
    console = Console(width=10_000, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(table)
    print(*filter(str.strip, captured.get().splitlines()), sep="\n")
    for number, (prompt, expected) in enumerate(shown):
        texts = {"prompt": prompt, "expected": expected} | {own.name: own.answers[number] for own in subjects if own.answers}
        print("", *(f"{name + ':':<10} {json.dumps(text, ensure_ascii=False)}" for name, text in texts.items()), sep="\n")


def _everything(subjects: list[Subject], shown: list[tuple[str, str]]) -> dict[str, Any]:
    """For --out."""
    asked = [
        {"prompt": prompt, "expected": expected} | {own.name: own.answers[number] for own in subjects}
        for number, (prompt, expected) in enumerate(shown)
    ]
    scores = {own.name: own.scores for own in subjects}
    return {"scores": scores, "answers": asked, "harness": {own.name: own.harness for own in subjects if own.harness}}
