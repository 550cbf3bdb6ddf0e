"""The validations of a run: its scores by step, and sample answers to look at."""

import json
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from litft.args import EvalArgs, PreferenceArgs
from litft.atomic import atomic_write
from litft.data.answer_reading import answer_parser
from litft.data.dataset import DataSplits
from litft.data.packing import BatchLayout
from litft.data.sample import Sample
from litft.data.tokenizer import Tokenizer
from litft.distributed.process_group import Processes
from litft.evaluation.scoring import (
    HardExample,
    Metric,
    SampleAnswer,
    Selection,
    ShownAnswer,
    ValidationAnswer,
    answer_rows,
    evenly_spaced,
    exact_match,
    greedy_answers,
    hardest_examples,
    is_exact,
    question_text,
    validation_answers,
)
from litft.evaluation.verdict import Part, parts_of
from litft.inference.generation import Completion
from litft.model.transformer import GPT, eval_mode
from litft.training.before_after import BeforeAfter, ComparedTexts, weighted
from litft.training.measured_samples import measured_indices
from litft.training.objectives import Objective, Supervised
from litft.training.objectives.objective import Totals
from litft.training.output.metrics import Row, as_written
from litft.training.rollouts import Rollouts, rewards_together
from litft.training.sample_prompts import sample_prompts
from litft.training.validation_losses import validation_scores

# validation examples with the largest losses in the report, and among how many they are searched
NUM_HARDEST = 5
SEARCHED = 1024
# the scores that a line has besides the loss, and how they are written
SHOWN_SCORES = {
    "perplexity": "{:.4g}",
    "accuracy": "{:.1%}",
    "margin": "{:.3g}",
    "chosen_logp": "{:.4g}",
}


@dataclass(frozen=True)
class Measured:
    """What the validations of a run measure."""

    tokenizer: Tokenizer
    data: DataSplits
    args: EvalArgs
    objective: Objective = field(default_factory=lambda: Supervised(PreferenceArgs()))
    # of the answers to the validation questions, by column of metrics.csv
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    # answers prompts, where rewards are learned from
    rollouts: Rollouts | None = None
    forgetting: bool = False  # see `BeforeAfter`


class Validation:
    """The validations of a run: scores by step, and the model's answers to the same prompts each
    time."""

    def __init__(
        self,
        processes: Processes,
        model: GPT,
        measured: Measured,
        path: Path,
        samples: Sequence[Sample] | None = None,
        before_batch: Callable[[], None] = lambda: None,
    ) -> None:
        # path: of samples.jsonl. samples: those of the data, with what the objective needs of the
        # reference. before_batch: called before each batch; it may raise.
        self.fabric = processes.fabric
        self.cpu_group = processes.cpu_group
        self.model = model
        self.objective = measured.objective
        self.rollouts = measured.rollouts
        self.tokenizer = measured.tokenizer
        self.data = measured.data
        self.args = measured.args
        self.path = path
        self.samples: Sequence[Sample] = measured.data.val if samples is None else samples
        self.sets = measured.data.val_sets
        self.metrics: dict[str, Metric] = {}
        if measured.args.exact_match:
            self.metrics["exact_match"] = exact_match
        self.metrics |= measured.metrics
        self.before_batch = before_batch
        self.forgetting = measured.forgetting
        self.before_after = BeforeAfter(
            processes,
            model,
            self.tokenizer,
            self.data,
            folder=path.parent,
            before_batch=before_batch,
        )
        self.losses: dict[int, float] = {}  # by step
        # the objective's other scores and the losses of named sets, by step
        self.scores: dict[int, Row] = {}
        # by metric and step
        self.metric_values: dict[str, dict[int, float]] = {
            name: {} for name in self.metrics
        }
        self.failures: dict[str, str] = {}  # errors of metrics, by name
        self.num_answers = 0  # examples with an answer to match
        # of these samples by index: whether the answer is the expected one, as last measured
        self.exact: dict[int, bool] = {}
        self.rewards: list[Part] = []  # of each prompt's completions, as last measured
        self.answers: list[SampleAnswer] = []
        self.hardest: list[HardExample] = []  # of the last validation
        if self.args.max_new_tokens:
            self.prompts = list(sample_prompts(self.args, self.tokenizer, self.data))
        else:
            self.prompts = []

    def restore(self, rows: list[Row]) -> None:
        """Restore scores and sample answers from an interrupted run's metrics rows and
        samples.jsonl."""
        columns = set(self.columns)
        # a run without a checkpoint begins again, perhaps with other rewards or another base
        if rows:
            self.before_after.restore()
        self.losses = {}
        self.scores = {}
        for row in rows:
            step = int(row["step"])
            for name, values in self.metric_values.items():
                if name in row:
                    values[step] = row[name]
            if "val_loss" in row:
                self.losses[step] = row["val_loss"]
                self.scores[step] = {name: row[name] for name in columns & row.keys()}
        lines = []
        if self.path.is_file():
            lines = self.path.read_text("utf-8", errors="replace").split("\n")

        # answers after the last row are of steps that are taken again
        last_step = max((int(row["step"]) for row in rows), default=-1)
        self.answers = []
        for line in lines:
            answer = _parse_answer(line)
            if answer and answer["step"] <= last_step:
                self.answers.append(answer)
        self.fabric.barrier()  # all ranks have read the file
        self._write()

    @property
    def columns(self) -> list[str]:
        """The columns of metrics.csv with the objective's scores, and with the loss of each set if
        there are several."""
        return [
            *(f"val_{name}" for name in self.objective.validation_scores),
            *(self.column_of_set(name) for name in self.sets),
        ]

    def column_of_set(self, name: str) -> str:
        """Return the column with the loss of a named set, or with its mean reward."""
        if self.rollouts is not None:
            return f"val_reward_{name}"
        return f"val_loss_{name}"

    @property
    def titles(self) -> dict[str, str]:
        """The titles of the columns of named sets and of metrics that a report would not know."""
        metrics = {
            name: name.replace("_", " ") for name in self.metrics if name != "exact_match"
        }
        if self.rollouts is not None:
            of_group = self.objective.validation_scores[-1]
            metrics[f"val_{of_group}"] = of_group.replace("_", "@")
        kind = "loss" if self.rollouts is None else "reward"
        sets = {self.column_of_set(name): f"{kind} on {name}" for name in self.sets}
        return sets | metrics

    def measure(self, step: int, layout: BatchLayout, batch_size: int) -> Row:
        """Return the scores after `step` steps, and the metrics of the model's answers."""
        sets = self._measured_sets(batch_size)
        # a resumed run may have measured this step before it was interrupted
        if step not in self.losses:
            self._measure_sets(step, layout, sets)
        values = {"val_loss": self.losses[step]} | self.scores[step]
        if self.objective.is_cross_entropy:
            # exp of more than 709 overflows
            values["val_perplexity"] = math.exp(min(self.losses[step], 700))
        if self.metrics:
            for name, value in self._measure_metrics(layout, sets).items():
                self.metric_values[name][step] = as_written(value)
                # a metric that has failed is NaN, and stays out of the row
                if not math.isnan(value):
                    values[name] = value
        return values

    def _measured_sets(self, batch_size: int) -> dict[str, Selection]:
        """Return the samples that a validation measures, by set; see `measured_indices`."""
        measured = measured_indices(self.data, self.args, batch_size)
        return {
            name: Selection(self.samples, indices) for name, indices in measured.items()
        }

    def _measure_metrics(
        self, layout: BatchLayout, sets: Mapping[str, Selection]
    ) -> dict[str, float]:
        """Answer the validation questions, and return the metrics of the answers by name; NaN for
        one that has failed, and for all if no question can be answered."""
        indices = []
        for selection in sets.values():
            indices.extend(selection.indices)
        # custom metrics see answers of at least this length; for exact match, a little more than
        # the expected length is enough
        if self.metrics.keys() - {"exact_match"}:
            room = self.args.max_new_tokens
        else:
            room = 0
        answers = self._answers(Selection(self.samples, indices), layout, room)
        self.num_answers = len(answers)
        if "exact_match" in self.metrics:
            self.exact = {}
            for item in answers:
                is_hit = is_exact(item.answer, item.ended, item.expected)
                self.exact[indices[item.number]] = is_hit
        measured = dict.fromkeys(self.metrics, math.nan)
        if answers:
            for name in self.metrics:
                measured[name] = self._measure_metric(name, answers)
        # as the loss counts them, of which it is measured on the same part
        weights = self._weights_of(list(self.exact), indices)
        if "exact_match" in self.metrics and weights:
            hits = np.array(list(self.exact.values()))
            measured["exact_match"] = float(np.average(hits, weights=weights))
        return measured

    def _answers(
        self,
        samples: Sequence[Sample],
        layout: BatchLayout,
        room: int,
        limit: int | None = None,
    ) -> list[ValidationAnswer]:
        """Return the model's answers to samples. room, limit: the tokens of `min_new_tokens` and
        `max_new_tokens` of `validation_answers`."""
        return validation_answers(
            self.fabric,
            self.cpu_group,
            self.model,
            self.tokenizer,
            samples=samples,
            rows=answer_rows(layout, samples, room),
            before_batch=self.before_batch,
            min_new_tokens=room,
            max_new_tokens=limit,
        )

    def measure_before(self, layout: BatchLayout, batch_size: int) -> None:
        """Measure the model before its first step, unless that was done before the run was
        interrupted."""
        if self.before_after.before:
            return
        self._measure_parts(layout, batch_size)
        self.before_after.measure_before(self._compared(batch_size), layout)

    def measure_after(self, layout: BatchLayout, batch_size: int) -> None:
        """Compare the result of the run with the model before it, and find the validation examples
        with the largest losses.

        The model's own answers to them have at most --eval.max_new_tokens tokens.
        """
        self._measure_parts(layout, batch_size)
        texts = self._compared(batch_size)
        self.before_after.measure_after(texts, layout)
        samples = texts.examples
        if not len(samples):
            return
        self.hardest = hardest_examples(
            self.tokenizer, samples, self.before_after.mean_losses, NUM_HARDEST
        )
        if not self.args.max_new_tokens:
            return

        # the model's own answers
        chosen = [samples[example.number] for example in self.hardest]
        answers = self._answers(chosen, layout, room=0, limit=self.args.max_new_tokens)
        if len(answers) != len(self.hardest):  # texts have none
            return
        with_answers = []
        for example, answer in zip(self.hardest, answers, strict=True):
            own = answer.answer
            if not answer.ended:
                own += " …"
            with_answers.append(example._replace(own=own))
        self.hardest = with_answers

    def _measure_parts(self, layout: BatchLayout, batch_size: int) -> None:
        """Measure what each example adds to the metrics. A resumed run may know only their values:
        metrics.csv has no values of single examples."""
        if not len(self.samples):
            return
        sets = self._measured_sets(batch_size)
        if "exact_match" in self.metrics and not self.exact:
            self._measure_metrics(layout, sets)
        if self.rollouts is not None and not self.rewards:
            for samples in sets.values():
                self.rewards += self.rollouts.measure(samples).of_prompts

    def _compared(self, batch_size: int) -> ComparedTexts:
        """Return what is measured before and after the run; of the validation examples at most
        SEARCHED."""
        indices: list[int] = []
        for of_set in measured_indices(self.data, self.args, batch_size).values():
            indices.extend(of_set)
        names = self.data.val.names
        hits = [Part(float(is_hit)) for is_hit in self.exact.values()]
        hits = weighted(hits, self._weights_of(list(self.exact), indices))
        exact = parts_of([names[index] for index in self.exact], hits)
        texts = ComparedTexts(self.objective, self.forgetting, exact)
        if self.objective.data_kind == "prompts":
            of_prompts = [names[index] for index in indices]
            weights = self._weights_of(indices, indices)
            return replace(texts, names=of_prompts, weights=weights, rewards=self.rewards)
        # not all examples: each costs a forward pass
        chosen = evenly_spaced(indices, SEARCHED)
        weights = self._weights_of(chosen, chosen)
        texts = replace(texts, names=[names[index] for index in chosen], weights=weights)
        samples = [self.samples[index] for index in chosen]
        if self.objective.data_kind == "supervised":
            return replace(texts, examples=samples)
        return replace(texts, preferences=samples)

    def _weights_of(self, indices: Sequence[int], measured: Sequence[int]) -> list[float]:
        """Return how many examples of its set each of `indices` stands for; empty if there is one
        set.

        measured: all that are measured, of which some may have no result: a text has no answer.
        """
        if not self.sets:
            return []
        weights: dict[int, float] = {}
        for numbers in self.sets.values():
            of_set = np.intersect1d(numbers, measured).tolist()
            weights |= dict.fromkeys(of_set, len(numbers) / max(1, len(of_set)))
        return [weights[index] for index in indices]

    def _measure_sets(
        self, step: int, layout: BatchLayout, sets: Mapping[str, Sequence[Sample]]
    ) -> None:
        """Measure the loss and the scores of each set, and of all together."""
        if self.rollouts is not None:
            by_set, together = self._measure_rewards(self.rollouts, sets)
        else:
            by_set, together = self._measure_losses(layout, sets)

        # the other scores, then the loss of each named set, as in `columns`; a resumed run reads
        # them from the file, and has to choose the same best step
        self.losses[step] = as_written(together[0])
        others = together[1:]
        # without named sets there is one, whose loss is in `losses` already
        if self.sets:
            # the loss, or, of rewards, the first score: the loss is minus the reward
            column = 0 if self.rollouts is None else 1
            others += [scores[column] for scores in by_set]
        columns = {}
        for column, score in zip(self.columns, others, strict=True):
            if not math.isnan(score):
                columns[column] = as_written(score)
        self.scores[step] = columns

    def _measure_losses(
        self, layout: BatchLayout, sets: Mapping[str, Sequence[Sample]]
    ) -> tuple[list[list[float]], list[float]]:
        """Return the loss and the scores of each set, and those of all together."""
        names = ("loss", *self.objective.validation_scores)
        by_set = []
        for samples in sets.values():
            by_set.append(
                validation_scores(
                    self.fabric,
                    self.objective,
                    self.model,
                    samples=samples,
                    layout=layout,
                    before_batch=self.before_batch,
                )
            )
        if len(by_set) == 1:
            return by_set, by_set[0]
        named = [dict(zip(names, scores, strict=True)) for scores in by_set]
        totals = []
        for name, samples in sets.items():
            factor = self._share_of(name, samples)
            counts = [count * factor for count in self.objective.totals(samples)]
            totals.append(Totals(*counts))
        return by_set, list(self.objective.together(named, totals).values())

    def _measure_rewards(
        self, rollouts: Rollouts, sets: Mapping[str, Sequence[Sample]]
    ) -> tuple[list[list[float]], list[float]]:
        """Return minus the reward and the scores of each set, and those of all together."""
        by_set = []
        factors = []
        self.rewards = []
        for name, samples in sets.items():
            measured = rollouts.measure(samples)
            by_set.append(measured)
            factors.append(self._share_of(name, samples))
            self.rewards += measured.of_prompts
        return [measured.scores for measured in by_set], rewards_together(by_set, factors)

    def _share_of(self, name: str, samples: Sequence[Sample]) -> float:
        """Return how many examples of a set each of those that are measured stands for."""
        if not self.sets:
            return 1.0
        return len(self.sets[name]) / max(1, len(samples))

    def _measure_metric(self, name: str, answers: list[ValidationAnswer]) -> float:
        """Return a metric, the same on all processes; NaN if it fails, which must not end a run
        that is trained."""
        value = 0.0
        if self.fabric.global_rank == 0:  # a metric may be expensive, or random
            try:
                value = float(self.metrics[name](answers))
                self.failures.pop(name, None)
            except Exception as error:
                value = math.nan
                reason = f"{type(error).__name__}: {error}"
                # the first frame is this function, the last one the line that raised it
                frames = traceback.extract_tb(error.__traceback__)
                if len(frames) > 1:
                    reason += f", at {frames[-1].filename}:{frames[-1].lineno}"
                self.failures[name] = reason
        return self.fabric.broadcast(value)

    def line(self, step: int, scores: Row) -> str:
        """Return the scores after `step` steps as text."""
        parts = [f"step {step}: validation loss {scores['val_loss']:.4f}"]
        if self.rollouts is not None:
            parts = [f"step {step}: validation reward {scores['val_reward']:.4f}"]
            for name in self.objective.validation_scores[1:]:
                # not where the first function applies to no completion
                if f"val_{name}" in scores:
                    at = name.removeprefix("pass_")
                    parts.append(f"pass@{at} {scores[f'val_{name}']:.1%}")
        for name, form in SHOWN_SCORES.items():
            if f"val_{name}" in scores:
                parts.append(f"{name} {form.format(scores[f'val_{name}'])}")
        # a single named set has no loss of its own to show
        if len(self.sets) > 1:
            for name in self.sets:
                column = self.column_of_set(name)
                if column in scores:
                    parts.append(f"{name} {scores[column]:.4f}")
        if self.metrics and not self.num_answers:
            names = ", ".join(name.replace("_", " ") for name in self.metrics)
            return (
                f"{', '.join(parts)}; no example has a whole answer within the length limit, so "
                f"{names} is not measured"
            )

        measured = [name for name in self.metrics if name in scores]
        for name in measured:
            parts.append(
                f"{name.replace('_', ' ')} {metric_format(name).format(scores[name])}"
            )
        line = ", ".join(parts)
        if measured:
            line += f" ({self.num_answers} answers)"
        for name, error in self.failures.items():
            line += f"\nwarning: the metric {name} failed ({error})"
        return line

    def generate_answers(self, step: int) -> Iterator[SampleAnswer]:
        """Generate and yield the model's answers to the prompts after `step` steps, and write them
        to samples.jsonl."""
        for text, ids in self.prompts:
            self.before_batch()
            with eval_mode(self.model):
                (completion,) = greedy_answers(
                    self.model, self.tokenizer, [(ids, self.args.max_new_tokens)]
                )
            self.answers.append(
                {"step": step, "prompt": text, **self._shown(ids, completion)}
            )
            yield self.answers[-1]
        if self.rollouts is not None and self.args.max_new_tokens and len(self.samples):
            self._add_rated(self.rollouts, step)
        self._write()

    def _add_rated(self, rollouts: Rollouts, step: int) -> None:
        """Add the completions of the first validation prompt, which a validation measures, with
        their rewards."""
        prompt = self.samples[0]
        rated = rollouts.rate("validation", [prompt] * self.objective.group_size)
        rewards = rated.rewards.flatten().tolist()
        for completion, reward in zip(rated.completions, rewards, strict=True):
            answer: SampleAnswer = {
                "step": step,
                "prompt": question_text(self.tokenizer, prompt.prompt_ids),
                "answer": completion.text.strip(),
            }
            # NaN, where no function applies, is not JSON
            if not math.isnan(reward):
                answer["reward"] = reward
            self.answers.append(answer)

    def _shown(self, prompt: list[int], completion: Completion) -> ShownAnswer:
        """Return an answer as people read it: the calls after the content, and the reasoning by
        itself."""
        prompt_text = self.tokenizer.decode(prompt, skip_special=False)
        parser = answer_parser(self.tokenizer, prompt_text)
        parsed = parser.parse(completion.text, is_cut=not completion.ended)
        calls = [
            f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})"
            for call in parsed.calls
        ]
        shown: ShownAnswer = {"answer": "\n".join([parsed.content, *calls]).strip()}
        if parsed.reasoning:
            shown["reasoning_content"] = parsed.reasoning
        return shown

    def _write(self) -> None:
        if self.fabric.global_rank == 0 and (self.answers or self.path.is_file()):
            atomic_write(
                self.path,
                "".join(
                    json.dumps(item, ensure_ascii=False) + "\n" for item in self.answers
                ),
            )

    @property
    def best(self) -> int | None:
        """Return the first step with the lowest loss; None if no step has one."""
        # step 0 is the base, which is never the best
        return min(
            filter(None, self.losses),
            key=lambda step: (self.losses[step], step),
            default=None,
        )

    @property
    def best_text(self) -> str:
        """Which step is the best, and its loss, or its reward, which is minus the loss."""
        assert self.best is not None  # asked for after a validation
        loss = self.losses[self.best]
        kind = "loss was lowest"
        sign = 1
        if self.rollouts is not None:
            kind = "reward was highest"
            sign = -1
        value = f"{sign * loss:.4f}"
        # the base does not count, since it is no result
        before = self.losses.get(0)
        if before is not None and before < loss:
            value += f", and before the first step {sign * before:.4f}, which is better"
        return f"the validation {kind} at step {self.best} ({value})"

    @property
    def since_best(self) -> int:
        """Return the number of validations since the best one, for early stopping."""
        best = self.best or 0
        return sum(step > best for step in self.losses)


def metric_format(metric: str) -> str:
    """Return the format of a metric's values."""
    if metric == "exact_match":
        return "{:.1%}"
    return "{:.4g}"


def _parse_answer(line: str) -> SampleAnswer | None:
    """Parse a line of samples.jsonl; return None for a line damaged by a crash."""
    try:
        item = json.loads(line)
        if isinstance(item["step"], int) and {"prompt", "answer"} <= item.keys():
            return item
        return None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
