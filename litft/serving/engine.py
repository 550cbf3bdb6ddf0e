"""One thread that makes everybody's answers: those of a model together, each beginning as soon as there is a row for it."""

import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from queue import Empty, SimpleQueue

from litft.errors import PeerLost
from litft.inference.decoder import PIECE
from litft.inference.generation import Batch, GenerationChunk, Request
from litft.inference.sampling import Sampling
from litft.inference.session import Session
from litft.model.kv_cache import KVCache

Deliver = Callable[
    [GenerationChunk | Exception], None
]  # is called in the engine's thread; an exception is the last it is given


class Overloaded(Exception):
    """As many requests wait as may."""


class Stopping(Exception):
    """Nothing new is begun."""


@dataclass
class Job:
    """A request and who it is for."""

    number: int
    first: int  # of those that were asked for with it
    model: str
    request: Request
    deliver: Deliver


class Engine:
    """Answers for many at once.

    models: by the names that requests give. rows: how many answers of each are made at once, in texts of up to `capacity`
    tokens. most_waiting: how many more may wait for a row, of all models together.
    """

    def __init__(self, models: dict[str, Session], rows: int, capacity: int, most_waiting: int) -> None:
        self.models, self.rows, self.capacity, self.most_waiting = models, rows, capacity, most_waiting
        next(iter(models.values())).limit_threads(rows)
        self.alive = True
        self._jobs: dict[int, Job] = {}  # waiting and running, in the order they came
        self._lock, self._numbers = threading.Lock(), count()
        self._came: SimpleQueue[Callable[[], None]] = SimpleQueue()  # what others want done, in the engine's thread
        self._batches: dict[str, Batch] = {}
        self._waiting: dict[int, Job] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def submit(self, model: str, requests: list[tuple[Request, Deliver]]) -> list[int]:
        """Have requests answered, all or none of them; returns their numbers. Raises Overloaded or Stopping."""
        with self._lock:
            if self._stopping or not self.alive:
                raise Stopping
            if len(self._jobs) + len(requests) > self.most:
                raise Overloaded
            numbers = list(islice(self._numbers, len(requests)))
            jobs = [Job(number, numbers[0], model, *asked) for number, asked in zip(numbers, requests, strict=True)]
            self._jobs |= {job.number: job for job in jobs}
        self._came.put(lambda: self._waiting.update({job.number: job for job in jobs}))
        return numbers

    def warm(self) -> None:
        """Answer a word with each model: what is made at the first use is there then. Raises what goes wrong."""
        ends: SimpleQueue[GenerationChunk | Exception] = SimpleQueue()
        for name, session in self.models.items():
            request = Request(session.tokenizer.encode("a")[-1:], 2, Sampling(0.0))
            self.submit(name, [(request, ends.put)])
            while not isinstance(piece := ends.get(), Exception) and not piece.finish_reason:
                pass
            if isinstance(piece, Exception):
                raise piece

    def cancel(self, numbers: list[int]) -> None:
        """Give answers up that are not done: nothing more of them is delivered after the step that is being made."""
        self._came.put(lambda: [self._give_up(number) for number in numbers])

    def stop(self) -> None:
        """End when what has begun is done; what waits is refused with Stopping."""
        with self._lock:
            self._stopping = True
        self._came.put(self._refuse_waiting)

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join()

    @property
    def memory(self) -> int:
        """Bytes that the texts of one of the models take."""
        model = next(iter(self.models.values())).model
        return KVCache.token_bytes(model.config, model.dtype) * self.rows * self.capacity

    @property
    def most(self) -> int:
        """How many requests there may be, running and waiting."""
        return self.most_waiting + self.rows * len(self.models)

    @property
    def counts(self) -> dict[str, int]:
        """How many answers are being made, and how many requests wait."""
        running = sum(len(batch.running) for batch in list(self._batches.values()))
        return {"running": running, "waiting": max(0, len(self._jobs) - running)}

    def _run(self) -> None:
        try:
            while self._jobs or not self._stopping:
                self._hear()
                self._admit()
                for name in list(self._batches):
                    self._go_on(name)
        except BaseException as error:
            if isinstance(error, PeerLost):
                print(f"error: {error}", file=sys.stderr)
                os._exit(2)
            traceback.print_exc()
            for number in list(self._jobs):
                self._finish(number, error)
        finally:
            self.alive = False

    def _hear(self) -> None:
        """Do what was asked for; with nothing else to do wait for it."""
        idle = not self._waiting and not any(batch.running or batch.reading for batch in self._batches.values())
        with suppress(Empty):
            while True:
                self._came.get(block=idle)()
                idle = False

    def _admit(self) -> None:
        """Begin as many of those who wait as their models have free rows for."""
        for name in dict.fromkeys(job.model for job in self._waiting.values()):
            try:
                batch = self._batch(name)
            except Exception as error:  # out of memory, mostly
                for number in [number for number, job in self._waiting.items() if job.model == name]:
                    del self._waiting[number]
                    self._finish(number, error)
                continue
            while batch.free and (job := self._following(name)):
                del self._waiting[job.number]
                batch.begin(job.number, job.request)

    def _following(self, model: str) -> Job | None:
        """Who waits longest for a model; those who were asked for with many that run already let others pass."""
        begun = Counter(job.first for number, job in self._jobs.items() if number not in self._waiting)
        waiting = (job for job in self._waiting.values() if job.model == model)
        return min(waiting, key=lambda job: (begun[job.first], job.number), default=None)

    def _batch(self, name: str) -> Batch:
        """A model's, made at its first request."""
        if name not in self._batches:
            session = self.models[name]
            self._batches[name] = Batch(session.decoder(self.rows, self.capacity), session.tokenizer)
        return self._batches[name]

    def _go_on(self, name: str) -> None:
        """Read a piece more of a model's prompts, and make a token more of each of its answers."""
        batch = self._batches[name]
        numbers = [prompt.number for prompt in batch.reading.values()] + [number for number, _ in batch.running.values()]
        try:
            self._read(batch)
            for number, piece in batch.step() if batch.running else ():
                if isinstance(piece, Exception):
                    self._finish(number, piece)
                    continue
                self._jobs[number].deliver(piece)
                if piece.finish_reason:
                    self._finish(number)
        except Exception as error:  # out of memory, a device that fails: the next requests find a fresh start
            traceback.print_exc()
            del self._batches[name]
            for number in numbers:
                self._finish(number, error)

    def _read(self, batch: Batch) -> None:
        """Short prompts at once, of a long one a piece: those who are being answered wait no longer than for that."""
        read = 0
        while batch.reading and read < PIECE:
            prompt = next(iter(batch.reading.values()))
            before = prompt.done
            try:
                batch.read_on(PIECE)
            except ValueError as error:  # of this request: the others go on
                self._finish(prompt.number, error)
            read += prompt.done - before

    def _finish(self, number: int, error: BaseException | None = None) -> None:
        with self._lock:
            job = self._jobs.pop(number, None)
        if job is not None and error is not None:
            job.deliver(error if isinstance(error, Exception) else Stopping())

    def _give_up(self, number: int) -> None:
        if number in self._jobs:
            job = self._jobs[number]
            if self._waiting.pop(number, None) is None and job.model in self._batches:
                self._batches[job.model].drop(number)
            self._finish(number)

    def _refuse_waiting(self) -> None:
        for number in list(self._waiting):
            del self._waiting[number]
            self._finish(number, Stopping())
