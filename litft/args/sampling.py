"""How tokens are drawn, as plain values."""

from dataclasses import dataclass, field, fields

LARGEST_NUMBER = 1e6  # beyond it sums overflow, and nothing else is meant


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. As transformers and vLLM: bias, penalties, temperature, top k, top p, min p, in this order."""

    temperature: float = 1.0
    """Higher is more varied, 1 is what the network says; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Choose among the k likeliest tokens."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that together have this probability (arXiv 1904.09751)."""
    min_p: float = 0.0
    """Choose among tokens with at least this part of the likeliest one's probability (arXiv 2407.01082)."""
    repetition_penalty: float = 1.0
    """Of what prompt and answer hold, logits above 0 are divided by this, others multiplied (arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """Is taken off the logits of what the answer holds."""
    frequency_penalty: float = 0.0
    """The same, as many times as the answer holds it."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Is added to the logits of tokens, by their ids."""
    seed: int | None = None
    """Makes the draws repeatable."""

    def problems(self) -> list[str]:
        """What cannot be, by the names of the flags."""
        calm, far = 0 <= self.temperature <= LARGEST_NUMBER, "must lie within a million of 0"
        wanted = {
            "temperature": (calm, "must lie in [0, 1000000]; 0 is greedy"),
            "top_k": (self.top_k is None or self.top_k >= 1, "must be at least 1"),
            "top_p": (0 < self.top_p <= 1, "must lie in (0, 1]"),
            "min_p": (0 <= self.min_p <= 1, "must lie in [0, 1]"),
            "repetition_penalty": (0.001 <= self.repetition_penalty <= 1000, "must lie in [0.001, 1000]; 1 changes nothing"),
            "presence_penalty": (abs(self.presence_penalty) <= LARGEST_NUMBER, far),
            "frequency_penalty": (abs(self.frequency_penalty) <= LARGEST_NUMBER, far),
        }
        return [f"--{name} {getattr(self, name)}: {reason}" for name, (holds, reason) in wanted.items() if not holds]


# where neither the folder nor a flag says how to draw: a small model's vocabulary has a long tail of nonsense
USUAL = {"temperature": 0.7, "top_p": 0.9}
# the fields that are one number each, as a flag is
NUMBERS = tuple(item.name for item in fields(Sampling) if item.name != "logit_bias")
