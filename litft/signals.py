"""Signals that are noted, so that what is being done can end well: a run's step, an answer. Imports no torch."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from litft.args.processes import local_rank

NOTED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the last is what a cluster's scheduler warns with


@contextmanager
def held_back(number: signal.Signals) -> Iterator[None]:
    """Inside, a signal waits: for what must not end in the middle."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(number, before)
        if came:
            signal.raise_signal(number)


class Signals:
    """Inside, `caught` is the number of the last of these signals, 0 before any; a second Ctrl-C interrupts at once.

    The others may come again and again, from whoever manages the processes, and change nothing more. promise: what is
    said of the first; None: nothing.
    """

    def __init__(self, numbers: tuple[signal.Signals, ...] = NOTED, promise: str | None = "saving after this step") -> None:
        self.caught, self.numbers, self.promise = 0, numbers, promise
        self.before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():  # Python lets no other set handlers
            self.before = {number: signal.signal(number, self._note) for number in self.numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.caught == signal.SIGINT:
            raise KeyboardInterrupt
        if self.promise and not self.caught and local_rank() == "0":  # of several processes the first one speaks
            # print is not safe here: the signal may have come in the middle of one
            os.write(2, f"\n{signal.Signals(number).name}: {self.promise}\n".encode())
        self.caught = int(number)
