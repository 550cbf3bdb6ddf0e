"""On-policy distillation: the student answers a share of the questions itself, and the teacher
judges these answers instead of the data's (arXiv 2306.13649)."""

import time
from collections.abc import Sequence
from dataclasses import replace

from litft.data.digests import hash64
from litft.data.packing import BatchLayout
from litft.data.sample import Sample, TeacherValues
from litft.distributed.process_group import Processes
from litft.inference.generation import Completion
from litft.model.transformer import GPT
from litft.training.completions import (
    CompletionWriter,
    Draw,
    DrawSettings,
    completed_sample,
)
from litft.training.objectives.distill import ROWS
from litft.training.run_setup import RunSetup
from litft.training.teacher import Teacher


class OwnAnswers:
    """Replaces the answers of some samples by the student's own. Every process takes part."""

    def __init__(
        self,
        processes: Processes,
        setup: RunSetup,
        model: GPT,
        teacher: Teacher,
        limit: int,
    ) -> None:
        # limit: the most tokens of a sample
        self.fabric = processes.fabric
        self.cpu_group = processes.cpu_group
        self.args = setup.args.distill
        self.seed = setup.args.seed
        self.teacher = teacher
        self.limit = limit
        # as the student would answer: without a change of its probabilities
        self.writer = CompletionWriter(
            processes,
            model,
            setup.tokenizer,
            settings=DrawSettings(
                temperature=1.0,
                top_p=1.0,
                rows=ROWS,
                # a padded vocabulary has tokens that the teacher cannot read
                vocab_size=teacher.model.config.vocab_size,
            ),
            seed=setup.args.seed,
            retries=setup.args.train.oom_retry,
        )

    def replaced(
        self, step: int, samples: Sequence[Sample], layout: BatchLayout
    ) -> tuple[list[Sample], dict[str, float]]:
        """Return the samples of a step, a share of them with the student's own answers, and values
        of columns of metrics.csv."""
        start = time.perf_counter()
        result = list(samples)
        chosen = [
            place for place in range(len(samples)) if self._is_own(step, place, samples)
        ]
        answers = self._answers(step, samples, chosen)
        own = []
        for place, answer in answers.items():
            sample = completed_sample(samples[place].prompt_ids, answer)
            own.append(replace(sample, is_own=True))
        answered = time.perf_counter()
        for place, sample, values in zip(
            answers, own, self._judged(own, layout), strict=True
        ):
            result[place] = replace(sample, teacher=values)
        facts = {
            "own_answers": len(own) / len(samples),
            "rollout_seconds": answered - start,
            "teacher_seconds": time.perf_counter() - answered,
        }
        if own:
            lengths = [len(answer.tokens) for answer in answers.values()]
            facts["completion_tokens"] = sum(lengths) / len(lengths)
        return result, facts

    def _is_own(self, step: int, place: int, samples: Sequence[Sample]) -> bool:
        """Whether the student answers the question of a sample; a text has none."""
        drawn = hash64(f"{self.seed}, own, {step}, {place}") / 2**64
        return drawn < self.args.on_policy and samples[place].answer is not None

    def _answers(
        self, step: int, samples: Sequence[Sample], chosen: Sequence[int]
    ) -> dict[int, Completion]:
        """Return the student's answers to the chosen samples' questions, by place in the step."""
        own = chosen[self.fabric.global_rank :: self.fabric.world_size]
        draws = []
        for place in own:
            prompt_ids = samples[place].prompt_ids
            room = max(1, min(self.args.max_new_tokens, self.limit - len(prompt_ids)))
            draws.append(Draw(f"own answer, {step}, {place}", prompt_ids, room))
        completions = self.writer.write(draws)
        answers: dict[int, Completion] = {}
        for places, of_rank in self.cpu_group.all_gather((own, completions)):
            answers |= zip(places, of_rank, strict=True)
        return {place: answers[place] for place in chosen}

    def _judged(self, samples: list[Sample], layout: BatchLayout) -> list[TeacherValues]:
        """Return what the teacher says of samples, on every process."""
        # of a step without own answers
        if not samples:
            return []
        return self.cpu_group.gather_parts(self.teacher.judge(samples, layout))


def open_own_answers(
    processes: Processes,
    setup: RunSetup,
    model: GPT,
    teacher: Teacher | None,
    limit: int,
) -> OwnAnswers | None:
    """Return what replaces answers by the student's own; None if the run has none. limit: the most
    tokens of a sample."""
    if teacher is None:
        return None
    return OwnAnswers(processes, setup, model, teacher, limit)
