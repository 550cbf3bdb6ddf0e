"""Learning from rewards: GRPO (arXiv 2402.03300) and the losses that others have made of it.

Completions are compared with others of the same prompt, so that no network estimates values.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from litft.args import FinetuneArgs, GrpoArgs
from litft.data.packing import Completions, MicroBatch
from litft.data.sample import Sample
from litft.evaluation.rewards.reward import Reward, parse_rewards
from litft.training.objectives.objective import Objective, Totals

# D completions of a micro-batch, N tokens of them

# losses with one ratio for each token; the others have one for each completion
PER_TOKEN = ("grpo", "dr_grpo", "dapo", "cispo")
# added to a standard deviation, as in TRL
EPSILON = 1e-4


class Update(NamedTuple):
    """What a micro-batch increases."""

    ratios: Tensor  # (N,): of the probability to that before the updates, for each token
    gains: Tensor  # of each token, (N,), or of each completion, (D,)
    clipped: Tensor  # (N,) bool: whether the ratio is beyond its limit


class GRPO(Objective):
    """The clipped objective of PPO over completions with advantages: min(r A, clip(r) A).

    r is the probability of a token, or of a completion, relative to that before the step's updates.
    The losses differ in what r is of, and in what the sum is divided by; gspo: arXiv 2507.18071,
    dr_grpo: 2503.20783, dapo: 2503.14476, cispo: 2506.13585, rloo: 2402.14740.
    Learning rate: as for DPO.
    """

    name = "grpo"
    title = "GRPO"
    needs_token_losses = True
    paper = "2402.03300"
    scores = ("entropy", "clipped", "kl", "mismatch")
    full_learning_rate = 5e-6

    def __init__(self, args: GrpoArgs, rewards: Sequence[Reward]) -> None:
        self.grpo = args
        self.rewards = list(rewards)
        self.updates = args.updates
        self.group_size = args.group_size
        self.completion_tokens = args.max_new_tokens
        # the rollouts, the log-probabilities before the updates, and those of the reference
        self.extra_forward_passes = 1 + self.needs_old + (args.beta > 0)

    @classmethod
    def of(cls, args: FinetuneArgs, rewards: Sequence[Reward] = ()) -> "GRPO":
        """Return the objective of the flags; rewards: functions in place of those of --reward."""
        return cls(args.grpo, rewards or parse_rewards(args.reward))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of metrics.csv that a step has next to the loss."""
        functions = tuple(f"reward_{reward.name}" for reward in self.rewards)
        of_completions = ("reward_std", "equal_rewards", "completion_tokens", "truncated")
        seconds = ("rollout_seconds", "reward_seconds")
        return ("reward", *functions, *of_completions, *seconds, *self.scores)

    @property
    def validation_scores(self) -> tuple[str, ...]:
        """The mean reward, and the shares of completions and of prompts that pass."""
        return ("reward", "pass_1", f"pass_{self.group_size}")

    @property
    def needs_old(self) -> bool:
        """Whether the log-probabilities before the updates differ from those of the loss, or are
        needed before it."""
        return self.updates > 1 or self.has_kl_reward

    def uniform_loss(self, vocab_size: int) -> float:
        """Return infinity: the loss has the scale of the rewards, so that none is too large."""
        return math.inf

    @property
    def beta_or_none(self) -> float | None:
        """--preference.beta does not apply."""
        return None

    @property
    def has_kl_term(self) -> bool:
        """Whether the loss has the KL divergence."""
        return self.grpo.beta > 0 and self.grpo.loss != "rloo"

    @property
    def has_kl_reward(self) -> bool:
        """Whether the KL divergence is subtracted from the rewards."""
        return self.grpo.beta > 0 and self.grpo.loss == "rloo"

    def totals(self, samples: Sequence[Sample]) -> Totals:
        """Return the number of completions, of their tokens that are in the loss, and of those that
        have a gradient."""
        tokens = sum(sample.supervised for sample in samples)
        learned = sum(sample.supervised for sample in samples if self._has_gradient(sample))
        return Totals(len(samples), tokens, learned=learned)

    def learned(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return the completions that have an advantage: others have no gradient, but for the KL
        term.

        At least one is returned, so that each process has a backward pass.
        """
        learned = [sample for sample in samples if self._has_gradient(sample)]
        return learned or samples[:1]

    def _has_gradient(self, sample: Sample) -> bool:
        """Return whether a completion changes the weights."""
        if self.has_kl_term:
            return True
        return bool(sample.advantage and sample.supervised)

    def __call__(self, model: nn.Module, batch: MicroBatch, totals: Totals) -> Tensor:
        """Return (5,): this micro-batch's share of the step's loss and of the scores."""
        log_probs = -model(batch.tokens, **batch.inputs(), reduction="none")  # (N,)
        completions = batch.completions
        # a process without samples, or a micro-batch that only measures memory
        if completions is None:
            return torch.cat([log_probs.sum()[None], log_probs.new_zeros(len(self.scores))])
        if completions.old is None:
            old = log_probs.detach()
        else:
            old = completions.old
        lengths = torch.zeros_like(completions.advantages)  # (D,)
        lengths = lengths.index_add(0, completions.numbers, torch.ones_like(log_probs))
        weights = self._token_weights(lengths[completions.numbers], totals)  # (N,)
        if self.grpo.loss in PER_TOKEN:
            ratios, gains, clipped = self._by_token(log_probs, old, completions)
            loss = -(gains * weights).sum()
        else:
            ratios, gains, clipped = self._by_completion(
                log_probs, old, completions, lengths
            )
            loss = -gains.sum() / totals.samples

        kl = self._divergence(log_probs, completions)
        if self.has_kl_term:
            # with the ratio, the gradient is that of the divergence (arXiv 2512.02556)
            loss = loss + self.grpo.beta * (kl * ratios * weights).sum()
        with torch.no_grad():
            # the decoder's log-probabilities are those at temperature 1
            # filled on the device: a copy of a number would wait for it
            mismatch = old.new_full((), math.nan)
            if completions.decoded is not None:
                mismatch = (old - completions.decoded).abs().sum()
            sums = [-log_probs.sum(), clipped.sum(), kl.sum(), mismatch]
            # without a completion that has an advantage, they have no value
            means = torch.stack([value.float() for value in sums]) / (
                totals.learned or math.nan
            )
        return torch.cat([loss[None], means])

    def _by_token(self, log_probs: Tensor, old: Tensor, completions: Completions) -> Update:
        """Return the update with a ratio for each token; log_probs and old are (N,)."""
        ratios = (log_probs - old).exp()
        advantages = completions.advantages[completions.numbers]
        gains, clipped = self._gains(ratios, log_probs, advantages)
        return Update(ratios, gains, clipped)

    def _by_completion(
        self, log_probs: Tensor, old: Tensor, completions: Completions, lengths: Tensor
    ) -> Update:
        """Return the update with a ratio for each completion, which has `lengths` tokens, (D,)."""
        numbers = completions.numbers
        sums = torch.zeros_like(lengths).index_add(0, numbers, log_probs - old)
        if self.grpo.loss == "gspo":
            # the geometric mean of the tokens' ratios
            sums = sums / lengths.clamp(min=1)
        gains, clipped = self._gains(sums.exp(), sums, completions.advantages)
        # one that is masked has no tokens
        return Update(sums.exp()[numbers], gains * (lengths > 0), clipped[numbers])

    def advantages(self, rewards: Tensor) -> Tensor:
        """Return how much better each completion is than others, (P, G), of rewards (P, G) of P
        groups; 0 for a reward of NaN, which no function has given."""
        is_rated = ~rewards.isnan()
        count = is_rated.sum(1, keepdim=True)  # (P, 1)
        differences = rewards - rewards.nanmean(1, keepdim=True)
        kind = self.grpo.advantages_or_default
        if kind == "leave_one_out":
            # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1)
            differences = differences * count / (count - 1)
        elif kind == "group":
            differences = differences / (spread(rewards) + EPSILON)
        elif kind == "batch":
            differences = differences / (spread(rewards.view(1, -1)) + EPSILON)
        return differences.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def _gains(
        self, ratios: Tensor, log_probs: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return what the update increases, and whether a ratio is beyond its limit in the
        direction of its advantage; all of one shape."""
        low = 1 - self.grpo.clip_low
        high = 1 + self.grpo.clip_high
        is_above = (ratios > high) & (advantages > 0)
        if self.grpo.loss == "cispo":
            # the clipped ratio is a weight, so that no token loses its gradient
            return ratios.clamp(max=high).detach() * advantages * log_probs, is_above
        is_below = (ratios < low) & (advantages < 0)
        gains = torch.minimum(ratios * advantages, ratios.clamp(low, high) * advantages)
        return gains, is_above | is_below

    def _token_weights(self, lengths: Tensor, totals: Totals) -> Tensor:
        """Return the weight of each token in the loss, (N,); lengths: the tokens of its completion,
        (N,)."""
        if self.grpo.loss in ("dapo", "cispo"):
            return torch.full_like(lengths, 1 / max(1, totals.tokens))
        if self.grpo.loss == "dr_grpo":
            return torch.full_like(lengths, 1 / (totals.samples * self.grpo.max_new_tokens))
        return 1 / (lengths * totals.samples)

    def _divergence(self, log_probs: Tensor, completions: Completions) -> Tensor:
        """Return the KL divergence from the reference at each token, (N,): the estimate k3 of
        http://joschu.net/blog/kl-approx.html; 0 without a reference."""
        if completions.reference is None:
            return torch.zeros_like(log_probs)
        differences = completions.reference - log_probs
        return differences.exp() - differences - 1


def spread(rewards: Tensor) -> Tensor:
    """Return the standard deviation of each row, (P, 1), of rewards (P, G) without those that are
    NaN."""
    count = (~rewards.isnan()).sum(1, keepdim=True)
    squares = (rewards - rewards.nanmean(1, keepdim=True)) ** 2
    return (squares.nansum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
