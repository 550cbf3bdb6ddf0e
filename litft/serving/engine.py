"""Continuous batching: one thread generates all answers of a model together; each starts as soon as
a row is free."""

import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from queue import Empty, SimpleQueue

from litft.args.sampling import Sampling
from litft.errors import PeerLost
from litft.inference.decoder import PREFILL_CHUNK
from litft.inference.generation import Batch, GenerationChunk, Request
from litft.inference.session import Session
from litft.model.kv_cache import KVCache
from litft.serving.prefill_turns import PrefillTurns

# called in the engine's thread; an exception is its last call
Deliver = Callable[[GenerationChunk | Exception], None]


class Overloaded(Exception):
    """The queue of waiting requests is full."""


class Stopping(Exception):
    """The engine is stopping and accepts no requests."""


class Failed(Exception):
    """The engine has ended with an error and accepts no requests."""


@dataclass
class Job:
    """A request and the callback that receives its answer."""

    number: int
    # number of the first request that was submitted together with this one
    group: int
    model: str
    request: Request
    deliver: Deliver


class Engine:
    """Generates the answers to many requests at once, in its own thread.

    models: sessions by model name. rows: answers generated at once per model. capacity: maximum
    length of prompt plus answer in tokens. max_waiting: maximum number of requests that wait for a
    row, over all models.
    """

    def __init__(
        self, models: dict[str, Session], rows: int, capacity: int, max_waiting: int
    ) -> None:
        self.models = models
        self.rows = rows
        self.capacity = capacity
        self.max_waiting = max_waiting
        next(iter(models.values())).limit_threads(rows)
        self.alive = True
        # Waiting and running, in order of arrival. Other threads add to it: it is never iterated.
        self._jobs: dict[int, Job] = {}
        self._lock = threading.Lock()
        self._numbers = count()
        # from other threads, run in the engine's thread
        self._commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._batches: dict[str, Batch] = {}
        self._turns: dict[str, PrefillTurns] = {}  # by model name, as the batches
        self._waiting: dict[int, Job] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, model: str, requests: list[tuple[Request, Deliver]]) -> list[int]:
        """Submit requests, all or none, and return their numbers. Raise Overloaded, Stopping or
        Failed."""
        with self._lock:
            if self._stopping:
                raise Stopping
            if not self.alive:
                raise Failed
            if len(self._jobs) + len(requests) > self.max_requests:
                raise Overloaded
            # the first number names the group of all that are submitted together
            numbers = list(islice(self._numbers, len(requests)))
            jobs = [
                Job(number, numbers[0], model, *item)
                for number, item in zip(numbers, requests, strict=True)
            ]
            self._jobs |= {job.number: job for job in jobs}
        # `_waiting` belongs to the engine's thread, which the command also wakes
        self._commands.put(lambda: self._waiting.update({job.number: job for job in jobs}))
        return numbers

    def warm_up(self) -> None:
        """Generate one token or two with each model, which allocates caches and compiles.

        Raise any error that occurs.
        """
        chunks: SimpleQueue[GenerationChunk | Exception] = SimpleQueue()
        for name, session in self.models.items():
            # a second token, since the first one needs the prompt alone
            request = Request(session.tokenizer.encode("a")[-1:], 2, Sampling(0.0))
            self.submit(name, [(request, chunks.put)])
            while (
                not isinstance(chunk := chunks.get(), Exception) and not chunk.finish_reason
            ):
                pass
            if isinstance(chunk, Exception):
                raise chunk

    def cancel(self, numbers: list[int]) -> None:
        """Cancel unfinished answers. Nothing more of them is delivered after the current step."""
        self._commands.put(lambda: [self._cancel(number) for number in numbers])

    def stop(self) -> None:
        """Stop once running answers are finished. Waiting requests are rejected with Stopping."""
        with self._lock:
            self._stopping = True
        self._commands.put(self._refuse_waiting)

    def join(self) -> None:
        """Wait until the thread ends."""
        self._thread.join()

    @property
    def memory(self) -> int:
        """Bytes of the KV cache of one model."""
        model = next(iter(self.models.values())).model
        row_bytes = KVCache.token_bytes(
            model.config, model.dtype
        ) * self.capacity + KVCache.state_bytes(model.config)
        return row_bytes * self.rows

    @property
    def max_requests(self) -> int:
        """Maximum number of requests, running and waiting."""
        return self.max_waiting + self.rows * len(self.models)

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of running answers and of waiting requests."""
        # a copy, because the engine's thread changes it
        running = sum(len(batch.running) for batch in list(self._batches.values()))
        return {"running": running, "waiting": max(0, len(self._jobs) - running)}

    def _run(self) -> None:
        try:
            while self._jobs or not self._stopping:
                self._run_commands()
                self._admit()
                for name in list(self._batches):
                    self._advance(name)
        except BaseException as error:
            # without its peers this process cannot go on, and
            # a return would leave the HTTP server running
            if isinstance(error, PeerLost):
                print(f"error: {error}", file=sys.stderr)
                os._exit(2)
            traceback.print_exc()
            # first, so that no further request waits for an answer
            with self._lock:
                self.alive = False
                numbers = list(self._jobs)
            for number in numbers:
                self._finish(number, error)
        finally:
            self.alive = False

    def _run_commands(self) -> None:
        """Run the commands of other threads. If the engine is idle, wait for one."""
        idle = not self._waiting and not any(
            batch.running or batch.prefilling for batch in self._batches.values()
        )
        # an idle engine waits for the first command, and takes the others that are there
        with suppress(Empty):
            while True:
                self._commands.get(block=idle)()
                idle = False

    def _admit(self) -> None:
        """Start waiting requests for which their model has free rows."""
        # the models of the waiting requests, each once
        for name in dict.fromkeys(job.model for job in self._waiting.values()):
            try:
                batch = self._batch(name)
            except Exception as error:  # out of memory, mostly
                # without a cache, none of the model's requests can start
                for number in [
                    number for number, job in self._waiting.items() if job.model == name
                ]:
                    del self._waiting[number]
                    self._finish(number, error)
                continue
            while batch.free and (job := self._next_job(name)):
                del self._waiting[job.number]
                batch.add(job.number, job.request)

    def _next_job(self, model: str) -> Job | None:
        """Return the next waiting job of a model: of the group with the fewest running jobs, the
        oldest."""
        running = Counter()
        for batch in self._batches.values():
            for number in batch.numbers:
                # one whose prompt had an error has no job any more
                if number in self._jobs:
                    running[self._jobs[number].group] += 1
        waiting = (job for job in self._waiting.values() if job.model == model)
        return min(waiting, key=lambda job: (running[job.group], job.number), default=None)

    def _batch(self, name: str) -> Batch:
        """Return the batch of a model, created at its first request."""
        if name not in self._batches:
            session = self.models[name]
            self._batches[name] = Batch(
                session.decoder(self.rows, self.capacity), session.tokenizer
            )
            self._turns[name] = PrefillTurns()
        return self._batches[name]

    def _advance(self, name: str) -> None:
        """Prefill the next part of a model's prompts, then run one decode step for its answers."""
        batch = self._batches[name]
        numbers = batch.numbers
        turns = self._turns[name]
        try:
            self._prefill(batch, turns)
            running = [number for number, _ in batch.running.values()]
            start = time.perf_counter()
            chunks = batch.step() if running else ()
            for number, chunk in chunks:
                if isinstance(chunk, Exception):
                    self._finish(number, chunk)
                    continue
                deliver = self._jobs[number].deliver
                # first: the client may send its next request
                # as soon as it has the end of this answer
                if chunk.finish_reason:
                    self._finish(number)
                deliver(chunk)
            turns.decoded(running, time.perf_counter() - start)
            turns.forget_all_but(self._jobs)
        except Exception as error:
            # out of memory, a failing device: later requests get a new batch
            traceback.print_exc()
            del self._batches[name]
            # also those that were admitted between slices of prefill
            for number in dict.fromkeys([*numbers, *batch.numbers]):
                self._finish(number, error)

    def _prefill(self, batch: Batch, turns: PrefillTurns) -> None:
        """Prefill up to PREFILL_CHUNK tokens, of several short prompts or one long one, which
        bounds the wait of answers.

        Requests that arrive meanwhile wait for one slice only.
        """
        num_tokens = 0
        while batch.prefilling and num_tokens < PREFILL_CHUNK:
            row = turns.next_row(batch)
            if row is None:
                break
            number = batch.prefilling[row].number
            try:
                num_tokens += turns.prefill(batch, row)
            except ValueError as error:  # an error of this request only
                self._finish(number, error)
            self._run_commands()
            self._admit()

    def _finish(self, number: int, error: BaseException | None = None) -> None:
        with self._lock:
            job = self._jobs.pop(number, None)
        if job is not None and error is not None:
            job.deliver(error if isinstance(error, Exception) else Stopping())

    def _cancel(self, number: int) -> None:
        if number in self._jobs:
            job = self._jobs[number]
            if self._waiting.pop(number, None) is None and job.model in self._batches:
                self._batches[job.model].cancel(number)
            self._finish(number)

    def _refuse_waiting(self) -> None:
        for number in list(self._waiting):
            del self._waiting[number]
            self._finish(number, Stopping())
