"""The command `run_eval`: scores of a model and of what it came from, side by side in one table."""

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from litft.args import RunEvalArgs
from litft.data.dataset import load_data
from litft.data.encoder import Sample
from litft.data.packing import Layout
from litft.data.tokenizer import Tokenizer
from litft.evaluation.examples import Name, chosen_data, compared, readable_by_all, same_length, scored, warn_of_trained
from litft.inference.generation import Completion
from litft.inference.session import Session, open_session, source_of
from litft.run_dir import write_whole
from litft.training.validation import BLOCK, greedy, summed_loss


@dataclass
class ScoredModel:
    """A model that is scored, as what is found out."""

    name: str
    scores: dict[str, float] = field(default_factory=dict)
    answers: dict[Name, str] = field(default_factory=dict)  # to the examples' prompts
    errors: dict[str, float] = field(default_factory=dict)  # standard errors of scores
    harness: dict[str, Any] = field(default_factory=dict)  # the harness's own results


@dataclass(frozen=True)
class EvalExample:
    """An example that has an answer."""

    name: Name
    prompt: list[int]
    expected: str
    tokens: int  # of the answer


def run_eval(args: RunEvalArgs) -> None:
    """Print the table, and answers to look at; write everything to --out."""
    source = source_of(args.model(args.checkpoint_dir, args.base_dir))  # what is wrong is told before anything is loaded
    if args.against not in (None, "none") and source_of(args.model(args.against)).folder == source.folder:
        raise ValueError(f"--against {args.against} is the model itself; name another one, or none")
    if args.out and Path(args.out).exists() and not Path(args.out).is_file():
        raise ValueError(f"--out {args.out} is no file; name one")
    if args.out and not Path(args.out).parent.is_dir():
        raise ValueError(f"--out {args.out}: there is no folder {Path(args.out).parent}; make it, or name another file")
    args = replace(args, data=chosen_data(args, source))
    ask = _harness(args) if args.tasks else None
    sources, readable = compared(args, source), set()
    if args.data.path:
        args = replace(args, data=same_length(args.data, sources))
        readable = readable_by_all(args, sources)
        warn_of_trained(args, source, readable)
    subjects, shown = [], {}
    for subject, session, answering in _subjects(args, apart=len(sources) > 1):
        with answering:
            if args.data.path:
                shown |= _measure(subject, session, args, readable)
            if ask:
                ask(subject, session)
        subjects.append(subject)
    _print(subjects, dict(islice(shown.items(), args.show)))
    if args.out:
        write_whole(
            Path(args.out), json.dumps(_everything(args, subjects, shown), indent=2, ensure_ascii=False, default=str) + "\n"
        )


def _subjects(args: RunEvalArgs, apart: bool) -> Iterator[tuple[ScoredModel, Session, AbstractContextManager]]:
    """What is scored, one after the other: first what the model is held against. Inside the third it answers.

    apart: an adapter's base is loaded by itself, since it reads with its own tokens.
    """
    asked = args.model(args.checkpoint_dir, args.base_dir)
    source = source_of(asked)
    name = "tuned" if source.adapter and args.against in (None, "none") else source.name
    if args.against not in (None, "none"):
        other = args.model(args.against)
        theirs = source_of(other).name
        yield ScoredModel(theirs if theirs != name else args.against), open_session(other), nullcontext()
    session = open_session(asked)
    if source.adapter and args.against is None and apart:
        yield ScoredModel("base"), open_session(args.model(str(source.base))), nullcontext()
    elif source.adapter and args.against is None:
        yield ScoredModel("base"), session, session.as_base()
    yield ScoredModel(name), session, nullcontext()


@torch.no_grad()
def _measure(subject: ScoredModel, session: Session, args: RunEvalArgs, names: set[Name]) -> dict[Name, tuple[str, str]]:
    """The scores on --data, of the examples of these names; returns what each asks, and what is expected."""
    model, tokenizer = session.model, session.tokenizer
    chosen = scored(load_data(args.data, tokenizer, model.config.vocab_size, model.config.max_positions), args.data)
    of_all = [(name, index) for index, name in enumerate(chosen.names) if name in names or not name[0]][: args.limit]
    samples = [chosen[index] for _, index in of_all]
    batches = tqdm(Layout(rows=args.batch_size).in_blocks(samples, BLOCK, 0), f"{subject.name}: loss", disable=None)
    loss, count = summed_loss(model, batches, model.device)
    mean = float(loss) / float(count)
    subject.scores |= {"examples": len(samples), "loss": mean, "perplexity": math.exp(min(mean, 700))}
    named = [(name, sample) for (name, _), sample in zip(of_all, samples, strict=True) if sample.answer]
    examples = [_example(name, sample, tokenizer) for name, sample in named]
    if examples:
        said = _answers(subject.name, session, examples, args)
        subject.answers = {name: answer.text.strip() for name, answer in said.items()}
        right = [said[each.name].ended and subject.answers[each.name] == each.expected for each in examples]
        subject.scores |= {"answers": len(right), "exact_match": sum(right) / len(right)}
    elif any(turn for _, turn, _ in names):
        print(f"{subject.name}: no answer is whole within the length limit, so there is no exact match", file=sys.stderr)
    return {each.name: (tokenizer.decode(each.prompt, skip_special=False), each.expected) for each in examples}


def _example(name: Name, sample: Sample, tokenizer: Tokenizer) -> EvalExample:
    prompt, expected = (ids.tolist() for ids in sample.answer)
    return EvalExample(name, prompt, tokenizer.decode(expected).strip(), len(expected))


def _answers(name: str, session: Session, examples: list[EvalExample], args: RunEvalArgs) -> dict[Name, Completion]:
    """Greedy ones, as many at once as --batch_size."""
    lengths = [args.max_new_tokens or own.tokens + 8 for own in examples]
    asked = [greedy(session.model, session.tokenizer, own.prompt, most) for own, most in zip(examples, lengths, strict=True)]
    said = session.generate(asked, args.batch_size, f"{name}: answers")
    return {example.name: answer for example, answer in zip(examples, said, strict=True)}


def _harness(args: RunEvalArgs) -> Callable[[ScoredModel, Session], None]:
    """What has the harness ask a subject, once it is known that it has the tasks."""
    from litft.evaluation.lm_eval_model import known_tasks, run_tasks  # here, since the package need not be there

    manager = known_tasks(args.tasks, args.include_path)
    settings = {"num_fewshot": args.num_fewshot, "limit": args.limit, "apply_chat_template": args.chat_template}
    settings["log_samples"] = bool(args.out)

    def ask(subject: ScoredModel, session: Session) -> None:
        found = run_tasks(session, args.tasks, manager, args.batch_size, settings)
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


def _print(subjects: list[ScoredModel], shown: dict[Name, tuple[str, str]]) -> None:
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
    for example, (prompt, expected) in shown.items():
        said = {own.name: own.answers[example] for own in subjects if example in own.answers}
        texts = {"prompt": prompt, "expected": expected} | said
        wide = max(map(len, texts)) + 2
        print("", *(f"{name + ':':<{wide}}{json.dumps(text, ensure_ascii=False)}" for name, text in texts.items()), sep="\n")


def _cell(score: float, error: float | None) -> str:
    """A number; of a score with its standard error."""
    text = f"{score:,}" if isinstance(score, int) else f"{score:.4f}"
    return text if error is None else f"{text} ± {error:.4f}"


def _everything(args: RunEvalArgs, subjects: list[ScoredModel], shown: dict[Name, tuple[str, str]]) -> dict[str, Any]:
    """For --out."""
    asked = [
        {"prompt": prompt, "expected": expected} | {own.name: own.answers.get(example) for own in subjects}
        for example, (prompt, expected) in shown.items()
    ]
    scores = {own.name: {name: None if math.isnan(v) else v for name, v in own.scores.items()} for own in subjects}
    return {
        "flags": asdict(args),
        "scores": scores,
        "answers": asked,
        "harness": {own.name: own.harness for own in subjects if own.harness},
    }
