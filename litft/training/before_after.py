"""The same texts before training and after it: whether the result is better, and what it has
forgotten."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from litft.args import FinetuneArgs
from litft.atomic import atomic_write
from litft.data.dataset import DataSplits
from litft.data.packing import BatchLayout
from litft.data.sample import Sample
from litft.data.tokenizer import Tokenizer
from litft.distributed.process_group import Processes, sum_over_processes
from litft.evaluation.forgetting import (
    ANSWER_TOKENS,
    NEUTRAL,
    NUM_QUESTIONS,
    OWN_ANSWERS,
    answer_samples,
    loss_parts,
    neutral_samples,
    ordinary_questions,
    question_prompts,
)
from litft.evaluation.log_probs import document_log_probs
from litft.evaluation.scoring import MAX_ANSWER_ROWS, greedy_completions
from litft.evaluation.verdict import (
    Key,
    Part,
    Verdict,
    parts_in,
    parts_of,
    stored_parts,
    verdicts,
)
from litft.model.kv_cache import KVCache
from litft.model.transformer import GPT, eval_mode
from litft.run_dir import VERDICT
from litft.training.intervals import DECODED_TOKEN_COST, FORWARD_COST
from litft.training.objectives import Objective
from litft.training.schedule import Schedule

# of the training, for what measures what was forgotten
LARGEST_SHARE = 0.2
# about as many tokens as the neutral text has, and as a question has
NEUTRAL_TOKENS = 12_000
QUESTION_TOKENS = 40
DECODED_AT_ONCE = 8
NOT_MEASURED = (
    "not measured: what it forgot, which would take a large part of the time of this run "
    "(--eval.forgetting true)"
)
# the KV cache of answers that are generated at once may take as much as this share of the weights,
# or so many bytes: before the first step there are no gradients and no activations
CACHE_SHARE = 0.1
CACHE_BYTES = 64 * 2**20


def measures_forgetting(args: FinetuneArgs, schedule: Schedule) -> bool:
    """Return whether a run measures what it forgets: as --eval.forgetting says, or else if that
    takes a small part of the time of its training."""
    if args.eval.forgetting is not None:
        return args.eval.forgetting
    # such a run may end long before its last epoch
    if args.train.max_time is not None:
        return False
    answered = NUM_QUESTIONS * (QUESTION_TOKENS + ANSWER_TOKENS)
    # twice, before training and after it
    cost = 2 * (NEUTRAL_TOKENS + answered) * FORWARD_COST
    cost += NUM_QUESTIONS * ANSWER_TOKENS * DECODED_TOKEN_COST / DECODED_AT_ONCE
    trained = schedule.num_samples * float(schedule.data.train.lengths.mean())
    return cost <= LARGEST_SHARE * trained


@dataclass(frozen=True)
class ComparedTexts:
    """What is compared before and after a run: samples that are still to be measured, and what the
    last validation has found of each."""

    objective: Objective
    forgetting: bool  # whether the neutral text and answers to ordinary questions are, too
    # by record, whether the answers to the validation questions are the expected ones; empty: not
    # measured
    exact: Mapping[Key, Part] = field(default_factory=dict)
    # the names of the records of one of the following, see `Samples.names`
    names: Sequence[Key] = ()
    # how many examples of its set each of them stands for, where there are several sets of which
    # only some are measured; empty: 1
    weights: Sequence[float] = ()
    examples: Sequence[Sample] = ()  # with answers to learn
    preferences: Sequence[Sample] = ()
    rewards: Sequence[Part] = ()  # of the completions of prompts

    def __bool__(self) -> bool:
        return self.forgetting or any(
            map(len, (self.examples, self.preferences, self.rewards))
        )

    def parts(self, of_each: Iterable[Part]) -> dict[Key, Part]:
        """Return what each record adds to a score, given what each sample adds."""
        return parts_of(self.names, weighted(of_each, self.weights))


def weighted(parts: Iterable[Part], weights: Sequence[float]) -> list[Part]:
    """Return the parts, each as many times as its weight says; as they are without weights."""
    if not weights:
        return list(parts)
    found = []
    for part, weight in zip(parts, weights, strict=True):
        found.append(Part(part.value * weight, part.weight * weight))
    return found


class BeforeAfter:
    """Measures the scores of the same texts before the first step and after the last one. Every
    process takes part; the first one writes verdict.json."""

    def __init__(
        self,
        processes: Processes,
        model: GPT,
        tokenizer: Tokenizer,
        data: DataSplits,
        folder: Path,
        before_batch: Callable[[], None],
    ) -> None:
        # before_batch: called before each batch; it may raise
        self.fabric = processes.fabric
        self.cpu_group = processes.cpu_group
        self.model = model
        self.tokenizer = tokenizer
        self.data = data
        self.path = folder / VERDICT
        self.before_batch = before_batch
        self.verdicts: list[Verdict] = []
        self.forgetting = False  # whether what was forgotten is measured
        self.before: dict[str, Mapping[Key, Part]] = {}
        self.after: dict[str, Mapping[Key, Part]] = {}
        self.own_answers: list[tuple[list[int], list[int]]] = []  # prompt, answer
        # of the validation examples, as last measured
        self.mean_losses: list[float] = []

    def restore(self) -> None:
        """Read what an interrupted run measured before its first step; a damaged file is as none,
        and the run ends without a verdict."""
        # the first process reads, and the others get what it has read
        if self.fabric.global_rank == 0:
            self.before = parts_in(self.path, "before")
            self.own_answers = self._answers_in_file()
        self.before = self.fabric.broadcast(self.before)
        self.own_answers = self.fabric.broadcast(self.own_answers)

    def _answers_in_file(self) -> list[tuple[list[int], list[int]]]:
        try:
            answers = json.loads(self.path.read_text("utf-8"))["own_answers"]
            return [(list(prompt), list(answer)) for prompt, answer in answers]
        except (OSError, ValueError, TypeError, KeyError):
            return []

    def measure_before(self, texts: ComparedTexts, layout: BatchLayout) -> None:
        """Measure the model before its first step."""
        if not texts:
            return
        if texts.forgetting:
            self.own_answers = self._answers(layout)
        self.before = self._measure(texts, layout, is_before=True)
        self._write()

    def measure_after(self, texts: ComparedTexts, layout: BatchLayout) -> None:
        """Measure the trained model, and compare it with the model before its first step."""
        if not texts:
            return
        # what was not measured before the first step has nothing to be compared with
        texts = replace(texts, forgetting=texts.forgetting and NEUTRAL in self.before)
        self.forgetting = texts.forgetting
        self.after = self._measure(texts, layout, is_before=False)
        self.verdicts = verdicts(self.before, self.after)
        self._write()

    def _measure(
        self, texts: ComparedTexts, layout: BatchLayout, is_before: bool
    ) -> dict[str, Mapping[Key, Part]]:
        """Return what each text adds to its score; is_before: before the first step."""
        measured: dict[str, Mapping[Key, Part]] = {}
        if len(texts.examples):
            losses = self._losses(texts.examples, layout)
            measured["loss"] = texts.parts(losses.values())
            self.mean_losses = [part.value / part.weight for part in losses.values()]
        if texts.preferences:
            measured |= self._preference_scores(texts, layout, is_before)
        if texts.rewards:
            rated = texts.parts(texts.rewards)
            measured["reward"] = {name: part for name, part in rated.items() if part.weight}
        if texts.exact:
            measured["exact_match"] = texts.exact
        if texts.forgetting:
            limit = self.data.limit
            measured[NEUTRAL] = self._losses(neutral_samples(self.tokenizer, limit), layout)
            answers = answer_samples(self.own_answers, limit)
            if answers:
                measured[OWN_ANSWERS] = self._losses(answers, layout)
        return measured

    def _preference_scores(
        self, texts: ComparedTexts, layout: BatchLayout, is_before: bool
    ) -> dict[str, Mapping[Key, Part]]:
        """Return the objective's scores of each preference."""
        samples = texts.preferences
        if is_before and texts.objective.needs_reference:
            # the reference is the model before its first step: measured again, in batches of other
            # shapes, it would differ by rounding errors
            references = [sample.reference for sample in samples]
            log_probs = torch.tensor(references, dtype=torch.float64)
        else:
            own, _ = document_log_probs(
                self.model,
                samples,
                layout,
                self.fabric.device,
                rank=self.fabric.global_rank,
                before_batch=self.before_batch,
            )
            log_probs = sum_over_processes(self.fabric, own).cpu()
        counts = []
        for sample in samples:
            counts.append([document.supervised for document in sample.split()])
        lengths = torch.tensor(counts, dtype=torch.float64)
        measured: dict[str, Mapping[Key, Part]] = {}
        for name, values in texts.objective.scores_of_each(
            samples, log_probs, lengths, texts.weights
        ).items():
            measured[name] = texts.parts(map(Part, values.tolist()))
        return measured

    def _losses(self, samples: Sequence[Sample], layout: BatchLayout) -> dict[Key, Part]:
        """Return what each sample adds to the loss per token, whatever the temperature of the
        rollouts is."""
        temperature = self.model.loss_temperature
        self.model.loss_temperature = 1.0
        try:
            return loss_parts(
                self.model,
                samples,
                layout,
                rank=self.fabric.global_rank,
                sum_over_processes=lambda values: sum_over_processes(self.fabric, values),
                before_batch=self.before_batch,
            )
        finally:
            self.model.loss_temperature = temperature

    def _answers(self, layout: BatchLayout) -> list[tuple[list[int], list[int]]]:
        """Return ordinary questions with the model's answers, in tokens."""
        questions = ordinary_questions()[:NUM_QUESTIONS]
        prompts = question_prompts(
            self.tokenizer, questions, self.data.system_prompt, self.data.is_plain_text
        )
        with eval_mode(self.model):
            answers = greedy_completions(
                self.fabric,
                self.cpu_group,
                self.model,
                self.tokenizer,
                prompts=[(prompt, ANSWER_TOKENS) for prompt in prompts],
                rows=_answers_at_once(self.model, layout, max(map(len, prompts))),
                before_batch=self.before_batch,
            )
        return [
            (prompt, answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)
        ]

    def lines(self) -> list[str]:
        """Return the verdicts as text, and what was not measured; nothing if nothing was measured
        before training."""
        lines = [str(verdict) for verdict in self.verdicts]
        if lines and not self.forgetting:
            lines.append(NOT_MEASURED)
        return lines

    def _write(self) -> None:
        if self.fabric.global_rank:
            return
        found = []
        for verdict in self.verdicts:
            found.append(
                asdict(verdict) | {"outcome": verdict.outcome, "text": str(verdict)}
            )
        content = {
            "verdicts": found,
            "before": stored_parts(self.before),
            "after": stored_parts(self.after),
            "own_answers": self.own_answers,
        }
        atomic_write(self.path, json.dumps(content) + "\n")


def _answers_at_once(model: GPT, layout: BatchLayout, longest: int) -> int:
    """Return how many answers to generate at once to prompts of at most `longest` tokens.

    As many as a micro-batch of training has room for, by its number of tokens, or as many as have a
    KV cache that is small compared with the weights, whichever is more; at most MAX_ANSWER_ROWS.
    """
    answered = longest + ANSWER_TOKENS
    if layout.row_tokens is None:
        rows = layout.rows
    else:
        rows = layout.rows * layout.row_tokens // answered
    row_bytes = answered * KVCache.token_bytes(model.config, model.dtype)
    row_bytes += KVCache.state_bytes(model.config)
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    small = int(max(CACHE_BYTES, CACHE_SHARE * weight_bytes) // row_bytes)
    return max(1, min(MAX_ANSWER_ROWS, max(rows, small)))
