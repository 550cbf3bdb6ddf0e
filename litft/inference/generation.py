"""Answers as they are made: text that never splits a character, with tokens, log-probabilities and speeds.

`stream` is the face; the commands, the chat and evaluation are built on `answers`, which makes many at once.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from litft.args.sampling import USUAL
from litft.data.chat_template import Message
from litft.data.tokenizer import Tokenizer
from litft.inference.decoder import NOT_A_NUMBER, BrokenModel, Decoder, check_prompt
from litft.inference.sampling import Sampler, Sampling
from litft.inference.speculative import Drafter, speculative_rounds
from litft.model.transformer import GPT

Reason = Literal["stop", "length", "context"]  # a stop token or text; as many tokens as asked for; no room for more


@dataclass(frozen=True)
class Request:
    """What is asked for."""

    ids: list[int]  # the prompt
    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: Sequence[int] = ()  # tokens that end the answer, and are no part of it
    stop: Sequence[str] = ()  # texts that do
    top_logprobs: int = 0  # how many of the likeliest tokens each piece tells beside those taken
    trimmed: bool = False  # without the space that some templates leave for the answer's first token to make
    max_length: int | None = (
        None  # how long the text may become, by which some ropes turn; None: as long as this answer asks
    )


@dataclass
class GenerationStats:
    """How an answer is coming along."""

    prompt_tokens: int
    read_tokens: int = 0  # of the prompt, those that no text before had in common
    new_tokens: int = 0
    first: float = 0.0  # seconds until the first token
    seconds: float = 0.0  # until now
    drafted: int = 0  # tokens that were guessed (speculative decoding), and how many of them were right
    accepted: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Of the tokens after the first, which waits for the prompt."""
        return max(0, self.new_tokens - 1) / max(1e-9, self.seconds - self.first)

    def __str__(self) -> str:
        text = f"{self.new_tokens} tokens, {self.tokens_per_second:.1f} tokens/s, the first after {self.first:.2f} s"
        guesses = f", {self.accepted} of {self.drafted} guesses right" if self.drafted else ""
        return f"{text} (prompt: {self.prompt_tokens}, read: {self.read_tokens}){guesses}"


class ChosenToken(NamedTuple):
    """A token and its log-probability, by the model's own logits, and the likeliest ones with theirs, where asked for."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class GenerationChunk(str):
    """Some of an answer's text, which is a str, and what it came from."""

    tokens: list[int]  # since the piece before, a stop token at the end included
    logprobs: list[float]  # of each, by the model's own logits
    top: list[list[tuple[int, float]]]  # of each, the likeliest tokens in its place with theirs, as many as asked for
    finish_reason: Reason | None  # of the last piece, which may be empty
    stats: GenerationStats

    def __new__(
        cls, text: str, chosen: Sequence[ChosenToken], reason: Reason | None, stats: GenerationStats
    ) -> "GenerationChunk":
        """A str with five attributes."""
        piece = super().__new__(cls, text)
        piece.tokens, piece.logprobs, piece.top = ([own[part] for own in chosen] for part in range(3))
        piece.finish_reason, piece.stats = reason, stats
        return piece


class Detokenizer:
    """Token ids to text, holding back bytes that are no whole character yet.

    A token's text depends on those before it (a word's leading space), so a window of ids is decoded with and without the
    new ones, and the difference given out.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self.tokenizer, self.window = tokenizer, list(before[-4:])
        self.start = len(self.window)

    def push(self, token: int, last: bool = False) -> str:
        """What becomes readable with one token more."""
        self.window.append(token)
        return self.rest(last)

    def rest(self, last: bool = True) -> str:
        """What has not been given out; a part of a character only at the last."""
        old, text = self.tokenizer.decode(self.window[: self.start]), self.tokenizer.decode(self.window)
        new = text[len(old) :]
        # a space may be dropped at the beginning of what is decoded: it stays in the window until a word follows
        if not new or (not last and (not new.strip(" ") or text.endswith("\ufffd"))):
            return ""
        self.window, self.start = self.window[self.start :], len(self.window) - self.start
        return new


class Answer:
    """One answer in the making: what each token adds to the text, and when it ends."""

    def __init__(self, request: Request, tokenizer: Tokenizer, room: int, began: float) -> None:
        self.request, self.room, self.began = request, room, began
        self.text, self.held = Detokenizer(tokenizer, request.ids), ""  # what may be the beginning of a stop text
        self.begun = not request.trimmed
        self.chosen: list[ChosenToken] = []  # since the last piece
        self.finish_reason: Reason | None = None
        self.stats = GenerationStats(len(request.ids))

    def take(self, chosen: ChosenToken) -> GenerationChunk | None:
        """The next token; a piece where there is something to say."""
        stats, request, token = self.stats, self.request, chosen.token
        stats.new_tokens, stats.seconds = stats.new_tokens + 1, time.perf_counter() - self.began
        stats.first = stats.first or stats.seconds
        self.chosen.append(chosen._replace(top=chosen.top[: request.top_logprobs]))
        if token in request.stop_ids:
            self.finish_reason = "stop"
            self.held += self.text.rest()
        else:
            full = stats.new_tokens >= request.max_new_tokens
            self.finish_reason = "length" if full else "context" if stats.new_tokens >= self.room else None
            self.held += self.text.push(token, last=self.finish_reason is not None)
        return self._piece()

    def _piece(self) -> GenerationChunk | None:
        ends = [found for stop in self.request.stop if (found := self.held.find(stop)) >= 0]
        if ends:
            self.finish_reason, self.held = "stop", self.held[: min(ends)]
        kept = 0 if self.finish_reason else max((_overlap(self.held, stop) for stop in self.request.stop), default=0)
        said, self.held = self.held[: len(self.held) - kept], self.held[len(self.held) - kept :]
        if not self.begun:
            said = said.lstrip()
            self.begun = bool(said)
        if not (said or self.finish_reason):
            return None
        piece, self.chosen = GenerationChunk(said, self.chosen, self.finish_reason, self.stats), []
        return piece


def _overlap(text: str, stop: str) -> int:
    """How much of the end of a text is the beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)


def generate_batch(
    decoder: Decoder, tokenizer: Tokenizer, requests: Iterable[Request], drafter: Drafter | None = None
) -> Iterator[tuple[int, GenerationChunk]]:
    """The pieces of all answers as they come, each with its request's number; as many at once as the decoder has rows.

    guesser: guesses tokens ahead, of a decoder of one row.
    """
    if drafter is not None:
        for number, request in enumerate(requests):
            yield from ((number, piece) for piece in _speculate(decoder, tokenizer, request, drafter))
        return
    waiting, batch = enumerate(requests), Batch(decoder, tokenizer)
    while True:
        while batch.free and (following := next(waiting, None)):
            batch.begin(*following)
        while batch.reading:
            batch.read_on()
        if not batch.running:
            return
        for number, piece in batch.step():
            if isinstance(piece, BrokenModel):
                raise piece
            yield number, piece


class Completion(NamedTuple):
    """A whole answer."""

    text: str
    ended: bool  # by a stop token or text, and not by a limit


def whole_answers(
    decoder: Decoder, tokenizer: Tokenizer, requests: Sequence[Request], done: Callable[[], None] = lambda: None
) -> list[Completion]:
    """All answers, in the order of their requests. done: called when one has ended."""
    texts, ended = [""] * len(requests), [False] * len(requests)
    for number, piece in generate_batch(decoder, tokenizer, requests):
        texts[number] += piece
        if piece.finish_reason:
            ended[number] = piece.finish_reason == "stop"
            done()
    return [Completion(*pair) for pair in zip(texts, ended, strict=True)]


@dataclass
class Prefill:
    """A prompt that is being read."""

    number: int
    request: Request
    began: float
    done: int = 0  # tokens
    read: int = 0  # of them, those that no text before had in common


class Batch:
    """The answers that a decoder makes at once, one a row, each by the number that its request was given."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer) -> None:
        rows = len(decoder.texts)
        self.decoder, self.tokenizer = decoder, tokenizer
        self.sampler = Sampler(rows, decoder.model.config.vocab_size, decoder.device)
        self.logits = torch.zeros(rows, self.sampler.vocab_size, device=decoder.device)
        self.reading: dict[int, Prefill] = {}  # by row, in the order they came
        self.running: dict[int, tuple[int, Answer]] = {}  # by row: whose answer, and what there is of it
        self.begun = [0] * rows  # how many answers had begun before the row's last one

    @property
    def free(self) -> list[int]:
        """The rows without a prompt or an answer."""
        return [row for row in range(len(self.begun)) if row not in self.running and row not in self.reading]

    def begin(self, number: int, request: Request) -> None:
        """Have a prompt read next, in a free row.

        Which row: a step computes those between the first and the last answer, and what a row has read may be asked on.
        """
        taken = [*self.running, *self.reading]
        spans = {row: max([row, *taken]) - min([row, *taken]) for row in self.free}
        row = min(spans, key=lambda row: (spans[row], self.begun[row]))
        self.reading[row], self.begun[row] = Prefill(number, request, time.perf_counter()), max(self.begun) + 1

    def read_on(self, most: int | None = None) -> None:
        """Read the prompt that came first, or `most` tokens more of it; behind the last the answer runs.

        ValueError as the decoder's, which ends it.
        """
        row, prompt = next(iter(self.reading.items()))
        request, before = prompt.request, self.decoder.processed
        size = len(request.ids)
        prompt.done = size if most is None else min(prompt.done + most, size)
        try:
            # what a row has read of a text is not read again
            logits = self.decoder.read(row, request.ids[: prompt.done], request.max_length or size + request.max_new_tokens)
        except ValueError:
            del self.reading[row]
            raise
        prompt.read += self.decoder.processed - before
        if prompt.done == size:
            del self.reading[row]
            answer = Answer(request, self.tokenizer, self.decoder.capacity - size, prompt.began)
            answer.stats.read_tokens, self.logits[row] = prompt.read, logits
            self.sampler.begin(row, request.ids, request.sampling)
            self.running[row] = prompt.number, answer

    def drop(self, number: int) -> None:
        """Give an answer up."""
        for row in [row for row, prompt in self.reading.items() if prompt.number == number]:
            del self.reading[row]
        for row in [row for row, (own, _) in self.running.items() if own == number]:
            self._end(row)

    def _end(self, row: int) -> None:
        del self.running[row]
        self.decoder.truncate(row, len(self.decoder.texts[row]))

    def step(self) -> Iterator[tuple[int, GenerationChunk | BrokenModel]]:
        """A token more of each answer: the pieces, as `answers` gives them, or why an answer cannot go on."""
        decoder, active = self.decoder, self._active()
        rows = decoder.span(active)
        self.sampler.look(rows)
        tokens = torch.zeros(len(active), dtype=torch.long, device=decoder.device)
        tokens[rows] = self.sampler.next(self.logits[rows])
        if idle := [row for row in range(rows.start, rows.stop) if not active[row]]:
            tokens[idle] = 0  # they go through the network too, and what they once said leads nowhere
        most = max(answer.request.top_logprobs for _, answer in self.running.values())
        fetched = PendingTokens(tokens[rows], self.logits[rows], most)
        # the device makes the next step while the host looks at this one; what ends here has made it in vain
        ahead = decoder.step(tokens, self._active(with_room=True)) if decoder.ahead else None
        made = {row: chosen for row, chosen in enumerate(fetched.rows(), rows.start) if row in self.running}
        for row, chosen in made.items():
            number, answer = self.running[row]
            if math.isnan(chosen.logprob):
                self._end(row)
                decoder.clear(row)
                yield number, BrokenModel(NOT_A_NUMBER)
                continue
            piece = answer.take(chosen)
            if answer.finish_reason:
                self._end(row)
            if piece is not None:
                yield number, piece
        if self.running:
            self.logits = decoder.step(tokens, self._active()) if ahead is None else ahead
        for row, chosen in made.items():  # not before the step: whoever stops at a piece leaves no token that was not read
            if row in self.running:
                decoder.hold(row, chosen.token)

    def _active(self, with_room: bool = False) -> list[bool]:
        """Which rows have an answer in the making; with_room: that can go a token further, others end with this one."""
        lengths, capacity = self.decoder.lengths, self.decoder.capacity
        return [row in self.running and not (with_room and lengths[row] == capacity) for row in range(len(lengths))]


class PendingTokens:
    """Tokens (B,) chosen by logits (B, V), and the `most` likeliest, on their way to the host: it waits when it looks."""

    def __init__(self, tokens: Tensor, logits: Tensor, most: int = 0) -> None:
        sums = logits.logsumexp(-1, keepdim=True)
        likeliest = logits.topk(min(most, logits.size(-1))) if most else None
        ids = tokens[:, None] if likeliest is None else torch.cat((tokens[:, None], likeliest.indices), 1)
        both = torch.stack((ids.double(), (logits.gather(1, ids) - sums).double()))
        self.on_host, self.event = both, None
        if both.is_cuda:
            self.on_host = torch.empty(both.shape, dtype=both.dtype, pin_memory=True).copy_(both, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def rows(self) -> Iterator[ChosenToken]:
        """Of each row."""
        if self.event is not None:
            self.event.synchronize()
        for ids, logprobs in zip(*self.on_host.tolist(), strict=True):
            (token, logprob), *top = zip(map(int, ids), logprobs, strict=True)
            yield ChosenToken(token, logprob, top)


def _speculate(decoder: Decoder, tokenizer: Tokenizer, request: Request, drafter: Drafter) -> Iterator[GenerationChunk]:
    """One answer, by speculative decoding."""
    batch = Batch(decoder, tokenizer)
    batch.begin(0, request)
    batch.read_on()
    _, answer = batch.running[0]
    for found in speculative_rounds(decoder, batch.sampler, drafter, batch.logits[0]):
        answer.stats.drafted += found.drafted
        answer.stats.accepted += len(found.tokens) - 1 if found.drafted else 0
        for token, logprob in zip(found.tokens, found.logprobs, strict=True):
            if (piece := answer.take(ChosenToken(token, logprob, []))) is not None:
                yield piece
            if answer.finish_reason:
                return


def stream(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str | list[Message],
    *,
    max_new_tokens: int = 256,
    stop: Sequence[str] = (),
    drafter: Drafter | None = None,
    **sampling: Any,
) -> Iterator[GenerationChunk]:
    """Stream the continuation of a text prompt, or the answer to chat messages (rendered by the chat template).

    Each is a str with `tokens`, `logprobs`, `finish_reason` (of the last: stop, length or context) and `stats`. sampling:
    the fields of `Sampling` (temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, logit_bias, seed).
    stop: texts that end the answer. ValueError for settings that cannot be, and a prompt that is empty, longer than the
    context or outside the vocabulary.
    """
    settings = Sampling(**USUAL | sampling)
    if problems := settings.problems():
        raise ValueError("; ".join(problem.removeprefix("--") for problem in problems))
    ids = prompt_ids(tokenizer, prompt)
    check_prompt(model, ids)
    decoder = Decoder(model, capacity=len(ids) + max_new_tokens)
    request = Request(ids, max_new_tokens, settings, tokenizer.stop_ids, stop)
    yield from (piece for _, piece in generate_batch(decoder, tokenizer, [request], drafter))


def prompt_ids(tokenizer: Tokenizer, prompt: str | list[Message]) -> list[int]:
    """What the model reads: text with the tokenizer's BOS, or messages rendered up to the answer."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return tokenizer.encode(tokenizer.apply_chat_template(prompt, add_generation_prompt=True), bos=False)
