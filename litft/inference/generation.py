"""Generation of many texts at once: text that never splits a character, with tokens,
log-probabilities and speeds."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from litft.args.sampling import Sampling
from litft.data.answer_parser import first_mark, overlap
from litft.data.tokenizer import Tokenizer
from litft.inference.decoder import NOT_A_NUMBER, BrokenModel, Decoder
from litft.inference.detokenizer import Detokenizer
from litft.inference.sampling import Constraint, TokenSampler
from litft.inference.speculative import Drafter, speculative_rounds

# B rows, V vocabulary

# stop token or text; max_new_tokens; context full
FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True)
class Request:
    """A prompt and how to answer it."""

    ids: list[int]  # token ids of the prompt
    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    # tokens that end the answer and are not part of its text
    stop_ids: Sequence[int] = ()
    # texts that end the answer and are not part of it
    stop: Sequence[str] = ()
    # how many of the most likely tokens to report for each position
    top_logprobs: int = 0
    # remove leading whitespace, which some templates leave to the answer
    strip_leading: bool = False
    # special tokens that are part of the text
    shown_special_ids: frozenset[int] = frozenset()
    # which tokens may follow; of this answer alone
    constraint: Constraint | None = None
    # final length of the text, for some ropes; None: prompt plus max_new_tokens
    max_length: int | None = None


@dataclass
class GenerationStats:
    """Token counts and timings of an answer."""

    prompt_tokens: int
    # prompt tokens that went through the model, not copied from the cache
    prefill_tokens: int = 0
    new_tokens: int = 0
    time_to_first: float = 0.0  # seconds until the first token
    seconds: float = 0.0  # elapsed time
    drafted: int = 0  # draft tokens of speculative decoding
    accepted: int = 0  # of these, accepted ones

    @property
    def tokens_per_second(self) -> float:
        """Speed of the tokens after the first, which waits for the prefill."""
        return max(0, self.new_tokens - 1) / max(1e-9, self.seconds - self.time_to_first)

    def __str__(self) -> str:
        text = (
            f"{self.new_tokens} tokens, {self.tokens_per_second:.1f} tokens/s, the first after "
            f"{self.time_to_first:.2f} s"
        )
        if self.drafted:
            drafts = f", {self.accepted} of {self.drafted} draft tokens accepted"
        else:
            drafts = ""
        return (
            f"{text} (prompt: {self.prompt_tokens}, prefill: {self.prefill_tokens}){drafts}"
        )


class ChosenToken(NamedTuple):
    """A token, its log-probability by the unmodified logits, and the `top_logprobs` most likely
    tokens with theirs."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class GenerationChunk(str):
    """A str: the next part of an answer's text, with its tokens."""

    # since the last chunk, including a stop token at the end
    tokens: list[int]
    logprobs: list[float]  # of each token, by the unmodified logits
    # at each position, the most likely tokens with theirs
    top: list[list[tuple[int, float]]]
    # set in the last chunk, whose text may be empty
    finish_reason: FinishReason | None
    stats: GenerationStats

    def __new__(
        cls,
        text: str,
        chosen: Sequence[ChosenToken],
        reason: FinishReason | None,
        stats: GenerationStats,
    ) -> "GenerationChunk":
        """Create a str with five attributes."""
        chunk = super().__new__(cls, text)
        chunk.tokens = [entry.token for entry in chosen]
        chunk.logprobs = [entry.logprob for entry in chosen]
        chunk.top = [entry.top for entry in chosen]
        chunk.finish_reason = reason
        chunk.stats = stats
        return chunk

    @property
    def is_cut(self) -> bool:
        """Whether the model has not finished the answer, as far as this chunk tells."""
        return self.finish_reason != "stop"


class TextPiece(NamedTuple):
    """A part of an answer's text, which may be a special token that is not shown."""

    text: str
    visible: bool


class Answer:
    """An answer in progress: turns tokens into chunks of text and decides when to stop.

    Stop texts are searched for in the text with special tokens, as in transformers.
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer, room: int, start_time: float
    ) -> None:
        self.request = request
        self.tokenizer = tokenizer
        # tokens that the cache has left after the prompt
        self.room = room
        self.start_time = start_time
        self.detokenizer = Detokenizer(tokenizer, request.ids)
        self.pending: list[TextPiece] = []  # text that may start a stop text
        self.text_started = not request.strip_leading
        self.chosen: list[ChosenToken] = []  # since the last chunk
        self.finish_reason: FinishReason | None = None
        self.stats = GenerationStats(len(request.ids))

    def add_token(self, chosen: ChosenToken) -> GenerationChunk | None:
        """Add a token; return a chunk if there is new text or the answer ends, else None."""
        stats = self.stats
        request = self.request
        token = chosen.token
        stats.new_tokens = stats.new_tokens + 1
        stats.seconds = time.perf_counter() - self.start_time
        stats.time_to_first = stats.time_to_first or stats.seconds
        self.chosen.append(chosen._replace(top=chosen.top[: request.top_logprobs]))

        # a stop token ends the answer and is not a part of its text
        if token in request.stop_ids:
            self.finish_reason = "stop"
            self._add_text(self.detokenizer.rest())
            return self._next_chunk()

        if stats.new_tokens >= request.max_new_tokens:
            self.finish_reason = "length"
        elif stats.new_tokens >= self.room:
            self.finish_reason = "context"

        # A special token is text of its own: it ends the incomplete characters before it, and is
        # searched for stop texts even if it is not shown.
        if token in self.tokenizer.special_ids:
            self._add_text(self.detokenizer.rest())
            visible = token in request.shown_special_ids
            self.pending.append(TextPiece(self.tokenizer.special_text(token), visible))
        else:
            self._add_text(
                self.detokenizer.push(token, last=self.finish_reason is not None)
            )
        return self._next_chunk()

    def _add_text(self, text: str) -> None:
        if text:
            self.pending.append(TextPiece(text, visible=True))

    def _next_chunk(self) -> GenerationChunk | None:
        """Return the pending text up to a stop text, or to what may begin one, with its tokens;
        None if there is no text."""
        text = "".join(piece.text for piece in self.pending)
        end, stop = first_mark(text, self.request.stop)
        if stop:
            self.finish_reason = "stop"
        elif self.finish_reason:
            end = len(text)
        else:
            # the end of the text may be the beginning of a stop text
            held_back = 0
            for stop_text in self.request.stop:
                held_back = max(held_back, overlap(text, stop_text))
            end = len(text) - held_back

        text = self._take(end)
        # with strip_leading, until the first text that is not white space
        if not self.text_started:
            text = text.lstrip()
            self.text_started = bool(text)
        if not (text or self.finish_reason):
            return None
        chunk = GenerationChunk(text, self.chosen, self.finish_reason, self.stats)
        self.chosen = []
        return chunk

    def _take(self, count: int) -> str:
        """Remove the first `count` characters of the pending text and return those that are
        shown."""
        shown = ""
        rest = []
        for piece in self.pending:
            taken = piece.text[:count]
            left = piece.text[count:]
            count -= len(taken)
            if piece.visible:
                shown += taken
            if left:
                rest.append(piece._replace(text=left))
        self.pending = rest
        return shown


def generate_batch(
    decoder: Decoder,
    tokenizer: Tokenizer,
    requests: Iterable[Request],
    drafter: Drafter | None = None,
) -> Iterator[tuple[int, GenerationChunk]]:
    """Yield the chunks of all answers as they are generated, each with the index of its request.

    As many requests run at once as the decoder has rows. drafter: use speculative decoding; the
    decoder must have one row.
    """
    if drafter is not None:
        for number, request in enumerate(requests):
            for chunk in _speculate(decoder, tokenizer, request, drafter):
                yield number, chunk
        return

    # continuous batching: a row that becomes free takes the next request at once
    waiting = enumerate(requests)
    batch = Batch(decoder, tokenizer)
    while True:
        while batch.free and (next_request := next(waiting, None)):
            batch.add(*next_request)
        while batch.prefilling:
            batch.prefill()
        if not batch.running:
            return
        for number, chunk in batch.step():
            # ends all answers here; a server, which uses `Batch`, ends the broken one alone
            if isinstance(chunk, Exception):
                raise chunk
            yield number, chunk


class Completion(NamedTuple):
    """A complete answer."""

    text: str
    ended: bool  # by a stop token or text, not by a limit
    tokens: list[int]  # with a stop token at the end
    logprobs: list[float]  # of each token, by the unmodified logits


def generate_completions(
    decoder: Decoder,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    done: Callable[[], object] = lambda: None,
) -> list[Completion]:
    """Return all answers, in the order of their requests. done: called after each answer."""
    texts = [""] * len(requests)
    ended = [False] * len(requests)
    tokens: list[list[int]] = [[] for _ in requests]
    logprobs: list[list[float]] = [[] for _ in requests]
    for number, chunk in generate_batch(decoder, tokenizer, requests):
        texts[number] += chunk
        tokens[number] += chunk.tokens
        logprobs[number] += chunk.logprobs
        if chunk.finish_reason:
            ended[number] = chunk.finish_reason == "stop"
            done()
    return [
        Completion(*fields) for fields in zip(texts, ended, tokens, logprobs, strict=True)
    ]


@dataclass
class Prefill:
    """A prompt in prefill."""

    number: int
    request: Request
    start_time: float
    num_cached: int = 0  # prompt tokens in the cache
    # of these, tokens that went through the model
    num_computed: int = 0


class Batch:
    """Continuous batching: the requests that share a decoder, one per row, each identified by a
    number."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer) -> None:
        rows = len(decoder.texts)
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.sampler = TokenSampler(rows, decoder.model.config.vocab_size, decoder.device)
        self.logits = torch.zeros(rows, self.sampler.vocab_size, device=decoder.device)
        self.prefilling: dict[int, Prefill] = {}  # by row, in order of arrival
        # by row: number of the request, answer so far
        self.running: dict[int, tuple[int, Answer]] = {}
        # when the row was last assigned, as a counter
        self.assigned = [0] * rows

    @property
    def free(self) -> list[int]:
        """The rows without a request."""
        rows = []
        for row in range(len(self.assigned)):
            if row not in self.running and row not in self.prefilling:
                rows.append(row)
        return rows

    @property
    def numbers(self) -> list[int]:
        """The numbers of all requests: in prefill and running."""
        numbers = [prompt.number for prompt in self.prefilling.values()]
        for number, _ in self.running.values():
            numbers.append(number)
        return numbers

    def add(self, number: int, request: Request) -> None:
        """Queue a request for prefill in a free row.

        The row is chosen to keep the span of busy rows small, which a step computes; then the least
        recently assigned, since a later request may reuse the cache of the others.
        """
        busy = [*self.running, *self.prefilling]
        first = min(busy, default=len(self.assigned))
        last = max(busy, default=-1)
        costs = {}
        for row in self.free:
            span = max(row, last) - min(row, first)
            costs[row] = span, self.assigned[row]
        row = min(costs, key=costs.__getitem__)
        self.prefilling[row] = Prefill(number, request, time.perf_counter())
        self.assigned[row] = max(self.assigned) + 1

    def prefill(self, max_tokens: int | None = None, row: int | None = None) -> None:
        """Prefill a queued prompt, or compute `max_tokens` more of it; after its last token the
        answer runs.

        row: of the prompt, by default the oldest. Raises the ValueError of `Decoder.prefill`, and
        drops the request.
        """
        if row is None:
            row = next(iter(self.prefilling))
        prefill = self.prefilling[row]
        request = prefill.request
        before = self.decoder.processed
        size = len(request.ids)
        max_length = request.max_length or size + request.max_new_tokens
        # a server prefills in pieces, with a limit of tokens; without one, the whole prompt
        prefill.num_cached = size
        if max_tokens is not None:
            # tokens that are in the cache are not computed again
            start = self.decoder.num_cached(row, request.ids, max_length)
            prefill.num_cached = min(start + max_tokens, size)

        try:
            logits = self.decoder.prefill(
                row, request.ids[: prefill.num_cached], max_length
            )
        except ValueError:
            del self.prefilling[row]
            raise
        prefill.num_computed += self.decoder.processed - before

        # the prompt is complete: its row joins the running answers
        if prefill.num_cached == size:
            del self.prefilling[row]
            answer = Answer(
                request, self.tokenizer, self.decoder.capacity - size, prefill.start_time
            )
            answer.stats.prefill_tokens = prefill.num_computed
            self.logits[row] = logits
            self.sampler.begin(row, request.ids, request.sampling, request.constraint)
            self.running[row] = prefill.number, answer

    def cancel(self, number: int) -> None:
        """Drop a request."""
        for row, prefill in list(self.prefilling.items()):
            if prefill.number == number:
                del self.prefilling[row]
        for row, (other, _) in list(self.running.items()):
            if other == number:
                self._release(row)

    def _release(self, row: int) -> None:
        del self.running[row]
        self.sampler.constraints[row] = None
        # asynchronous steps may have cached a token that the text does not have
        self.decoder.truncate(row, len(self.decoder.texts[row]))

    def step(self) -> Iterator[tuple[int, GenerationChunk | Exception]]:
        """Generate one token of each answer; yield the chunks by request number, or the error that
        ends an answer."""
        yield from self._broken_constraints()
        if not self.running:
            return
        # sample a token for each running answer, from the logits of the last step
        decoder = self.decoder
        active = self._active()
        rows = decoder.span(active)
        self.sampler.select_rows(rows)
        tokens = torch.zeros(len(active), dtype=torch.long, device=decoder.device)
        tokens[rows] = self.sampler.next(self.logits[rows])

        idle_rows = [row for row in range(rows.start, rows.stop) if not active[row]]
        if idle_rows:
            # computed too, with any valid token; the result is ignored
            tokens[idle_rows] = 0
        # start copying to the host before the next step is launched, so that both overlap
        num_top = max(answer.request.top_logprobs for _, answer in self.running.values())
        pending = PendingTokens(tokens[rows], self.logits[rows], num_top)
        # the device runs the next step while the host handles this one; for answers that end here
        # its result is unused
        if decoder.async_steps:
            next_logits = decoder.step(tokens, self._active(with_room=True))
        else:
            next_logits = None

        # the first point where the host waits for the device
        chosen_by_row = {}
        for row, chosen in enumerate(pending.rows(), rows.start):
            if row in self.running:
                chosen_by_row[row] = chosen
        for row, chosen in chosen_by_row.items():
            number, answer = self.running[row]
            # NaN must not stay in the cache, see `Decoder.clear`
            if math.isnan(chosen.logprob):
                self._release(row)
                decoder.clear(row)
                yield number, BrokenModel(NOT_A_NUMBER)
                continue
            chunk = answer.add_token(chosen)
            if answer.request.constraint is not None:
                answer.request.constraint.advance(chosen.token)
            if answer.finish_reason:
                self._release(row)
            if chunk is not None:
                yield number, chunk

        if self.running:
            if next_logits is None:
                self.logits = decoder.step(tokens, self._active())
            else:
                self.logits = next_logits
        # after the step: if the caller stops at a chunk,
        # no token is recorded that is not in the cache
        for row, chosen in chosen_by_row.items():
            if row in self.running:
                decoder.append(row, chosen.token)

    def _broken_constraints(self) -> Iterator[tuple[int, Exception]]:
        """End the answers whose constraint has failed; yield the error of each, of this request
        alone."""
        for row, (number, answer) in list(self.running.items()):
            constraint = answer.request.constraint
            if constraint is None:
                continue
            problem = constraint.problem()
            if problem is not None:
                self._release(row)
                yield number, ValueError(problem)

    def _active(self, with_room: bool = False) -> list[bool]:
        """Return which rows have a running answer; with_room: only rows whose cache has room for
        another token."""
        lengths = self.decoder.lengths
        capacity = self.decoder.capacity
        active = []
        for row, length in enumerate(lengths):
            is_left_out = with_room and length == capacity
            active.append(row in self.running and not is_left_out)
        return active


class PendingTokens:
    """Asynchronous copy to the host of tokens (B,), their log-probabilities and the `num_top` most
    likely tokens."""

    def __init__(self, tokens: Tensor, logits: Tensor, num_top: int = 0) -> None:
        """Start the copy of tokens (B,), their log-probabilities in logits (B, V), and the most
        likely tokens."""
        # (B, 1), or with the most likely ones (B, 1 + num_top)
        ids = tokens[:, None]
        if num_top:
            top = logits.topk(min(num_top, logits.size(-1)))
            ids = torch.cat((ids, top.indices), 1)
        logprobs = logits.gather(1, ids) - logits.logsumexp(-1, keepdim=True)
        # one transfer for everything: ids are exact in fp64, too
        packed = torch.stack((ids.double(), logprobs.double()))
        self.on_host = packed
        self.event = None
        # the copy is asynchronous only into pinned memory
        if packed.is_cuda:
            self.on_host = torch.empty(
                packed.shape, dtype=packed.dtype, pin_memory=True
            ).copy_(packed, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def rows(self) -> Iterator[ChosenToken]:
        """Wait for the copy and yield the token of each row."""
        if self.event is not None:
            self.event.synchronize()
        for ids, logprobs in zip(*self.on_host.tolist(), strict=True):
            (token, logprob), *top = zip(map(int, ids), logprobs, strict=True)
            yield ChosenToken(token, logprob, top)


def _speculate(
    decoder: Decoder, tokenizer: Tokenizer, request: Request, drafter: Drafter
) -> Iterator[GenerationChunk]:
    """Generate one answer by speculative decoding."""
    # a batch of one row prefills the prompt and keeps the answer
    batch = Batch(decoder, tokenizer)
    batch.add(0, request)
    batch.prefill()
    _, answer = batch.running[0]
    for verified in speculative_rounds(decoder, batch.sampler, drafter, batch.logits[0]):
        answer.stats.drafted += verified.drafted
        # the last token of a round is drawn from the model: a replacement, or one after all drafts
        if verified.drafted:
            answer.stats.accepted += len(verified.tokens) - 1
        for token, logprob in zip(verified.tokens, verified.logprobs, strict=True):
            chunk = answer.add_token(ChosenToken(token, logprob, []))
            if chunk is not None:
                yield chunk
            if answer.finish_reason:
                return
