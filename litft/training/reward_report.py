"""What the reward functions say of the answers in the data: shown before a run begins."""

from collections.abc import Iterator
from itertools import islice

from litft.data.dataset import DataSplits
from litft.data.tokenizer import Tokenizer
from litft.evaluation.rated import completed
from litft.evaluation.rewards.builtin import alternatives
from litft.evaluation.rewards.scorer import RewardScorer
from litft.training.objectives.grpo import GRPO

# prompts whose own answers are rated
RATED = 32


def reward_lines(objective: GRPO, data: DataSplits, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the mean reward of the first answers of the data, by function; a function that fails
    raises RewardError here rather than after the weights are read."""
    items = []
    for sample in islice(data.train, RATED):
        assert sample.prompt is not None  # the samples of --objective grpo have one
        answer = sample.prompt.columns.get("answer")
        # an object may be read by a function of the user's
        texts = [str(answer)] if isinstance(answer, dict) else alternatives(answer)
        if not texts:
            continue
        # with the token that ends a completion
        tokens = len(tokenizer.encode(texts[0], bos=False)) + 1
        items.append(completed(sample, texts[0], tokens))
    if not items:
        yield "the records have no answer; the reward functions are tried in the first step"
        return
    scorer = RewardScorer(objective.rewards, objective.grpo.reward_timeout_seconds)
    try:
        values = scorer.score(items)
    finally:
        scorer.close()
    means = []
    for number, reward in enumerate(objective.rewards):
        known = []
        for row in values:
            value = row[number]
            if value is not None:
                known.append(value)
        mean = f"{sum(known) / len(known):.3g}" if known else "does not apply"
        means.append(f"{reward.name} {mean}")
    yield f"rewards of the first {len(items)} answers of the data: {', '.join(means)}"
