"""The command `run_eval`: scores of a model and of what it came from, side by side in one table."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from litft.args import RunEvalArgs
from litft.data.load import load_data
from litft.data.samples import Sample
from litft.data.steps import Layout
from litft.evaluate import BLOCK, greedy, summed_loss
from litft.opened import Opened, open_model, source_of
from litft.runs import write_whole
from litft.tokenizer import Tokenizer


@dataclass
class Subject:
    """A model that is scored, as what is found out."""

    name: str
    scores: dict[str, float] = field(default_factory=dict)
    answers: list[str] = field(default_factory=list)  # to the examples' prompts
    errors: dict[str, float] = field(default_factory=dict)  # standard errors of scores
    harness: dict[str, Any] = field(default_factory=dict)  # the harness's own results


@dataclass(frozen=True)
class Example:
    """An example that has an answer."""

    prompt: list[int]
    expected: str
    tokens: int  # of the answer


def run_eval(args: RunEvalArgs) -> None:
    """Print the table, and answers to look at; write everything to --out."""
    source_of(args.model(args.checkpoint_dir, args.base_dir))  # what is wrong is told before anything is loaded
    if args.out and Path(args.out).exists() and not Path(args.out).is_file():
        raise ValueError(f"--out {args.out} is no file; name one")
    if args.out and not Path(args.out).parent.is_dir():
        raise ValueError(f"--out {args.out}: there is no folder {Path(args.out).parent}; make it, or name another file")
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
        write_whole(
            Path(args.out), json.dumps(_everything(args, subjects, shown), indent=2, ensure_ascii=False, default=str) + "\n"
        )


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
    if source.adapter and args.against is None and opened.model.config.vocab_size > source.config.vocab_size:
        # the base knows nothing of the new tokens: it reads with its own
        yield Subject("base"), open_model(args.model(str(source.base))), nullcontext()
    elif source.adapter and args.against is None:
        yield Subject("base"), opened, opened.as_base()
    yield Subject(name), opened, nullcontext()


@torch.no_grad()
def _measure(subject: Subject, opened: Opened, args: RunEvalArgs) -> list[tuple[str, str]]:
    """The scores on --data; returns what is asked there, and what is expected."""
    model, tokenizer = opened.model, opened.tokenizer
    data = load_data(args.data, tokenizer, model.config.vocab_size, model.config.context)
    chosen = data.val if len(data.val) else data.train
    samples = [chosen[index] for index in range(min(len(chosen), args.limit or len(chosen)))]
    batches = tqdm(Layout(rows=args.batch_size).in_blocks(samples, BLOCK, 0), f"{subject.name}: loss", disable=None)
    loss, count = summed_loss(model, batches, model.embed.weight.device)
    mean = float(loss) / float(count)
    subject.scores |= {"examples": len(samples), "loss": mean, "perplexity": math.exp(min(mean, 700))}
    examples = list(_examples(samples, tokenizer))
    if examples:
        subject.answers = _answers(subject.name, opened, examples, args)
        right = [found == example.expected for found, example in zip(subject.answers, examples, strict=True)]
        subject.scores["exact_match"] = sum(right) / len(right)
    return [(tokenizer.decode(example.prompt, skip_special=False), example.expected) for example in examples]


def _examples(samples: Sequence[Sample], tokenizer: Tokenizer) -> Iterator[Example]:
    for sample in samples:
        if sample.answer:
            prompt, expected = (ids.tolist() for ids in sample.answer)
            yield Example(prompt, tokenizer.decode(expected).strip(), len(expected))


def _answers(name: str, opened: Opened, examples: list[Example], args: RunEvalArgs) -> list[str]:
    """Greedy ones, as many at once as --batch_size."""
    lengths = [args.max_new_tokens or own.tokens + 8 for own in examples]
    asked = [greedy(opened.model, opened.tokenizer, own.prompt, most) for own, most in zip(examples, lengths, strict=True)]
    return [text.strip() for text in opened.texts(asked, args.batch_size, f"{name}: answers")]


def _harness(args: RunEvalArgs) -> Callable[[Subject, Opened], None]:
    """What has the harness ask a subject, once it is known that it has the tasks."""
    from litft.harness import known_tasks, run_tasks  # here, since the package need not be there

    manager = known_tasks(args.tasks, args.include_path)
    settings = {"num_fewshot": args.num_fewshot, "limit": args.limit, "apply_chat_template": args.chat_template}
    settings["log_samples"] = bool(args.out)

    def ask(subject: Subject, opened: Opened) -> None:
        found = run_tasks(opened, args.tasks, manager, args.batch_size, settings)
        subject.harness = {name: found[name] for name in ("results", "n-samples", "samples") if name in found}
        for task, scores in found["results"].items():
            if task in found["n-samples"]:
                subject.scores[f"{task}: examples"] = found["n-samples"][task]["effective"]
            for key, value in scores.items():  # "acc,none": a score, and the filter that answers went through
                metric, comma, through = key.partition(",")
                if comma and "_stderr" not in metric and isinstance(value, (int, float)):
                    name = f"{task}: {metric}{'' if through == 'none' else f', {through}'}"
                    subject.scores[name], error = float(value), scores.get(f"{metric}_stderr,{through}")
                    subject.errors |= {name: error} if isinstance(error, float) else {}

    return ask


def _print(subjects: list[Subject], shown: list[tuple[str, str]]) -> None:
    """A table in Markdown, and below it what was answered."""
    table = Table(box=box.MARKDOWN)
    table.add_column("")
    for subject in subjects:
        table.add_column(subject.name, justify="right")
    for name in dict.fromkeys(name for subject in subjects for name in subject.scores):
        table.add_row(name, *(_cell(subject.scores.get(name, math.nan), subject.errors.get(name)) for subject in subjects))
    console = Console(width=10_000, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(table)
    print(*filter(str.strip, captured.get().splitlines()), sep="\n")
    for number, (prompt, expected) in enumerate(shown):
        texts = {"prompt": prompt, "expected": expected} | {own.name: own.answers[number] for own in subjects if own.answers}
        wide = max(map(len, texts)) + 2
        print("", *(f"{name + ':':<{wide}}{json.dumps(text, ensure_ascii=False)}" for name, text in texts.items()), sep="\n")


def _cell(score: float, error: float | None) -> str:
    """A number; of a score with its standard error."""
    text = f"{score:,}" if isinstance(score, int) else f"{score:.4f}"
    return text if error is None else f"{text} ± {error:.4f}"


def _everything(args: RunEvalArgs, subjects: list[Subject], shown: list[tuple[str, str]]) -> dict[str, Any]:
    """For --out."""
    asked = [
        {"prompt": prompt, "expected": expected} | {own.name: own.answers[number] for own in subjects}
        for number, (prompt, expected) in enumerate(shown)
    ]
    scores = {own.name: {name: None if math.isnan(v) else v for name, v in own.scores.items()} for own in subjects}
    return {
        "flags": asdict(args),
        "scores": scores,
        "answers": asked,
        "harness": {own.name: own.harness for own in subjects if own.harness},
    }
