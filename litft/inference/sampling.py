"""From logits to the next token: what changes them, what is left out, and the draw. All on the device, no host waits.

The draw turns one uniform number a token into the token, which a generator on the host makes: so a seed gives the same text
whatever else is in the batch, and on every device the same up to the logits' own rounding.
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from litft.args import Sampling

# B batch, V vocabulary


class Sampler:
    """Draws the next tokens of B rows, each by its own `Sampling`; knows what of the vocabulary each row's text holds."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.settings = [Sampling(temperature=0)] * rows
        self.generators = [random.Random()] * rows
        self.rows = slice(0, rows)  # those that are drawn for
        self.held: Tensor | None = None  # (2, B, V): how often prompt and answer hold a token, and how often the answer does
        self.bias: Tensor | None = None  # (B, V)
        self._gather()

    def begin(self, row: int, prompt: Sequence[int], settings: Sampling) -> None:
        """An answer to a prompt begins in a row."""
        self.settings[row], self.generators[row] = settings, random.Random(settings.seed)
        self._gather()
        shape = (len(self.settings), self.vocab_size)
        if self.penalised:
            self.held = torch.zeros(2, *shape, dtype=torch.int32, device=self.device) if self.held is None else self.held
            self.held[:, row] = 0
            self.held[0, row, torch.tensor(prompt, device=self.device)] = 1
        if settings.logit_bias or self.bias is not None:
            self.bias = torch.zeros(shape, device=self.device) if self.bias is None else self.bias
            self.bias[row] = 0
            ids, values = list(settings.logit_bias), list(settings.logit_bias.values())
            self.bias[row, torch.tensor(ids, dtype=torch.int64, device=self.device)] = torch.tensor(
                values, dtype=torch.float32, device=self.device
            )

    def look(self, rows: slice) -> None:
        """Draw for these rows alone from now on: B is their number."""
        if rows != self.rows:
            self.rows = rows
            self._gather()

    def _gather(self) -> None:
        """The rows' settings as columns (B, 1), and which of them matter at all."""
        names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        settings = self.settings[self.rows]
        columns = ([[getattr(own, name)] for own in settings] for name in names)
        self.temperature, self.top_p, self.min_p, self.repetition, self.presence, self.frequency = (
            torch.tensor(column, device=self.device, dtype=torch.float32) for column in columns
        )
        kept = [min(own.top_k or self.vocab_size, self.vocab_size) for own in settings]
        self.cut, self.most, self.top_k = (
            min(kept) < self.vocab_size,
            max(kept),
            torch.tensor(kept, device=self.device)[:, None],
        )
        self.greedy = all(own.temperature == 0 for own in settings)
        self.nucleus = any(own.top_p < 1 for own in settings)
        self.penalised = any(
            own.repetition_penalty != 1 or own.presence_penalty or own.frequency_penalty for own in self.settings
        )

    def next(self, logits: Tensor) -> Tensor:
        """The next tokens (B,) after logits (B, V)."""
        tokens = self.changed(logits).argmax(-1) if self.greedy else draw(self.distribution(logits), self.uniforms())
        self.hold(tokens)
        return tokens

    def hold(self, tokens: Tensor) -> None:
        """Each row's answer has a token (B,) more."""
        if self.penalised:
            places = tokens[None, :, None].expand(2, -1, -1)
            self.held[:, self.rows].scatter_add_(2, places, torch.ones_like(places, dtype=torch.int32))

    def uniforms(self) -> Tensor:
        """A number in [0, 1) a row, (B, 1)."""
        numbers = torch.tensor([[own.random()] for own in self.generators[self.rows]], dtype=torch.float64)
        return numbers.to(self.device, non_blocking=True)

    def changed(self, logits: Tensor) -> Tensor:
        """Logits (B, V) in fp32 with bias and penalties."""
        logits = logits.float()
        if self.bias is not None:
            logits = logits + self.bias[self.rows]
        if self.penalised:
            seen, made = self.held[:, self.rows]
            divided = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
            logits = torch.where(seen > 0, divided, logits) - self.presence * (made > 0) - self.frequency * made
        return logits

    def distribution(self, logits: Tensor) -> Tensor:
        """What the next tokens after logits (B, V) are drawn from, (B, V); all of it in one token where a row is greedy."""
        logits = self.changed(logits)
        top, likeliest = logits.max(-1, keepdim=True)
        scores = (logits - top) / torch.where(self.temperature > 0, self.temperature, 1.0)  # at most 0: none overflows
        if self.cut:
            least = scores.topk(self.most).values.gather(1, self.top_k - 1)
            scores = scores.masked_fill(scores < least, -torch.inf)
        found = scores.softmax(-1)
        if self.nucleus:
            ordered, order = found.topk(self.most)
            beyond = ordered.cumsum(-1) - ordered >= self.top_p  # the token that crosses the threshold stays
            found = torch.zeros_like(found).scatter_(1, order, ordered.masked_fill(beyond, 0.0))
        found = found.masked_fill(found < self.min_p * found.amax(-1, keepdim=True), 0.0)
        greedy = torch.zeros_like(found).scatter_(1, likeliest, 1.0)
        return torch.where(self.temperature > 0, found / found.sum(-1, keepdim=True), greedy)


def draw(distribution: Tensor, uniforms: Tensor) -> Tensor:
    """One token a row (B,) from weights (B, V), which need not sum to 1, and numbers (B, 1) in [0, 1)."""
    sums = distribution.double().cumsum(-1)
    # the first token whose sum is above: none of weight 0
    return torch.searchsorted(sums, uniforms * sums[:, -1:], right=True).clamp(max=distribution.size(-1) - 1)[:, 0]
