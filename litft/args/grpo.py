"""The flags of learning from rewards: --objective grpo."""

from dataclasses import dataclass
from typing import Literal

from litft.args.value_checks import below_minimum, parse_duration, unused_group

Losses = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"]
Advantages = Literal["group", "group_mean", "leave_one_out", "batch"]
# losses whose paper has another advantage than `group`
ADVANTAGES: dict[str, Advantages] = {"dr_grpo": "group_mean", "rloo": "leave_one_out"}


@dataclass
class GrpoArgs:
    """Learning from rewards, for --objective grpo."""

    reward_timeout: str = "10s"
    """The longest time that a reward function may take for one completion."""
    group_size: int = 8
    """Completions for each prompt, which are compared with each other."""
    max_new_tokens: int = 256
    """Maximum length of a completion in tokens. Prompt and completion together have at most
    data.max_seq_length tokens."""
    temperature: float = 1.0
    """The temperature at which completions are drawn, and their log-probabilities computed."""
    top_p: float = 1.0
    """Draw from the likeliest tokens whose probabilities add up to this. 1: from all."""
    rollout_rows: int = 64
    """Completions that a device generates at once. It affects speed and memory; rounding depends on
    the batch, so that a few draws may be others, in fp32 about one token in 10,000."""
    loss: Losses = "grpo"
    """grpo: mean over completions of the mean over tokens. dr_grpo: sum over tokens, divided by
    max_new_tokens. dapo: mean over all tokens. gspo: one ratio for each completion. cispo: clipped
    weights of the log-probabilities. rloo: REINFORCE with a leave-one-out baseline."""
    advantages: Advantages | None = None
    """What a reward is compared with. group: mean and standard deviation of its group; group_mean:
    the mean alone; leave_one_out: the mean of the others; batch: the mean of its group, and the
    standard deviation of the step. Default: group; with dr_grpo, group_mean; with rloo,
    leave_one_out."""
    beta: float = 0.0
    """Weight of the KL divergence from the network at the start: the base, with the adapter that
    the run continues. 0: none, and no reference."""
    clip_low: float = 0.2
    """Lower limit of the probability ratio: 1 - clip_low. Of use with updates above 1, and not with
    cispo."""
    clip_high: float = 0.2
    """Upper limit of the probability ratio: 1 + clip_high. Of use with updates above 1."""
    updates: int = 1
    """Optimizer updates with the completions of one step."""
    resample: int = 0
    """Draw the completions of a prompt again, at most this many times, while all of them have one
    reward, from which nothing is learned (DAPO's dynamic sampling, with the same prompts)."""
    mask_truncated: bool = False
    """Leave completions out of the loss that have reached max_new_tokens."""

    @property
    def advantages_or_default(self) -> Advantages:
        """--grpo.advantages, or the default of the loss."""
        return self.advantages or ADVANTAGES.get(self.loss, "group")

    @property
    def reward_timeout_seconds(self) -> float:
        """--grpo.reward_timeout in seconds; `problems` requires a duration."""
        timeout = parse_duration(self.reward_timeout)
        assert timeout is not None
        return timeout

    def problems(self, objective: str, reward: list[str]) -> list[str]:
        """Return the problems of values that are out of range, or of no use to the objective;
        reward: --reward."""
        problems = []
        if objective != "grpo":
            if reward:
                problems.append("--reward applies only to --objective grpo; add it")
            return problems + unused_group(self, "grpo")
        if not reward:
            problems.append(
                "--reward is missing: name a reward function, such as number or rewards.py:score"
            )
        problems += below_minimum(self, "grpo", 2, "group_size")
        problems += below_minimum(
            self, "grpo", 1, "max_new_tokens", "rollout_rows", "updates"
        )
        problems += below_minimum(
            self, "grpo", 0, "beta", "clip_low", "clip_high", "resample"
        )
        if not 0 < self.temperature <= 100:
            problems.append(
                f"--grpo.temperature {self.temperature}: must lie in (0, 100]; without a draw, all "
                "completions of a group are the same"
            )
        if not 0 < self.top_p <= 1:
            problems.append(f"--grpo.top_p {self.top_p}: must lie in (0, 1]")
        if self.clip_low >= 1:
            problems.append(f"--grpo.clip_low {self.clip_low}: must be below 1")
        if not parse_duration(self.reward_timeout):
            problems.append(
                f"--grpo.reward_timeout {self.reward_timeout}: expected a time such as 10s or 1m"
            )
        return problems
