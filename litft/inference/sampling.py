"""Sample the next token from logits: penalties, filters and the draw, all on the device without
synchronization.

A draw maps one uniform number per token, made by a generator on the host, to a token. So a seed
gives the same text in any batch, and on every device up to the rounding of the logits.
"""

import random
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from litft.args import Sampling

# B batch, V vocabulary


class Constraint(Protocol):
    """Decides which tokens may follow in one answer."""

    def allowed(self) -> Tensor | None:
        """Return which tokens may follow, (V,) bool on the CPU; None if all may."""

    def problem(self) -> str | None:
        """Return why the answer cannot go on; None if it can."""

    def advance(self, token: int) -> None:
        """Take note of the next token of the answer."""


class TokenSampler:
    """Sample the next tokens of B rows, each with its own `Sampling`, and count the tokens of each
    row for penalties."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.settings = [Sampling(temperature=0)] * rows
        self.generators = [random.Random()] * rows
        self.rows = slice(0, rows)  # the rows to sample for
        # (2, B, V): above 0 if prompt or answer has a token; its count in the answer
        self.counts: Tensor | None = None
        self.bias: Tensor | None = None  # (B, V)
        self.constraints: list[Constraint | None] = [None] * rows
        # whether rows have other settings than those that were collected
        self.is_stale = False
        self._collect_settings()

    def begin(
        self,
        row: int,
        prompt: Sequence[int],
        settings: Sampling,
        constraint: Constraint | None = None,
    ) -> None:
        """Start a new answer in a row."""
        self.constraints[row] = constraint
        self.settings[row] = settings
        # a generator for each answer: the other rows do not change what it draws
        self.generators[row] = random.Random(settings.seed)
        self.is_stale = True
        self.has_penalties = self.has_penalties or _has_penalties(settings)

        shape = (len(self.settings), self.vocab_size)
        # (2, B, V) and (B, V) are allocated only when a request needs them
        if self.has_penalties:
            if self.counts is None:
                self.counts = torch.zeros(2, *shape, dtype=torch.int32, device=self.device)
            self.counts[:, row] = 0
            # the repetition penalty counts the prompt, the other two only the answer
            self.counts[0, row, torch.tensor(prompt, device=self.device)] = 1
        if settings.logit_bias or self.bias is not None:
            if self.bias is None:
                self.bias = torch.zeros(shape, device=self.device)
            self.bias[row] = 0
            bias = settings.logit_bias
            ids = torch.tensor(list(bias), dtype=torch.int64, device=self.device)
            values = torch.tensor(
                list(bias.values()), dtype=torch.float32, device=self.device
            )
            self.bias[row, ids] = values

    def select_rows(self, rows: slice) -> None:
        """Sample only for these rows from now on: B is their number."""
        if rows != self.rows:
            self.rows = rows
            self._collect_settings()

    def _collect_new_settings(self) -> None:
        """Collect the settings once for all answers that have begun since the last step."""
        if self.is_stale:
            self._collect_settings()

    def _collect_settings(self) -> None:
        """Collect the rows' settings as columns (B, 1), and whether any row needs each filter."""
        # collected once for each change, so that a step needs no transfer of settings
        settings = self.settings[self.rows]

        def column(name: str) -> Tensor:
            values = [getattr(row, name) for row in settings]
            return torch.tensor(values, device=self.device, dtype=torch.float32)[:, None]

        self.temperature = column("temperature")
        self.top_p = column("top_p")
        self.min_p = column("min_p")
        self.repetition = column("repetition_penalty")
        self.presence = column("presence_penalty")
        self.frequency = column("frequency_penalty")

        top_ks = []
        for row in settings:
            if row.top_k is not None and 0 < row.top_k < self.vocab_size:
                top_ks.append(row.top_k)
            else:
                top_ks.append(self.vocab_size)
        self.has_top_k = min(top_ks) < self.vocab_size
        self.max_top_k = max(top_ks)
        self.top_k = torch.tensor(top_ks, device=self.device)[:, None]
        self.greedy = all(row.temperature == 0 for row in settings)
        self.has_top_p = any(row.top_p < 1 for row in settings)
        # of all rows, also those that are not sampled now: their counts must go on
        self.has_penalties = any(map(_has_penalties, self.settings))
        self.is_stale = False

    def next(self, logits: Tensor) -> Tensor:
        """Sample the next tokens (B,) from logits (B, V), and count them."""
        self._collect_new_settings()
        if self.greedy:
            tokens = self.adjusted_logits(logits).argmax(-1)
        else:
            tokens = draw(self.distribution(logits), self.uniforms())
        self.append(tokens)
        return tokens

    def append(self, tokens: Tensor) -> None:
        """Count a token of each row's answer, (B,)."""
        if self.has_penalties:
            # (2, B, 1): the token counts as part of the text and of the answer
            index = tokens[None, :, None].expand(2, -1, -1)
            # a request with penalties has allocated it
            assert self.counts is not None
            self.counts[:, self.rows].scatter_add_(
                2, index, torch.ones_like(index, dtype=torch.int32)
            )

    def uniforms(self) -> Tensor:
        """Return one random number in [0, 1) per row, (B, 1)."""
        numbers = [generator.random() for generator in self.generators[self.rows]]
        # fp64, since fp32 rounds numbers near 1 up to 1
        column = torch.tensor(numbers, dtype=torch.float64)[:, None]
        return column.to(self.device, non_blocking=True)

    def adjusted_logits(self, logits: Tensor) -> Tensor:
        """Return logits (B, V) in fp32 with bias and penalties applied."""
        self._collect_new_settings()
        logits = logits.float()
        if self.bias is not None:
            logits = logits + self.bias[self.rows]
        if self.has_penalties:
            assert self.counts is not None
            in_text, in_answer = self.counts[:, self.rows]
            # a penalty above 1 lowers both positive and negative logits
            penalized = torch.where(
                logits > 0, logits / self.repetition, logits * self.repetition
            )
            logits = (
                torch.where(in_text > 0, penalized, logits)
                - self.presence * (in_answer > 0)
                - self.frequency * in_answer
            )
        return self._constrained(logits)

    def _constrained(self, logits: Tensor) -> Tensor:
        """Return logits (B, V) that are minus infinity for tokens that a row's constraint rules
        out."""
        for index, constraint in enumerate(self.constraints[self.rows]):
            if constraint is None:
                continue
            allowed = constraint.allowed()
            if allowed is None:
                continue
            # the caller's logits give the log-probabilities
            logits = logits.clone()
            logits[index].masked_fill_(
                ~allowed.to(self.device, non_blocking=True), -torch.inf
            )
        return logits

    def distribution(self, logits: Tensor) -> Tensor:
        """Return the distribution (B, V) to sample from, given logits (B, V); one-hot for greedy
        rows."""
        logits = self.adjusted_logits(logits)
        is_sampled = self.temperature > 0
        # greedy rows become one-hot at the end
        temperature = torch.where(is_sampled, self.temperature, 1.0)
        max_logit, argmax = logits.max(-1, keepdim=True)
        # <= 0: no overflow
        scores = (logits - max_logit) / temperature

        if self.has_top_k:
            # a row without top_k has k = V: (B, max k), of which each row takes its own k
            largest_scores = scores.topk(self.max_top_k).values
            kth_score = largest_scores.gather(1, self.top_k - 1)
            scores = scores.masked_fill(scores < kth_score, -torch.inf)

        probs = scores.softmax(-1)
        if self.has_top_p:
            probs = self._top_p_probs(probs)

        # min_p: relative to the most likely token
        min_prob = self.min_p * probs.amax(-1, keepdim=True)
        probs = probs.masked_fill(probs < min_prob, 0.0)
        sampled = probs / probs.sum(-1, keepdim=True)
        one_hot = torch.zeros_like(probs).scatter_(1, argmax, 1.0)
        return torch.where(is_sampled, sampled, one_hot)

    def _top_p_probs(self, probs: Tensor) -> Tensor:
        """Return probabilities (B, V) that are 0 outside the most likely tokens that have top_p
        together."""
        sorted_probs = probs.topk(self.max_top_k).values
        # the token that crosses the threshold is kept
        excluded = sorted_probs.cumsum(-1) - sorted_probs >= self.top_p
        excluded[:, 0] = False  # a top_p near 0 is 0 in fp32
        excluded &= self.top_p < 1  # which the sum may pass before the last token
        # those with equal probabilities together: their order depends on the batch
        lowest = sorted_probs.masked_fill(excluded, torch.inf).amin(-1, keepdim=True)
        return probs.masked_fill(probs < lowest, 0.0)


def _has_penalties(settings: Sampling) -> bool:
    """Return whether tokens of the text change what is drawn."""
    penalties = settings.presence_penalty or settings.frequency_penalty
    return settings.repetition_penalty != 1 or bool(penalties)


def draw(distribution: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row, (B,), from weights (B, V), which need not sum to 1, with uniform
    numbers (B, 1) in [0, 1)."""
    # fp64: over a large vocabulary an fp32 sum would lose small probabilities
    sums = distribution.double().cumsum(-1)
    thresholds = uniforms * sums[:, -1:]
    # the first token whose cumulative weight is above: never one of weight 0; (B, 1)
    tokens = torch.searchsorted(sums, thresholds, right=True)
    last_token = distribution.size(-1) - 1
    return tokens.clamp(max=last_token)[:, 0]
