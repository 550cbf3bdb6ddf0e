"""The command `run_eval`: the scores of a model and its base, side by side in one table."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from litft.args import RunEvalArgs
from litft.atomic import atomic_write
from litft.evaluation.comparison import (
    ScoredModel,
    compare_models,
    compare_preferences,
    print_results,
    results_as_json,
    score_examples,
)
from litft.evaluation.examples import (
    compared_sources,
    kind_of,
    notes_on_adapter,
    readable_by_all,
    resolve_data,
    warn_if_trained_on,
    with_shared_length,
)
from litft.evaluation.forgetting import Remembered
from litft.evaluation.rewards.reward import parse_rewards
from litft.evaluation.verdict import mean_of
from litft.inference.session import (
    Session,
    missing_template_note,
    open_session,
    source_of,
)
from litft.pretrained.folder import PretrainedFolder


def run_eval(args: RunEvalArgs) -> None:
    """Print the table of scores and some answers, and write everything to --out."""
    # reports errors before anything is loaded
    parse_rewards(args.reward)
    source = source_of(args.model(args.checkpoint_dir, args.base_dir))
    if (
        args.against not in (None, "none")
        and source_of(args.model(args.against)).folder == source.folder
    ):
        raise ValueError(
            f"--against {args.against} is the model itself; name another one, or none"
        )
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
    print(*notes_on_adapter(args, source, own_run), sep="", end="", file=sys.stderr)
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
    forgetting = Forgetting(args, source)
    for subject, session, context in _subjects(args, separate_base=len(sources) > 1):
        with context:
            if args.data.path:
                examples |= score_examples(subject, session, args, readable, kind)
            if run_harness:
                run_harness(subject, session)
            forgetting.measure(subject, session)
        subjects.append(subject)

    # the model to compare with comes first
    compare_preferences(subjects)
    print_results(subjects, dict(islice(examples.items(), args.show)))
    found = compare_models(subjects)
    if found:
        print(f"\n{subjects[1].name}, compared with {subjects[0].name}:")
        print(*found, sep="\n")
    if args.out:
        _write(args.out, results_as_json(args, subjects, examples, found))


class Forgetting:
    """Measures what a tuned model has forgotten of what its base knows."""

    def __init__(self, args: RunEvalArgs, source: PretrainedFolder) -> None:
        self.rows = args.batch_size
        has_base = source.adapter is not None and args.against is None
        # a single model has nothing to be compared with
        has_two = has_base or args.against not in (None, "none")
        self.is_asked_for = args.forgetting and has_two
        self.remembered: Remembered | None = None

    def measure(self, subject: ScoredModel, session: Session) -> None:
        """Measure one of the models; the base comes first."""
        if not self.is_asked_for:
            return
        print(
            f"{subject.name}: measuring what was forgotten, which --forgetting false leaves out",
            file=sys.stderr,
        )
        if self.remembered is None:
            self.remembered = Remembered.of(session, self.rows)
        if not self.remembered.fits(session.tokenizer):
            print(
                "what was forgotten is not measured: the models have different tokenizers",
                file=sys.stderr,
            )
            return
        parts = self.remembered.parts(session, self.rows)
        subject.parts |= parts
        for score, by_key in parts.items():
            subject.scores[score] = mean_of(by_key)


def _write(path: str, results: dict[str, Any]) -> None:
    """Write --out."""
    text = json.dumps(results, indent=2, ensure_ascii=False, default=str)
    atomic_write(Path(path), f"{text}\n")


def _subjects(
    args: RunEvalArgs, separate_base: bool
) -> Iterator[tuple[ScoredModel, Session, AbstractContextManager]]:
    """Yield (scores to fill, session, context for scoring) of each model.

    The one to compare with comes first.

    separate_base: load an adapter's base separately, because it needs its own tokenizer.
    """
    model_args = args.model(args.checkpoint_dir, args.base_dir)
    source = source_of(model_args)
    # compared with another model, both are called by the names of their folders
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
        "log_samples": bool(args.out),
    }

    notes = set()

    def run(subject: ScoredModel, session: Session) -> None:
        note = missing_template_note(session.tokenizer) if args.chat_template else None
        # once for both models
        if note and note not in notes:
            notes.add(note)
            print(note, file=sys.stderr)
        results = run_tasks(session, args.tasks, manager, args.batch_size, settings)
        subject.harness = {
            name: results[name]
            for name in ("results", "n-samples", "samples")
            if name in results
        }
        for task, scores in results["results"].items():
            # a group of tasks has scores, but no count of its own
            if task in results["n-samples"]:
                # how many were really scored, which --limit may have reduced
                counts = results["n-samples"][task]
                subject.scores[f"{task}: examples"] = counts["effective"]
            # "acc,none": the metric, and the filter applied to the answers
            for key, value in scores.items():
                metric, comma, filter_name = key.partition(",")
                if comma and "_stderr" not in metric and isinstance(value, (int, float)):
                    name = f"{task}: {metric}{'' if filter_name == 'none' else f', {filter_name}'}"
                    subject.scores[name] = float(value)
                    error = scores.get(f"{metric}_stderr,{filter_name}")
                    if isinstance(error, float):
                        subject.errors[name] = error

    return run
