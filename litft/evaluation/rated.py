"""Greedy answers to prompts, rated by reward functions: `run_eval --reward`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from litft.args import RunEvalArgs
from litft.data.sample import Sample
from litft.evaluation.examples import answer_tokens
from litft.evaluation.rewards.call import Completed
from litft.evaluation.rewards.reward import Reward, parse_rewards
from litft.evaluation.rewards.scorer import RewardScorer
from litft.evaluation.scoring import greedy_request
from litft.inference.generation import Completion
from litft.inference.session import Session

# the longest time of a function for one answer, in seconds
REWARD_SECONDS = 10.0


@dataclass(frozen=True)
class RatedAnswers:
    """Answers to prompts, in their order, and what each reward function gives them."""

    answers: list[Completion]
    rewards: list[Reward]
    # of each answer: of each function; None: it does not apply
    values: list[list[float | None]]

    def totals(self) -> list[float | None]:
        """Return the weighted sum of each answer; None where no function applies."""
        totals: list[float | None] = []
        for of_answer in self.values:
            weighted = []
            for reward, value in zip(self.rewards, of_answer, strict=True):
                if value is not None:
                    weighted.append(reward.weight * value)
            totals.append(sum(weighted) if weighted else None)
        return totals

    def scores(self) -> dict[str, float]:
        """Return the number of answers, how many of them the length limit has cut, the mean of the
        weighted sums, and that of each function."""
        sums = [total for total in self.totals() if total is not None]
        num_cut = sum(not answer.ended for answer in self.answers)
        scores = {
            "answers": float(len(self.answers)),
            "answers cut": float(num_cut),
            "reward": _mean(sums),
        }
        if len(self.rewards) > 1:
            for number, reward in enumerate(self.rewards):
                of_function = [of_answer[number] for of_answer in self.values]
                known = [value for value in of_function if value is not None]
                scores[f"reward_{reward.name}"] = _mean(known)
        return scores


def _mean(values: Sequence[float]) -> float:
    """Return the mean; NaN of no values."""
    return sum(values) / len(values) if values else math.nan


def completed(prompt: Sample, text: str, tokens: int) -> Completed:
    """Return what reward functions get of a completion with so many tokens."""
    assert prompt.prompt is not None  # the samples of prompts have one
    return Completed(
        completion=text,
        completion_tokens=tokens,
        prompt=prompt.prompt.messages,
        columns=prompt.prompt.columns,
    )


def rate_answers(
    name: str, session: Session, samples: Sequence[Sample], args: RunEvalArgs
) -> RatedAnswers:
    """Answer prompts greedily and rate the answers. name: of the model, for the progress bar.

    Raises RewardError if a reward function fails.
    """
    rewards = parse_rewards(args.reward)
    max_tokens = answer_tokens(args)
    requests = []
    for sample in samples:
        requests.append(
            greedy_request(session.model, session.tokenizer, sample.prompt_ids, max_tokens)
        )
    answers = session.generate(requests, args.batch_size, f"{name}: answers")
    items = []
    for sample, answer in zip(samples, answers, strict=True):
        items.append(completed(sample, answer.text, len(answer.tokens)))
    scorer = RewardScorer(rewards, REWARD_SECONDS)
    try:
        values = scorer.score(items)
    finally:
        scorer.close()
    return RatedAnswers(answers, rewards, values)
