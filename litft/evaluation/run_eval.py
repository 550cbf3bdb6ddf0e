"""The command `run_eval`: the scores of a model and its base, side by side in one table."""

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
from litft.atomic import atomic_write
from litft.data.dataset import load_data
from litft.data.packing import Layout
from litft.data.sample import Sample
from litft.data.tokenizer import Tokenizer
from litft.evaluation.examples import (
    Name,
    compared_sources,
    kind_of,
    readable_by_all,
    resolve_data,
    scored_samples,
    warn_if_trained_on,
    with_shared_length,
)
from litft.evaluation.preferences import PreferenceScores
from litft.inference.generation import Completion
from litft.inference.session import Session, open_session, source_of
from litft.model.loss import IGNORED
from litft.training.scoring import BLOCK, greedy_request, is_exact, summed_loss


@dataclass
class ScoredModel:
    """The scores and answers of one model."""

    name: str
    scores: dict[str, float] = field(default_factory=dict)
    answers: dict[Name, str] = field(default_factory=dict)  # by example
    errors: dict[str, float] = field(default_factory=dict)  # standard errors of scores
    harness: dict[str, Any] = field(default_factory=dict)  # the results as the harness returns them
    preferences: PreferenceScores | None = None
    log_probs: dict[Name, list[float]] = field(default_factory=dict)  # by example: of its answers


@dataclass(frozen=True)
class EvalExample:
    """An example with an expected answer."""

    name: Name
    prompt: list[int]
    expected: str
    tokens: int  # length of the expected answer


def run_eval(args: RunEvalArgs) -> None:
    """Print the table of scores and some answers, and write everything to --out."""
    # reports errors before anything is loaded
    source = source_of(args.model(args.checkpoint_dir, args.base_dir))
    if (
        args.against not in (None, "none")
        and source_of(args.model(args.against)).folder == source.folder
    ):
        raise ValueError(f"--against {args.against} is the model itself; name another one, or none")
    if args.out and Path(args.out).exists() and not Path(args.out).is_file():
        raise ValueError(f"--out {args.out} is not a file; name a file")
    if args.out and not Path(args.out).parent.is_dir():
        raise ValueError(
            f"--out {args.out}: the folder {Path(args.out).parent} does not exist; create it, or "
            "name another file"
        )

    # what can be refused is refused before a model is loaded
    data, own_run = resolve_data(args, source)
    args = replace(args, data=data)
    run_harness = _harness_runner(args) if args.tasks else None
    sources = compared_sources(args, source)
    readable = set()
    kind = "supervised"
    if args.data.path:
        kind = kind_of(args, own_run)
        args = replace(args, data=with_shared_length(args.data, sources))
        readable = readable_by_all(args, sources, kind)
        warn_if_trained_on(args, source, readable)

    # one model after the other
    subjects = []
    examples = {}
    for subject, session, context in _subjects(args, separate_base=len(sources) > 1):
        with context:
            if args.data.path:
                examples |= _score_examples(subject, session, args, readable, kind)
            if run_harness:
                run_harness(subject, session)
        subjects.append(subject)

    # the model to compare with comes first
    if len(subjects) == 2 and subjects[0].preferences is not None:
        subjects[1].scores |= subjects[1].preferences.over(subjects[0].preferences)
    _print_results(subjects, dict(islice(examples.items(), args.show)))
    if args.out:
        atomic_write(
            Path(args.out),
            json.dumps(
                _as_json(args, subjects, examples), indent=2, ensure_ascii=False, default=str
            )
            + "\n",
        )


def _subjects(
    args: RunEvalArgs, separate_base: bool
) -> Iterator[tuple[ScoredModel, Session, AbstractContextManager]]:
    """Yield (scores to fill, session, context for scoring) of each model.

    The one to compare with comes first.

    separate_base: load an adapter's base separately, because it needs its own tokenizer.
    """
    model_args = args.model(args.checkpoint_dir, args.base_dir)
    source = source_of(model_args)
    if source.adapter and args.against in (None, "none"):
        name = "tuned"
    else:
        name = source.name
    if args.against not in (None, "none"):
        other_args = args.model(args.against)
        other_name = source_of(other_args).name
        yield (
            ScoredModel(other_name if other_name != name else args.against),
            open_session(other_args),
            nullcontext(),
        )
    session = open_session(model_args)
    if source.adapter and args.against is None and separate_base:
        yield ScoredModel("base"), open_session(args.model(str(source.base))), nullcontext()
    elif source.adapter and args.against is None:
        # the same network, with the adapter switched off
        yield ScoredModel("base"), session, session.as_base()
    yield ScoredModel(name), session, nullcontext()


@torch.no_grad()
def _score_examples(
    subject: ScoredModel, session: Session, args: RunEvalArgs, names: set[Name], kind: str
) -> dict[Name, dict[str, str]]:
    """Score the named examples of --data.

    Return the texts of each: its prompt, and the answers that the data has.
    """
    model = session.model
    tokenizer = session.tokenizer
    sizes = model.config.vocab_size, model.config.max_positions
    candidates = scored_samples(load_data(args.data, tokenizer, *sizes, kind=kind), args.data)

    # windows of plain text have no record (0): all are scored
    selected = [
        (name, index) for index, name in enumerate(candidates.names) if name in names or not name[0]
    ][: args.limit]
    samples = [candidates[index] for _, index in selected]

    # the scores
    if kind == "supervised":
        batches = Layout(rows=args.batch_size).iter_batches(samples, BLOCK, 0)
        loss, count = summed_loss(
            model, tqdm(batches, f"{subject.name}: loss", disable=None), model.device
        )
        mean = float(loss) / float(count)
        subject.scores |= {
            "examples": len(samples),
            "loss": mean,
            "perplexity": math.exp(min(mean, 700)),
        }
    else:
        subject.preferences = PreferenceScores.of(model, samples, args.batch_size, subject.name)
        subject.scores |= subject.preferences.scores()
        selected = selected[: args.show]
        samples = samples[: args.show]  # answers are only shown
        shown_log_probs = subject.preferences.log_probs[: args.show].tolist()
        subject.log_probs = {
            name: row for (name, _), row in zip(selected, shown_log_probs, strict=True)
        }

    # the answers, which for preferences are only shown
    answered = [
        (name, sample) for (name, _), sample in zip(selected, samples, strict=True) if sample.answer
    ]
    examples = [_example(name, sample, tokenizer) for name, sample in answered]
    if examples:
        answers = _answers(subject.name, session, examples, args)
    else:
        answers = {}
    subject.answers = {name: answer.text.strip() for name, answer in answers.items()}
    if answers and kind == "supervised":
        pairs = ((answers[example.name], example.expected) for example in examples)
        matches = [is_exact(answer.text, answer.ended, expected) for answer, expected in pairs]
        subject.scores |= {"answers": len(matches), "exact_match": sum(matches) / len(matches)}
    elif kind == "supervised" and any(turn for _, turn, _ in names):
        print(
            f"{subject.name}: no example fits into the length limit with its answer, so "
            "exact_match is not computed",
            file=sys.stderr,
        )
    return {name: _texts(sample, tokenizer) for name, sample in answered}


def _example(name: Name, sample: Sample, tokenizer: Tokenizer) -> EvalExample:
    prompt, expected = (ids.tolist() for ids in sample.answer)
    return EvalExample(name, prompt, tokenizer.decode_answer(expected).strip(), len(expected))


def _texts(sample: Sample, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the prompt of an example and its answers, by what they are."""
    prompt, answer = (ids.tolist() for ids in sample.answer)
    title = {
        True: "desirable",
        False: "undesirable",
        None: "chosen" if sample.documents else "expected",
    }[sample.desirable]
    texts = {
        "prompt": tokenizer.decode(prompt, skip_special=False),
        title: tokenizer.decode_answer(answer).strip(),
    }
    if sample.documents:
        rejected = sample.split()[1].targets
        texts["rejected"] = tokenizer.decode_answer(rejected[rejected != IGNORED].tolist()).strip()
    return texts


def _answers(
    name: str, session: Session, examples: list[EvalExample], args: RunEvalArgs
) -> dict[Name, Completion]:
    """Return greedy answers by example, generated --batch_size at once."""
    # by default, 8 tokens more than the expected answer has
    lengths = [args.max_new_tokens or example.tokens + 8 for example in examples]
    requests = [
        greedy_request(session.model, session.tokenizer, example.prompt, max_tokens)
        for example, max_tokens in zip(examples, lengths, strict=True)
    ]
    answers = session.generate(requests, args.batch_size, f"{name}: answers")
    return {example.name: answer for example, answer in zip(examples, answers, strict=True)}


def _harness_runner(args: RunEvalArgs) -> Callable[[ScoredModel, Session], None]:
    """Check that the tasks exist, and return the function that scores a model on them."""
    # imported here because the package is optional
    from litft.evaluation.lm_eval_model import find_tasks, run_tasks

    # unknown tasks are refused before a model is loaded
    manager = find_tasks(args.tasks, args.include_path)
    settings = {
        "num_fewshot": args.num_fewshot,
        "limit": args.limit,
        "apply_chat_template": args.chat_template,
    }
    settings["log_samples"] = bool(args.out)

    def run(subject: ScoredModel, session: Session) -> None:
        results = run_tasks(session, args.tasks, manager, args.batch_size, settings)
        subject.harness = {
            name: results[name] for name in ("results", "n-samples", "samples") if name in results
        }
        for task, scores in results["results"].items():
            if task in results["n-samples"]:
                # how many were really scored, which --limit may have reduced
                subject.scores[f"{task}: examples"] = results["n-samples"][task]["effective"]
            # "acc,none": the metric, and the filter applied to the answers
            for key, value in scores.items():
                metric, comma, filter_name = key.partition(",")
                if comma and "_stderr" not in metric and isinstance(value, (int, float)):
                    name = f"{task}: {metric}{'' if filter_name == 'none' else f', {filter_name}'}"
                    subject.scores[name] = float(value)
                    error = scores.get(f"{metric}_stderr,{filter_name}")
                    subject.errors |= {name: error} if isinstance(error, float) else {}

    return run


def _print_results(subjects: list[ScoredModel], examples: dict[Name, dict[str, str]]) -> None:
    """Print the scores as a Markdown table, and below it the answers."""
    table = Table(box=box.MARKDOWN)
    table.add_column("")
    for subject in subjects:
        table.add_column(subject.name, justify="right")
    # scores that any of the models has
    for name in dict.fromkeys(name for subject in subjects for name in subject.scores):
        table.add_row(
            name,
            *(_cell(subject.scores.get(name), subject.errors.get(name)) for subject in subjects),
        )
    # so wide that no cell is wrapped
    console = Console(width=10_000, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(table)
    print(*filter(str.strip, captured.get().splitlines()), sep="\n")

    # the answers below each other
    for example, texts in examples.items():
        lines = {name: json.dumps(text, ensure_ascii=False) for name, text in texts.items()}
        for subject in subjects:
            if example in subject.answers:
                lines[subject.name] = json.dumps(subject.answers[example], ensure_ascii=False)
            if example in subject.log_probs:
                lines[f"{subject.name}, log-probability"] = ", ".join(
                    f"{v:.2f}" for v in subject.log_probs[example]
                )
        width = max(map(len, lines)) + 2
        print("", *(f"{name + ':':<{width}}{line}" for name, line in lines.items()), sep="\n")


def _cell(score: float | None, error: float | None) -> str:
    """Format a score, with its standard error if there is one; empty if the model has no such
    score."""
    if score is None:
        return ""
    text = f"{score:,}" if isinstance(score, int) else f"{score:.4f}"
    if error is None:
        return text
    return f"{text} ± {error:.4f}"


def _as_json(
    args: RunEvalArgs, subjects: list[ScoredModel], examples: dict[Name, dict[str, str]]
) -> dict[str, Any]:
    """Return the content of --out."""
    answers = [
        texts | {subject.name: subject.answers.get(example) for subject in subjects}
        for example, texts in examples.items()
    ]
    scores = {
        subject.name: {
            name: None if math.isnan(value) else value for name, value in subject.scores.items()
        }
        for subject in subjects
    }
    return {
        "flags": asdict(args),
        "scores": scores,
        "answers": answers,
        "harness": {subject.name: subject.harness for subject in subjects if subject.harness},
    }
