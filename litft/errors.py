"""The kinds of error that a user meets, besides ValueError. Imports no torch.

A `ValueError` is a user's mistake: `cli.py` prints its message and ends with exit code 2.
"""

import signal
from pathlib import Path


class RankError(ValueError):
    """A mistake that one process may have alone: it is printed by whichever process raises it."""


class Interrupted(Exception):
    """A run that a signal ended, its state saved; `code` is the exit code that a shell expects."""

    def __init__(self, number: int, step: int, folder: Path) -> None:
        self.code = 128 + number
        what = f"stopped after step {step}, and saved" if step else "stopped before the first step"
        super().__init__(f"{signal.Signals(number).name}: {what}; --resume --out_dir {folder} goes on")


class PeerLost(BaseException):
    """Another process of the group has ended, so that this one cannot continue.

    No Exception, as KeyboardInterrupt is none: a program that survives its users' mistakes must not survive this.
    """


def summary(error: BaseException) -> str:
    """An error's kind and the first line of its message, at most 200 characters: compilers print hundreds of lines."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
