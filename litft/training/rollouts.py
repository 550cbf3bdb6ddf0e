"""Rollouts: completions of a step's prompts by the model that is trained, their rewards and
advantages.

The decoder runs on the network itself, with the method in it: nothing is merged or copied. What the
i-th completion of a prompt draws depends on the seed, the step, the prompt's place in the step and
i alone.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from litft.data.packing import BatchLayout
from litft.data.sample import Sample
from litft.data.tokenizer import Tokenizer
from litft.distributed.process_group import Processes
from litft.evaluation.log_probs import target_log_probs
from litft.evaluation.rated import completed
from litft.evaluation.rewards.scorer import RewardError, RewardScorer
from litft.evaluation.verdict import Part
from litft.inference.generation import Completion
from litft.model.loss import IGNORED
from litft.model.transformer import GPT
from litft.training.completions import (
    CompletionWriter,
    Draw,
    DrawSettings,
    completed_sample,
)
from litft.training.frozen_copy import FrozenCopy
from litft.training.memory_saving.compile import uncompiled
from litft.training.objectives.grpo import GRPO, spread
from litft.training.run_setup import RunSetup

# a group with a smaller standard deviation has rewards that are all equal
EQUAL_REWARDS = 1e-8
# a completion passes if its first reward is at least this
PASSED = 1.0

# P prompts, G completions of each, F reward functions


class MeasuredRewards(NamedTuple):
    """How completions of P prompts were rated."""

    scores: list[float]  # in the order of the objective's, after the loss
    # of each score, how many completions or prompts it is the mean of: those that are rated
    counts: list[int]
    # (P,): of each prompt, the sum over its completions that are rated, and their number
    of_prompts: list[Part]


@dataclass(frozen=True)
class Rated:
    """The completions of P prompts, in the order of the prompts, and their rewards."""

    completions: list[Completion]  # P * G of them
    values: Tensor  # (P, G, F) fp64: of each function; NaN: it does not apply
    rewards: Tensor  # (P, G) fp64: the weighted sums; NaN: no function applies
    rollout_seconds: float
    reward_seconds: float

    def with_groups(self, places: Sequence[int], drawn: "Rated") -> "Rated":
        """Return a copy in which the groups at these places are those that were drawn again."""
        size = self.rewards.size(1)
        completions = list(self.completions)
        values = self.values.clone()
        rewards = self.rewards.clone()
        for number, place in enumerate(places):
            group = drawn.completions[number * size : (number + 1) * size]
            completions[place * size : (place + 1) * size] = group
            values[place] = drawn.values[number]
            rewards[place] = drawn.rewards[number]
        return Rated(
            completions=completions,
            values=values,
            rewards=rewards,
            rollout_seconds=self.rollout_seconds + drawn.rollout_seconds,
            reward_seconds=self.reward_seconds + drawn.reward_seconds,
        )


class Rollouts:
    """Answers prompts with the network of a run, and rates the answers. Every process takes part in
    each method."""

    def __init__(
        self,
        processes: Processes,
        model: GPT,
        tokenizer: Tokenizer,
        objective: GRPO,
        seed: int,
        retries: bool,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        # retries: generate fewer completions at once after an out-of-memory error; say: prints a
        # line
        # the reference is the network as it is now: an adapter that training continues is a part of
        # it, and trained weights of the base have other values later
        self.frozen_copy = FrozenCopy(model) if objective.grpo.beta > 0 else None
        self.say = say
        self.has_warned = False  # of a step without a reward
        self.fabric = processes.fabric
        self.cpu_group = processes.cpu_group
        self.model = model
        self.objective = objective
        self.args = objective.grpo
        self.rewards = objective.rewards
        settings = DrawSettings(
            self.args.temperature, self.args.top_p, self.args.rollout_rows
        )
        self.writer = CompletionWriter(processes, model, tokenizer, settings, seed, retries)
        self.scorer = RewardScorer(self.rewards, self.args.reward_timeout_seconds)

    def collect(
        self, step: int, prompts: Sequence[Sample], layout: BatchLayout
    ) -> tuple[list[Sample], dict[str, float]]:
        """Return the completions of a step's prompts as samples with advantages, and values of the
        objective's `columns`.

        prompts: each G times in a row. Raises RewardError if a reward function fails.
        """
        rated = self._with_unequal_rewards(f"step {step}", prompts)
        samples = []
        for prompt, completion in zip(prompts, rated.completions, strict=True):
            is_masked = self.args.mask_truncated and not completion.ended
            samples.append(
                _sample(prompt, completion, is_masked, self.args.temperature == 1.0)
            )

        rewards = rated.rewards
        if rewards.isnan().all() and not self.has_warned:
            self.has_warned = True
            self.say(
                f"warning: step {step + 1}: no reward function applies to a completion (each "
                "returned None), so the step learns nothing"
            )
        if self.objective.has_kl_reward:
            # the divergence is a part of the reward, so it is needed of all completions
            samples = self._with_log_probs(samples, layout)
            rewards = rewards - self.args.beta * _divergences(samples).view_as(rewards)
        advantages = self.objective.advantages(rewards).flatten().tolist()
        samples = [
            replace(sample, advantage=advantage)
            for sample, advantage in zip(samples, advantages, strict=True)
        ]
        if not self.objective.has_kl_reward:
            samples = self._with_log_probs(samples, layout)
        return samples, self._facts(rated)

    def _with_unequal_rewards(self, name: str, prompts: Sequence[Sample]) -> Rated:
        """Generate and rate completions; those of prompts whose completions all have one reward
        again, up to --grpo.resample times."""
        rated = self.rate(name, prompts)
        size = self.args.group_size
        for attempt in range(1, self.args.resample + 1):
            is_equal = spread(rated.rewards)[:, 0] < EQUAL_REWARDS  # (P,)
            places = is_equal.nonzero()[:, 0].tolist()
            if not places:
                break
            again = []
            for place in places:
                again += prompts[place * size : (place + 1) * size]
            drawn = self.rate(f"{name}, draw {attempt}", again, places)
            rated = rated.with_groups(places, drawn)
        return rated

    def _with_log_probs(self, samples: list[Sample], layout: BatchLayout) -> list[Sample]:
        """Return completions with what the loss compares their log-probabilities with: those before
        the updates, and those of the reference; as far as they have a gradient."""
        if samples[0].advantage is None:
            learned = samples
        else:
            learned = list(self.objective.learned(samples))
        changed = learned
        if self.objective.needs_old:
            old = self._log_probs(learned, layout)
            changed = [
                replace(sample, old=values)
                for sample, values in zip(changed, old, strict=True)
            ]
        if self.args.beta:
            with self._as_reference():
                reference = self._log_probs(learned, layout)
            changed = [
                replace(sample, reference_tokens=values)
                for sample, values in zip(changed, reference, strict=True)
            ]
        by_identity = {
            id(before): after for before, after in zip(learned, changed, strict=True)
        }
        return [by_identity.get(id(sample), sample) for sample in samples]

    def _as_reference(self) -> AbstractContextManager[None]:
        """Return a context in which the network is the reference: it has the weights before the
        first step."""
        assert self.frozen_copy is not None  # with --grpo.beta
        return self.frozen_copy.in_place()

    def measure(self, prompts: Sequence[Sample]) -> MeasuredRewards:
        """Complete these prompts, and rate the completions.

        The scores are minus the mean reward, the mean reward, and the shares of completions that
        pass (pass@1), and of prompts with one that does (pass@G).
        """
        repeated = [prompt for prompt in prompts for _ in range(self.args.group_size)]
        rated = self.rate("validation", repeated)
        if rated.rewards.isnan().all():
            names = ", ".join(reward.name for reward in self.rewards)
            raise RewardError(
                f"--reward: no function ({names}) applies to a validation prompt: each returned "
                "None; change the functions, or leave the validation out (--data.val_fraction 0)"
            )
        reward = rated.rewards.nanmean().item()
        of_first = rated.values[:, :, 0]
        at_one, at_all = _pass_rates(of_first)
        scores = [-reward, reward, at_one, at_all]
        sums = rated.rewards.nansum(1).tolist()
        counts = (~rated.rewards.isnan()).sum(1).tolist()
        is_rated = ~of_first.isnan()
        of_scores = [
            sum(counts),
            sum(counts),
            int(is_rated.sum()),
            int(is_rated.any(1).sum()),
        ]
        return MeasuredRewards(scores, of_scores, list(map(Part, sums, counts)))

    def rate(
        self, name: str, prompts: Sequence[Sample], places: Sequence[int] | None = None
    ) -> Rated:
        """Generate a completion of each prompt, and rate it.

        name, places: of the random numbers; places: one for each group, by default their order.
        """
        if places is None:
            places = range(len(prompts) // self.args.group_size)
        start = time.perf_counter()
        own = self._own_numbers(len(prompts))
        completions = self._generate(name, prompts, own, places)
        generated = time.perf_counter()
        values, error = self._own_rewards([prompts[number] for number in own], completions)
        rated = time.perf_counter()
        numbered = self._of_all_processes(own, completions, values, error)
        all_values = torch.tensor([item[2] for item in numbered], dtype=torch.float64)
        all_values = all_values.view(-1, self.args.group_size, len(self.rewards))
        return Rated(
            completions=[item[1] for item in numbered],
            values=all_values,
            rewards=self._weighted(all_values),
            rollout_seconds=generated - start,
            reward_seconds=rated - generated,
        )

    def _of_all_processes(
        self,
        own: list[int],
        completions: list[Completion],
        values: list[list[float]],
        error: str | None,
    ) -> list[tuple[int, Completion, list[float]]]:
        """Return the numbers, completions and values of all processes, in the order of the numbers;
        raise RewardError with the message of the first process that has one."""
        numbered: list[tuple[int, Completion, list[float]]] = []
        for numbers, of_rank, of_functions, failure in self.cpu_group.all_gather(
            (own, completions, values, error)
        ):
            if failure is not None:
                raise RewardError(failure)
            numbered += zip(numbers, of_rank, of_functions, strict=True)
        return sorted(numbered, key=lambda item: item[0])

    def _own_numbers(self, count: int) -> list[int]:
        """Return the completions, of `count`, that this process generates: whole groups."""
        own = []
        for number in range(count):
            group = number // self.args.group_size
            if group % self.fabric.world_size == self.fabric.global_rank:
                own.append(number)
        return own

    def _weighted(self, values: Tensor) -> Tensor:
        """Return the weighted sum over the functions, (P, G), of their values (P, G, F); NaN where
        none applies."""
        weights = torch.tensor(
            [reward.weight for reward in self.rewards], dtype=torch.float64
        )
        sums = (values * weights).nansum(2)
        return sums.masked_fill(values.isnan().all(2), torch.nan)

    def _generate(
        self,
        name: str,
        prompts: Sequence[Sample],
        numbers: Sequence[int],
        places: Sequence[int],
    ) -> list[Completion]:
        """Return completions of the prompts with these numbers; places: of each group."""
        draws = []
        for number in numbers:
            group, index = divmod(number, self.args.group_size)
            place = places[group]
            prompt_ids = prompts[number].prompt_ids
            draws.append(
                Draw(f"{name}, {place}, {index}", prompt_ids, self.args.max_new_tokens)
            )
        return self.writer.write(draws)

    def _own_rewards(
        self, prompts: Sequence[Sample], completions: Sequence[Completion]
    ) -> tuple[list[list[float]], str | None]:
        """Return the values of each function for this process's completions, NaN where it does not
        apply, or the message of a function that has failed."""
        items = []
        for prompt, completion in zip(prompts, completions, strict=True):
            items.append(completed(prompt, completion.text, len(completion.tokens)))
        if not items:
            return [], None
        try:
            values = self.scorer.score(items)
        except RewardError as error:
            return [], str(error)
        return [
            [torch.nan if value is None else value for value in row] for row in values
        ], None

    def _log_probs(self, samples: list[Sample], layout: BatchLayout) -> list[Tensor]:
        """Return the log-probabilities of the targets of each sample, (N,), on every process."""
        with uncompiled():
            own = target_log_probs(
                self.model, samples, layout, self.fabric.device, self.fabric.global_rank
            )
        return self.cpu_group.gather_parts(own)

    def _facts(self, rated: Rated) -> dict[str, float]:
        """Return the values of columns that the loss does not give."""
        completions = rated.completions
        deviations = spread(rated.rewards)
        facts: dict[str, Any] = {
            "reward": rated.rewards.nanmean(),
            "reward_std": deviations.mean(),
            "equal_rewards": (deviations < EQUAL_REWARDS).double().mean(),
            "completion_tokens": sum(len(item.tokens) for item in completions)
            / len(completions),
            "truncated": sum(not item.ended for item in completions) / len(completions),
            "rollout_seconds": rated.rollout_seconds,
            "reward_seconds": rated.reward_seconds,
        }
        for number, reward in enumerate(self.rewards):
            facts[f"reward_{reward.name}"] = rated.values[:, :, number].nanmean()
        return {name: float(value) for name, value in facts.items()}

    def close(self) -> None:
        """End the processes of the reward functions."""
        self.scorer.close()


def open_rollouts(
    processes: Processes, setup: RunSetup, model: GPT, say: Callable[[str], None]
) -> Rollouts | None:
    """Return the rollouts of a run; None if it does not learn from rewards. say: prints a line."""
    if not isinstance(setup.objective, GRPO):
        return None
    return Rollouts(
        processes,
        model,
        setup.tokenizer,
        objective=setup.objective,
        seed=setup.args.seed,
        retries=setup.args.train.oom_retry,
        say=say,
    )


def rewards_together(
    by_set: Sequence[MeasuredRewards], factors: Sequence[float]
) -> list[float]:
    """Return the scores of several sets of prompts together: means over all that is rated. factors:
    how many prompts of its set each measured one stands for."""
    means = []
    for column in range(len(by_set[0].scores)):
        total = 0.0
        count = 0.0
        for measured, factor in zip(by_set, factors, strict=True):
            # a set that the first function rates nothing of has no pass rates
            if measured.counts[column]:
                weight = measured.counts[column] * factor
                total += measured.scores[column] * weight
                count += weight
        means.append(total / count if count else math.nan)
    return means


def _pass_rates(values: Tensor) -> tuple[float, float]:
    """Return the share of completions that pass, and of prompts with one that does, of the values
    (P, G) of a function; those to which it does not apply (NaN) are left out."""
    is_rated = ~values.isnan()
    passed = values >= PASSED
    of_completions = passed[is_rated].double().mean().item()
    of_prompts = passed.any(1)[is_rated.any(1)].double().mean().item()
    return of_completions, of_prompts


def _divergences(samples: Sequence[Sample]) -> Tensor:
    """Return the log of each completion's probability relative to the reference, (P * G,)."""
    divergences = []
    for sample in samples:
        assert sample.old is not None
        assert sample.reference_tokens is not None
        divergences.append((sample.old - sample.reference_tokens).double().sum())
    return torch.stack(divergences)


def _sample(
    prompt: Sample, completion: Completion, is_masked: bool, is_plain: bool
) -> Sample:
    """Return a completion as a sample, whose targets are its tokens; none if it is masked.

    is_plain: it was drawn from the probabilities that the decoder reports.
    """
    sample = completed_sample(prompt.prompt_ids, completion)
    decoded = torch.tensor(completion.logprobs)
    if is_masked:
        sample.targets[:] = IGNORED
        decoded = decoded[:0]
    return replace(
        sample,
        prompt=prompt.prompt,
        decoded=decoded if is_plain else None,
        shared_tokens=len(prompt.prompt_ids) - 1,
    )
