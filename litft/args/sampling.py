"""Sampling parameters as plain values. Imports no torch."""

from dataclasses import dataclass, field, fields

# larger values overflow, and no use needs them
LARGEST_NUMBER = 1e6


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled.

    The order, as in transformers and vLLM: bias, penalties, temperature, top k, top p, min p.
    """

    temperature: float = 1.0
    """Higher is more varied; 1 samples the model's distribution; 0 always takes the likeliest token
    (greedy)."""
    top_k: int | None = None
    """Sample from the k likeliest tokens only. None, 0 and -1: from all."""
    top_p: float = 1.0
    """Sample from the likeliest tokens whose probabilities add up to this (arXiv 1904.09751). 1:
    off."""
    min_p: float = 0.0
    """Sample from tokens with at least this fraction of the likeliest token's probability (arXiv
    2407.01082). 0: off."""
    repetition_penalty: float = 1.0
    """Divide positive logits of tokens in prompt and answer by this, multiply negative ones (arXiv
    1909.05858). 1: off."""
    presence_penalty: float = 0.0
    """Subtract this from the logits of tokens that the answer contains."""
    frequency_penalty: float = 0.0
    """Subtract this from the logits of tokens once per occurrence in the answer."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Numbers added to logits, by token id."""
    seed: int | None = None
    """Random seed that makes sampling repeatable. None: different each time."""

    def problems(self) -> list[str]:
        """Return the problems of invalid values, by flag name."""
        valid_temperature = 0 <= self.temperature <= LARGEST_NUMBER
        penalty_range = "must lie within a million of 0"
        # name: (whether the value is valid, what it must be)
        checks = {
            "temperature": (valid_temperature, "must lie in [0, 1000000]; 0 is greedy"),
            "top_k": (
                self.top_k is None or self.top_k >= -1,
                "must be at least 1; 0 and -1: off",
            ),
            "top_p": (0 < self.top_p <= 1, "must lie in (0, 1]"),
            "min_p": (0 <= self.min_p <= 1, "must lie in [0, 1]"),
            "repetition_penalty": (
                0.001 <= self.repetition_penalty <= 1000,
                "must lie in [0.001, 1000]; 1 changes nothing",
            ),
            "presence_penalty": (
                abs(self.presence_penalty) <= LARGEST_NUMBER,
                penalty_range,
            ),
            "frequency_penalty": (
                abs(self.frequency_penalty) <= LARGEST_NUMBER,
                penalty_range,
            ),
        }
        problems = []
        for name, (is_valid, reason) in checks.items():
            if not is_valid:
                problems.append(f"--{name} {getattr(self, name)}: {reason}")
        return problems


# used if neither the folder nor a flag sets sampling:
# the tail of a small model's distribution is noise
DEFAULT_SAMPLING = {"temperature": 0.7, "top_p": 0.9}
# the fields that are a single number, each of which is a flag
NUMBERS = tuple(item.name for item in fields(Sampling) if item.name != "logit_bias")
