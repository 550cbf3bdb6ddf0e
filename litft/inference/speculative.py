"""Speculative decoding (arXiv 2211.17192): tokens guessed ahead cheaply, and looked at by the network all at once.

What comes out is drawn from the network's own distribution, whatever was guessed: a guess is kept with the probability
min(1, p / q), p being what the network gives it and q what it was drawn with; where it is not, the token is drawn from
max(0, p - q). Greedy texts are the same, to the token.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from litft.inference.decoder import Decoder
from litft.inference.sampling import Sampler, Sampling, draw

# V vocabulary


class Draft(NamedTuple):
    """Tokens that may come next, and what each was drawn from, (N, V); None: each was certain."""

    tokens: list[int]
    distributions: Tensor | None


class Drafter(Protocol):
    """What guesses."""

    def draft(self, text: Sequence[int], settings: Sampling) -> Draft:
        """What may follow a text."""


class PromptLookup:
    """Guesses that a text goes on as it did where its last tokens stood before: quotations, code, summaries."""

    def __init__(self, count: int = 8, longest: int = 4) -> None:
        self.count, self.longest = count, longest

    def draft(self, text: Sequence[int], settings: Sampling) -> Draft:
        """The tokens after the newest earlier place of the text's end, of up to `longest` tokens."""
        for size in range(min(self.longest, len(text) - 1), 0, -1):
            end = text[-size:]
            for start in range(len(text) - size - 1, -1, -1):
                if text[start + size - 1] == end[-1] and text[start : start + size] == end:
                    return Draft(list(text[start + size : start + size + self.count]), None)
        return Draft([], None)


class DraftModel:
    """Guesses by a smaller network that has the same tokens; rows beyond `vocab_size`, which fill one up, are no tokens."""

    def __init__(self, decoder: Decoder, vocab_size: int, count: int = 4) -> None:
        self.decoder, self.vocab_size, self.count = decoder, vocab_size, count

    def draft(self, text: Sequence[int], settings: Sampling) -> Draft:
        """What the smaller network says next, drawn by the same settings."""
        self.decoder.reserve(len(text) + self.count)
        count = min(self.count, self.decoder.capacity - len(text))
        if count < 1 or max(text) >= self.decoder.model.config.vocab_size:
            return Draft([], None)
        sampler = Sampler(1, self.vocab_size, self.decoder.device)
        sampler.begin(0, text, settings)
        sampler.generators[0].seed(f"{settings.seed} {len(text)}" if settings.seed is not None else None)
        logits, tokens, distributions = self.decoder.read(0, text)[None], [], []
        while True:
            missing = self.vocab_size - logits.size(1)
            distributions.append(sampler.distribution(F.pad(logits, (0, missing), value=-torch.inf)))
            token = draw(distributions[-1], sampler.uniforms())
            sampler.hold(token)
            tokens.append(int(token))
            if len(tokens) == count:
                return Draft(tokens, torch.cat(distributions))
            logits = self.decoder.extend(0, tokens[-1:])


class Verified(NamedTuple):
    """What one look of the network has made certain, of how many guesses."""

    tokens: list[int]
    logprobs: list[float]
    drafted: int


@torch.no_grad()
def speculative_rounds(decoder: Decoder, sampler: Sampler, drafter: Drafter, logits: Tensor) -> Iterator[Verified]:
    """Tokens that continue the decoder's only row, after whose text the network has `logits` (V,); until it is full."""
    certain = _drawn(sampler, logits)
    yield Verified([certain], _logprobs(logits[None], [certain]), 0)
    text = list(decoder.texts[0])
    while (room := decoder.capacity - len(text)) > 0:
        text.append(certain)
        tokens, distributions = drafter.draft(text, sampler.settings[0])
        tokens = tokens[: room - 1]
        logits = decoder.extend(0, [certain, *tokens])
        found = []
        for index, token in enumerate([*tokens, None]):
            drawn_from = None if distributions is None or token is None else distributions[index].to(logits.device)
            kept, certain = _judged(sampler, logits[index], token, drawn_from)
            found.append(certain)
            if not kept:
                break
        decoder.truncate(0, len(text) + len(found) - 1)
        text += found[:-1]
        yield Verified(found, _logprobs(logits, found), len(tokens))


def _drawn(sampler: Sampler, logits: Tensor) -> int:
    return int(sampler.next(logits[None]))


def _judged(sampler: Sampler, logits: Tensor, draft: int | None, drawn_from: Tensor | None) -> tuple[bool, int]:
    """Whether a guess is kept, and the next token: the guess, or another."""
    if draft is None:
        return False, _drawn(sampler, logits)
    found = sampler.distribution(logits[None])
    q = torch.zeros_like(found[0]).index_fill_(0, torch.tensor(draft, device=found.device), 1.0)
    q = q if drawn_from is None else drawn_from
    kept = bool(sampler.uniforms()[0, 0] * q[draft] < found[0, draft])
    token = torch.tensor([draft], device=found.device) if kept else draw((found - q).clamp(min=0), sampler.uniforms())
    sampler.hold(token)
    return kept, int(token)


def _logprobs(logits: Tensor, tokens: list[int]) -> list[float]:
    """Of each token after the logits (T, V) that it was chosen by."""
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    return logits[: len(tokens)].log_softmax(-1).gather(1, chosen)[:, 0].tolist()
