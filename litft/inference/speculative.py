"""Speculative decoding (arXiv 2211.17192): draft tokens cheaply, and verify all of them in one
forward pass.

The output follows the model's own distribution p, regardless of the drafts: a draft token that was
drawn from q is accepted with probability min(1, p / q); if it is rejected, the token is drawn from
max(0, p - q) instead. Greedy output is identical.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from litft.args.sampling import Sampling
from litft.inference.decoder import Decoder
from litft.inference.sampling import TokenSampler, draw

# V vocabulary


class Draft(NamedTuple):
    """N draft tokens, and the distributions (N, V) that they were drawn from; None: chosen
    deterministically."""

    tokens: list[int]
    distributions: Tensor | None


class Drafter(Protocol):
    """Proposes draft tokens."""

    def draft(self, text: Sequence[int], settings: Sampling) -> Draft:
        """Return draft tokens that may follow a text."""
        ...


class PromptLookup:
    """Draft by n-gram lookup: the text continues as after the same tokens earlier, as in
    quotations, code and summaries."""

    def __init__(self, num_draft_tokens: int = 8, max_ngram: int = 4) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.max_ngram = max_ngram

    def draft(self, text: Sequence[int], settings: Sampling) -> Draft:
        """Return what followed the latest earlier occurrence of the text's longest suffix, at most
        `max_ngram` tokens."""
        for size in range(min(self.max_ngram, len(text) - 1), 0, -1):
            suffix = text[-size:]
            # the latest occurrence; comparing the last token first is faster than slicing each time
            for start in range(len(text) - size - 1, -1, -1):
                if (
                    text[start + size - 1] == suffix[-1]
                    and text[start : start + size] == suffix
                ):
                    return Draft(
                        list(text[start + size : start + size + self.num_draft_tokens]),
                        None,
                    )
        return Draft([], None)


class DraftModel:
    """Draft with a smaller model that has the same tokenizer.

    Its logits are cut or padded to `vocab_size`.
    """

    def __init__(
        self, decoder: Decoder, vocab_size: int, num_draft_tokens: int = 4
    ) -> None:
        self.decoder = decoder
        self.vocab_size = vocab_size
        self.num_draft_tokens = num_draft_tokens

    def draft(self, text: Sequence[int], settings: Sampling) -> Draft:
        """Sample draft tokens from the smaller model with the same settings."""
        self.decoder.reserve(len(text) + self.num_draft_tokens)
        count = min(self.num_draft_tokens, self.decoder.capacity - len(text))
        # the target may have more tokens than the draft model, which cannot read them
        if count < 1 or max(text) >= self.decoder.model.config.vocab_size:
            return Draft([], None)

        # Its random numbers are independent of those that accept the drafts. The length makes them
        # differ from round to round.
        sampler = TokenSampler(1, self.vocab_size, self.decoder.device)
        sampler.begin(0, text, settings)
        if settings.seed is None:
            seed = None
        else:
            seed = f"{settings.seed} {len(text)}"
        sampler.generators[0].seed(seed)

        # the cached prefix is reused: mostly, only the tokens of the last round are computed
        logits = self.decoder.prefill(0, text)[None]
        tokens = []
        distributions = []
        while True:
            # a larger draft model is cut by the negative padding
            num_missing = self.vocab_size - logits.size(1)
            distributions.append(
                sampler.distribution(F.pad(logits, (0, num_missing), value=-torch.inf))
            )
            token = draw(distributions[-1], sampler.uniforms())
            sampler.append(token)
            tokens.append(int(token))
            if len(tokens) == count:
                return Draft(tokens, torch.cat(distributions))
            logits = self.decoder.extend(0, tokens[-1:])


class Verified(NamedTuple):
    """The tokens that one forward pass has produced, and the number of draft tokens that it
    verified."""

    tokens: list[int]
    logprobs: list[float]
    drafted: int


@torch.no_grad()
def speculative_rounds(
    decoder: Decoder, sampler: TokenSampler, drafter: Drafter, logits: Tensor
) -> Iterator[Verified]:
    """Continue the decoder's only row, whose text is followed by `logits` (V,), until the cache is
    full."""
    next_token = _sample(sampler, logits)
    yield Verified([next_token], _logprobs(logits[None], [next_token]), drafted=0)
    # when a round begins, `text` is what the cache holds, and `next_token` is not in it yet
    text = list(decoder.texts[0])
    while (room := decoder.capacity - len(text)) > 0:
        text.append(next_token)
        tokens, distributions = drafter.draft(text, sampler.settings[0])
        # the token itself takes a place in the cache, too
        tokens = tokens[: room - 1]
        logits = decoder.extend(0, [next_token, *tokens])
        # After the last accepted draft there is a token for free: the model's logits behind it are
        # known. None stands for the draft that is missing there.
        verified = []
        for index, token in enumerate([*tokens, None]):
            if distributions is None or token is None:
                draft_probs = None
            else:
                draft_probs = distributions[index].to(logits.device)
            accepted, next_token = _verify(sampler, logits[index], token, draft_probs)
            verified.append(next_token)
            if not accepted:
                break

        # forget the rejected drafts; the last verified token is the next round's `next_token`
        decoder.truncate(0, len(text) + len(verified) - 1)
        text += verified[:-1]
        yield Verified(verified, _logprobs(logits, verified), drafted=len(tokens))


def _sample(sampler: TokenSampler, logits: Tensor) -> int:
    return int(sampler.next(logits[None]))


def _verify(
    sampler: TokenSampler, logits: Tensor, draft: int | None, draft_probs: Tensor | None
) -> tuple[bool, int]:
    """Return whether a draft token is accepted, and the next token: the draft or a replacement."""
    if draft is None:
        return False, _sample(sampler, logits)  # the sampler counts the token, too
    p = sampler.distribution(logits[None])
    if draft_probs is None:
        # a draft without a distribution was certain: q is one-hot
        certain = torch.tensor(draft, device=p.device)
        q = torch.zeros_like(p[0]).index_fill_(0, certain, 1.0)
    else:
        q = draft_probs
    # with probability min(1, p / q), without a division
    accepted = bool(sampler.uniforms()[0, 0] * q[draft] < p[0, draft])
    if accepted:
        token = torch.tensor([draft], device=p.device)
    else:
        token = draw((p - q).clamp(min=0), sampler.uniforms())
    sampler.append(token)
    return accepted, int(token)


def _logprobs(logits: Tensor, tokens: list[int]) -> list[float]:
    """Return the log-probability of each token under the logits (T, V) that it was sampled from."""
    index = torch.tensor(tokens, device=logits.device)[:, None]
    return logits[: len(tokens)].log_softmax(-1).gather(1, index)[:, 0].tolist()
