"""Signal handlers that let the current step or answer finish first. Imports no torch."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from litft.args.processes import is_first_on_node
from litft.errors import signal_name

# cluster schedulers send SIGUSR1 as a warning
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextmanager
def defer_signal(number: signal.Signals) -> Iterator[None]:
    """Within the context, defer a signal until the end, for work that must not be interrupted."""
    # other threads cannot set handlers
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    previous = signal.signal(number, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(number, previous)
        if received:
            signal.raise_signal(number)


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """Within the context, SIGTERM ends the process as an exception does, so that temporary files
    are deleted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class Signals:
    """Within the context, record signals in `caught`: the number of the last one, 0 if none
    arrived.

    A second Ctrl-C raises KeyboardInterrupt. Other repeated signals, which process managers send,
    have no further effect.

    notice: text to print when the first signal arrives; None: print nothing.
    """

    def __init__(
        self,
        numbers: tuple[signal.Signals, ...] = HANDLED,
        notice: str | None = "saving after this step",
    ) -> None:
        self.caught = 0
        self.numbers = numbers
        self.notice = notice
        self.previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Signals":
        # Python allows no other thread to set handlers
        if threading.current_thread() is threading.main_thread():
            self.previous = {
                number: signal.signal(number, self._handle) for number in self.numbers
            }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.caught == signal.SIGINT:
            raise KeyboardInterrupt(
                "stopped at once, without saving" if self.notice else "interrupted"
            )
        # only the first process prints
        if self.notice and not self.caught and is_first_on_node():
            if number == signal.SIGINT:
                again = " (again: stop at once, without saving)"
            else:
                again = ""
            # print() is not safe here: the signal may have interrupted another print()
            os.write(2, f"\n{signal_name(number)}: {self.notice}{again}\n".encode())
        self.caught = int(number)
