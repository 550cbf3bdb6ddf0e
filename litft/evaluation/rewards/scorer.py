"""Rates completions with reward functions, each call under a time limit in another process."""

import copy
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from litft.args.processes import cores
from litft.evaluation.rewards.call import (
    Completed,
    call_with_lists,
    call_with_one,
    takes_lists,
)
from litft.evaluation.rewards.reward import Reward

MAX_WORKERS = 4
# seconds that loading a function's file may take on top of a call
LOADING = 60.0
SHOWN = 200  # characters of a completion in a message


class RewardError(ValueError):
    """A reward function has failed."""


class Worker:
    """A process that calls reward functions; see `worker.py`."""

    def __init__(self) -> None:
        read_end, write_end = os.pipe()
        # a session of its own: what a function starts ends with it, and Ctrl-C does not reach it
        self.process = subprocess.Popen(
            [sys.executable, "-m", "litft.evaluation.rewards.worker", str(write_end)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[write_end],
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([_root(), *_python_path()])},
        )
        os.close(write_end)
        self.results = read_end
        self.pending = b""

    def ask(self, request: dict, seconds: float) -> dict:
        """Return the answer to a request; raise TimeoutError after `seconds`, and EOFError if the
        process has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise EOFError from None
        end = time.monotonic() + seconds
        while b"\n" not in self.pending:
            ready, _, _ = select.select(
                [self.results], [], [], max(0.0, end - time.monotonic())
            )
            if not ready:
                raise TimeoutError
            data = os.read(self.results, 1 << 16)
            if not data:
                raise EOFError
            self.pending += data
        line, _, self.pending = self.pending.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        """End the process, and those that its functions have started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        os.close(self.results)


def _root() -> str:
    """Return the folder that this package is imported from."""
    return str(Path(__file__).parents[3])


def _python_path() -> list[str]:
    return [path for path in [os.environ.get("PYTHONPATH", "")] if path]


class RewardScorer:
    """Rates completions with reward functions. Its processes end with `close`."""

    def __init__(self, rewards: Sequence[Reward], timeout: float) -> None:
        # timeout: seconds for one completion
        self.rewards = list(rewards)
        self.timeout = timeout
        self.workers: list[Worker] = []
        self.takes_lists: dict[str, bool] = {}

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            worker.close()
        self.workers = []

    def score(self, items: Sequence[Completed]) -> list[list[float | None]]:
        """Return the values of each function for each item; None: it does not apply.

        Raises RewardError with the function, the prompt and the completion.
        """
        by_function = []
        for reward in self.rewards:
            if reward.function is not None:
                by_function.append(self._call(reward, reward.function, items))
            else:
                by_function.append(self._ask(reward, items))
        return [list(values) for values in zip(*by_function, strict=True)]

    def _call(
        self, reward: Reward, function: Callable, items: Sequence[Completed]
    ) -> list[float | None]:
        """Call a function from Python in this process."""
        # what a function changes in a prompt or a column is not seen by other calls
        items = [copy.deepcopy(item) for item in items]
        item = items[0]
        try:
            if takes_lists(function):
                return call_with_lists(function, items)
            values = []
            for item in items:
                values.append(call_with_one(function, item))
            return values
        except Exception as error:
            raise _error(reward, item, f"{type(error).__name__}: {error}") from error

    def _ask(self, reward: Reward, items: Sequence[Completed]) -> list[float | None]:
        """Call a function in the workers."""
        self._load(reward)
        if self.takes_lists[reward.source]:
            return self._answer(0, reward, items)["values"]
        values: list[float | None] = [None] * len(items)

        # each worker takes every n-th item
        def rate(number: int) -> None:
            count = len(self.workers)
            for at in range(number, len(items), count):
                (values[at],) = self._answer(number, reward, [items[at]])["values"]

        with ThreadPoolExecutor(len(self.workers)) as threads:
            list(threads.map(rate, range(len(self.workers))))
        return values

    def _load(self, reward: Reward) -> None:
        """Start the workers, and let each load a function."""
        while len(self.workers) < min(MAX_WORKERS, cores()):
            self.workers.append(Worker())
        if reward.source in self.takes_lists:
            return
        # an empty request loads the function, and says whether it takes lists
        with ThreadPoolExecutor(len(self.workers)) as threads:
            answers = threads.map(
                lambda number: self._answer(number, reward, []), range(len(self.workers))
            )
            for answer in answers:
                self.takes_lists[reward.source] = answer["lists"]

    def _answer(self, number: int, reward: Reward, items: Sequence[Completed]) -> dict:
        """Return a worker's answer to a request; raise RewardError for one that has failed."""
        request = {"source": reward.source, "items": [asdict(item) for item in items]}
        limit = self.timeout * len(items)
        # the first call imports what the function needs
        seconds = limit + LOADING * (not items)
        worker = self.workers[number]
        try:
            answer = worker.ask(request, seconds)
        except TimeoutError:
            reason = f"has not returned within {seconds:g} s, the time limit of its calls"
        except EOFError:
            code = worker.process.wait()
            reason = f"has ended its process (exit code {code})"
        else:
            if "error" not in answer:
                return answer
            reason = answer["error"]
            items = items[answer["number"] :]
        raise _error(reward, items[0] if items else None, reason)


def _error(reward: Reward, item: Completed | None, reason: str) -> RewardError:
    message = f"--reward {reward.source}: the function {reason}"
    if reward.function is not None:
        message = f"rewards: the function {reward.name} failed ({reason})"
    if item is not None:
        question = str(item.prompt[-1].get("content", ""))[:SHOWN]
        message += (
            f"\n  prompt: {question!r}\n  completion: {item.completion[:SHOWN]!r}\n  columns: "
            f"{str(item.columns)[:SHOWN]}"
        )
    return RewardError(message)
