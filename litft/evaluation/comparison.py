"""Scores and answers of the models that `run_eval` compares."""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from litft.args import RunEvalArgs
from litft.data.dataset import load_data
from litft.data.packing import BatchLayout
from litft.data.sample import Sample
from litft.data.token_store import Samples
from litft.data.tokenizer import Tokenizer
from litft.evaluation.examples import (
    Name,
    answer_tokens,
    scored_samples,
)
from litft.evaluation.log_probs import sample_log_probs
from litft.evaluation.preferences import PreferenceScores
from litft.evaluation.rated import rate_answers
from litft.evaluation.scoring import (
    SAMPLES_PER_PASS,
    greedy_request,
    is_exact,
    question_text,
)
from litft.evaluation.verdict import (
    Key,
    Part,
    Verdict,
    add_part,
    has_other_tokens,
    parts_of,
    verdicts,
)
from litft.inference.generation import Completion
from litft.inference.session import Session
from litft.model.loss import IGNORED
from litft.model.transformer import GPT


@dataclass
class ScoredModel:
    """The scores and answers of one model."""

    name: str
    scores: dict[str, float] = field(default_factory=dict)
    answers: dict[Name, str] = field(default_factory=dict)  # by example
    # the examples whose answers the length limit has cut
    cut: set[Name] = field(default_factory=set)
    errors: dict[str, float] = field(default_factory=dict)  # standard errors of scores
    # the results as the harness returns them
    harness: dict[str, Any] = field(default_factory=dict)
    preferences: PreferenceScores | None = None
    # by example: of its answers
    log_probs: dict[Name, list[float]] = field(default_factory=dict)
    # by score: what each example adds to it
    parts: dict[str, dict[Key, Part]] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalExample:
    """An example with an expected answer."""

    name: Name
    prompt: list[int]
    expected: str
    tokens: int  # length of the expected answer
    sample: Sample


@torch.no_grad()
def score_examples(
    subject: ScoredModel, session: Session, args: RunEvalArgs, names: set[Name], kind: str
) -> dict[Name, dict[str, str]]:
    """Score the named examples of --data.

    Return the texts of each: its prompt, and the answers that the data has.
    """
    config = session.model.config
    data = load_data(
        args.data,
        session.tokenizer,
        config.vocab_size,
        config.max_positions,
        kind=kind,
        completion_tokens=answer_tokens(args),
    )
    # with the template and the stop tokens of the data
    session = session._replace(tokenizer=data.tokenizer)
    selected = list(islice(_selected(scored_samples(data, args.data), names), args.limit))
    samples = [sample for _, sample in selected]

    # the scores
    if kind == "prompts":
        return _rated(subject, session, selected, args)
    if kind == "supervised":
        subject.scores |= _loss_scores(subject, session.model, selected, args.batch_size)
    else:
        subject.preferences = PreferenceScores.of(
            session.model, samples, args.batch_size, subject.name
        )
        subject.scores |= subject.preferences.scores()
        subject.parts |= subject.preferences.parts([name for name, _ in selected])
        for (name, _), log_probs in zip(
            selected, subject.preferences.log_probs.tolist(), strict=True
        ):
            subject.log_probs[name] = log_probs

    examples = []
    for name, sample in selected:
        answer = _answer_of(sample)
        if answer is not None:
            examples.append(_example(name, sample, answer, data.tokenizer))
    answered = [example for example in examples if example.sample.answer is not None]
    # beside preferences, which are scored without them, answers are only shown
    if kind != "supervised":
        answered = answered[: args.show]
    answers = {}
    if answered:
        answers = _answers(subject.name, session, answered, args)
    subject.answers = {name: answer.text.strip() for name, answer in answers.items()}
    subject.cut = {name for name, answer in answers.items() if not answer.ended}
    if answers and kind == "supervised":
        subject.scores |= _exact_match(subject, answered, answers)
    elif kind == "supervised" and any(turn for _, turn, _ in names):
        print(
            f"{subject.name}: no example fits into the length limit with its answer, so "
            "exact_match is not computed",
            file=sys.stderr,
        )
    return {example.name: _texts(example, data.tokenizer) for example in examples}


def _rated(
    subject: ScoredModel,
    session: Session,
    selected: Sequence[tuple[Name, Sample]],
    args: RunEvalArgs,
) -> dict[Name, dict[str, str]]:
    """Score the answers to prompts by reward functions; return the texts of each prompt."""
    samples = [sample for _, sample in selected]
    rated = rate_answers(subject.name, session, samples, args)
    subject.scores |= rated.scores()
    parts: dict[Key, Part] = {}
    for (name, _), total in zip(selected, rated.totals(), strict=True):
        if total is not None:
            add_part(parts, name, Part(total))
    subject.parts["reward"] = parts
    texts = {}
    for (name, sample), answer in zip(selected, rated.answers, strict=True):
        subject.answers[name] = answer.text.strip()
        if not answer.ended:
            subject.cut.add(name)
        prompt = session.tokenizer.decode(sample.prompt_ids, skip_special=False)
        texts[name] = {"prompt": prompt}
        question = question_text(session.tokenizer, sample.prompt_ids)
        if question != prompt:
            texts[name]["question"] = question
        assert sample.prompt is not None  # the samples of prompts have one
        expected = sample.prompt.columns.get("answer")
        if expected is not None:
            texts[name]["expected"] = str(expected)
    return texts


def _selected(candidates: Samples, names: set[Name]) -> Iterator[tuple[Name, Sample]]:
    """Yield the samples of these names, and all windows of plain text, which have no record (0)."""
    for index, name in enumerate(candidates.names):
        if name in names or not name[0]:
            yield name, candidates[index]


def _exact_match(
    subject: ScoredModel,
    examples: Sequence[EvalExample],
    answers: Mapping[Name, Completion],
) -> dict[str, float]:
    """Return the number of answers, and the share of them that are the expected ones."""
    hits = []
    for example in examples:
        answer = answers[example.name]
        hits.append(float(is_exact(answer.text, answer.ended, example.expected)))
    names = [example.name for example in examples]
    subject.parts["exact_match"] = parts_of(names, map(Part, hits))
    return {"answers": len(examples), "exact_match": sum(hits) / len(examples)}


def _loss_scores(
    subject: ScoredModel,
    model: GPT,
    selected: Sequence[tuple[Name, Sample]],
    batch_size: int,
) -> dict[str, float]:
    """Return the mean loss of all target tokens and its perplexity."""
    losses: list[float] = []
    counts: list[float] = []
    layout = BatchLayout(rows=batch_size)
    starts = range(0, len(selected), SAMPLES_PER_PASS)
    for start in tqdm(starts, f"{subject.name}: loss", disable=None):
        block = [sample for _, sample in selected[start : start + SAMPLES_PER_PASS]]
        log_probs, lengths = sample_log_probs(model, block, layout, model.device)
        losses += (-log_probs).tolist()
        counts += lengths.tolist()
    of_samples = map(Part, losses, counts)
    subject.parts["loss"] = parts_of([name for name, _ in selected], of_samples)
    mean = sum(losses) / sum(counts)
    return {
        "examples": len(selected),
        "loss": mean,
        "perplexity": math.exp(min(mean, 700)),
    }


def _answer_of(sample: Sample) -> tuple[Tensor, Tensor] | None:
    """Return the prompt and the answer of a sample, (P,) and (A,); None if it is not complete. Of
    preferences, which are scored all the same, return what the length limit has left."""
    if sample.answer is not None or not sample.is_preference:
        return sample.answer
    first = sample.split()[0]
    is_target = first.targets != IGNORED
    if not is_target.any():
        return None
    start = int(is_target.nonzero()[0])
    return first.tokens[: start + 1], first.targets[is_target]


def _example(
    name: Name, sample: Sample, answer: tuple[Tensor, Tensor], tokenizer: Tokenizer
) -> EvalExample:
    """Return the example of a sample with this prompt and answer, (P,) and (A,)."""
    prompt, expected = (ids.tolist() for ids in answer)
    return EvalExample(
        name=name,
        prompt=prompt,
        expected=tokenizer.decode_answer(expected).strip(),
        tokens=len(expected),
        sample=sample,
    )


def _texts(example: EvalExample, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the prompt of an example and its answers, by what they are."""
    sample = example.sample
    title = {
        True: "desirable",
        False: "undesirable",
        None: "chosen" if sample.documents else "expected",
    }[sample.desirable]
    prompt = tokenizer.decode(example.prompt, skip_special=False)
    texts = {"prompt": prompt}
    # the last message of the user, which is easier to read than the template around it
    question = question_text(tokenizer, example.prompt)
    if question != prompt:
        texts["question"] = question
    texts[title] = example.expected
    if sample.documents:
        rejected = sample.split()[1].targets
        texts["rejected"] = tokenizer.decode_answer(
            rejected[rejected != IGNORED].tolist()
        ).strip()
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


def print_table(table: Table) -> None:
    """Print a table of rich as Markdown."""
    # so wide that no cell is wrapped
    console = Console(width=10_000, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(table)
    print(*filter(str.strip, captured.get().splitlines()), sep="\n")


def print_results(
    subjects: list[ScoredModel], examples: dict[Name, dict[str, str]]
) -> None:
    """Print the scores as a Markdown table, and below it the answers."""
    table = Table(box=box.MARKDOWN)
    table.add_column("")
    for subject in subjects:
        table.add_column(subject.name, justify="right")
    # scores that any of the models has
    for name in dict.fromkeys(name for subject in subjects for name in subject.scores):
        table.add_row(
            name,
            *(
                _cell(subject.scores.get(name), subject.errors.get(name))
                for subject in subjects
            ),
        )
    print_table(table)

    # the answers below each other
    for example, texts in examples.items():
        lines = {}
        shown = dict(texts)
        shown["prompt"] = shown.pop("question", texts["prompt"])
        for name, text in shown.items():
            lines[name] = json.dumps(text, ensure_ascii=False)
        for subject in subjects:
            if example in subject.answers:
                lines[subject.name] = json.dumps(
                    subject.answers[example], ensure_ascii=False
                )
                if example in subject.cut:
                    lines[subject.name] += " ... (cut)"
            if example in subject.log_probs:
                lines[f"{subject.name}, log-probability"] = ", ".join(
                    f"{v:.2f}" for v in subject.log_probs[example]
                )
        width = max(map(len, lines)) + 2
        print(
            "", *(f"{name + ':':<{width}}{line}" for name, line in lines.items()), sep="\n"
        )


def compare_preferences(subjects: Sequence[ScoredModel]) -> None:
    """Add the scores of preferences relative to the first model, if there are two."""
    if len(subjects) != 2:
        return
    first, second = subjects
    # both, or none, have been scored on preferences
    if first.preferences is not None and second.preferences is not None:
        second.scores |= second.preferences.over(first.preferences)


def compare_models(subjects: Sequence[ScoredModel]) -> list[Verdict]:
    """Return how the last model differs from the first, if there are two. Print which losses are
    not comparable."""
    if len(subjects) != 2:
        return []
    first, second = (subject.parts for subject in subjects)
    for score in second:
        if has_other_tokens(score, first.get(score, {}), second[score]):
            print(
                f"not compared: {score}, which is of other tokens of the examples (another "
                "template or tokenizer)"
            )
    return verdicts(first, second)


def _cell(score: float | None, error: float | None) -> str:
    """Format a score, with its standard error if there is one; empty if the model has no such
    score."""
    if score is None:
        return ""
    text = f"{score:,}" if isinstance(score, int) else f"{score:.4f}"
    if error is None:
        return text
    return f"{text} ± {error:.4f}"


def results_as_json(
    args: RunEvalArgs,
    subjects: list[ScoredModel],
    examples: dict[Name, dict[str, str]],
    found: list[Verdict],
) -> dict[str, Any]:
    """Return the content of --out."""
    answers = []
    for example, texts in examples.items():
        answer: dict[str, Any] = dict(texts)
        for subject in subjects:
            answer[subject.name] = subject.answers.get(example)
            if example in subject.log_probs:
                answer[f"{subject.name}, log-probability"] = subject.log_probs[example]
        answers.append(answer)
    scores = {
        subject.name: {
            name: None if math.isnan(value) else value
            for name, value in subject.scores.items()
        }
        for subject in subjects
    }
    return {
        "flags": asdict(args),
        "scores": scores,
        "verdicts": [asdict(verdict) | {"outcome": verdict.outcome} for verdict in found],
        "answers": answers,
        "harness": {
            subject.name: subject.harness for subject in subjects if subject.harness
        },
    }
