"""SIGTERM, SIGINT and SIGUSR1 while a run trains: noted, so that it can save at the end of a step. Imports no torch."""

import os
import signal
import threading
from types import FrameType
from typing import Any

NOTED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the last is what a cluster's scheduler warns with


class Signals:
    """Inside, `caught` is the number of the last of these signals, 0 before any; a second Ctrl-C interrupts at once.

    The others may come again and again, from whoever manages the processes, and change nothing more.
    """

    def __init__(self) -> None:
        self.caught = 0
        self.before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():  # Python lets no other set handlers
            self.before = {number: signal.signal(number, self._note) for number in NOTED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.caught == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.caught and os.environ.get("LOCAL_RANK", "0") == "0":  # of several processes the first one speaks
            # print is not safe here: the signal may have come in the middle of one
            os.write(2, f"\n{signal.Signals(number).name}: saving after this step\n".encode())
        self.caught = int(number)
