"""Exceptions that reach the user, in addition to ValueError. Imports no torch.

A `ValueError` is a user error: `cli.py` prints its message and exits with code 2.
"""

import difflib
import signal
from itertools import islice
from pathlib import Path

# files of a folder among which the nearest name to a missing one is searched
MOST_COMPARED = 1000


def signal_name(number: int) -> str:
    """Return a signal's name as people know it."""
    if number == signal.SIGINT:
        return "Ctrl-C"
    return signal.Signals(number).name


class RankError(ValueError):
    """An error that may occur in one process only, so that any process that raises it prints it."""


class Interrupted(Exception):
    """A signal ended the run after its state was saved.

    `code` is the exit code, 128 + signal number.
    """

    def __init__(self, number: int, step: int, command: str, is_last: bool = False) -> None:
        # is_last: it was the run's last step
        self.code = 128 + number
        if step and is_last:
            status = (
                f"stopped after the last step, {step}, before the result was written; saved"
            )
        elif step:
            status = f"stopped after step {step}, and saved"
        else:
            status = "stopped before the first step"
        super().__init__(f"{signal_name(number)}: {status}; to continue: {command}")


class PeerLost(BaseException):
    """Another process of the group has ended, so this one cannot continue.

    A BaseException, like KeyboardInterrupt: code that catches Exception to survive user errors must
    not catch it.
    """


def is_host_memory_error(error: BaseException) -> bool:
    """Return whether an error means that the system gave a process no more memory."""
    text = str(error).lower()
    return (
        isinstance(error, MemoryError)
        or "allocate memory" in text
        or "unable to mmap" in text
    )


def memory_message(error: BaseException, remedy: str) -> str:
    """Return what to tell a user whose process got no more memory. remedy: what the command offers
    to need less."""
    import resource  # not on Windows

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    remedy = f"close other programs, or {remedy}"
    if limit != resource.RLIM_INFINITY:
        remedy = (
            f"raise the limit of the address space, which is {limit / 2**30:.1f} GiB (ulimit -v); "
            f"or {remedy}"
        )
    return f"not enough memory ({first_line(error)}); {remedy}"


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message, at most 200 characters: compilers
    print many lines."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def missing_path(name: str | Path, remedy: str) -> str:
    """Return the message about a path that does not exist: where it was looked for, and the nearest
    name beside it, or else the remedy."""
    path = Path(name)
    where = "" if path.is_absolute() else f" in {Path.cwd()}"
    nearest = nearest_beside(path)
    if nearest is not None:
        remedy = f"did you mean {nearest}?"
    return f"{name} does not exist{where}; {remedy}"


def nearest_beside(path: Path) -> Path | None:
    """Return the file or folder beside a missing one whose name is nearest; None without one."""
    names = []
    try:
        for file in islice(path.parent.iterdir(), MOST_COMPARED):
            names.append(file.name)
    except OSError:
        return None
    nearest = difflib.get_close_matches(path.name, sorted(names), n=1, cutoff=0.8)
    if nearest:
        return path.parent / nearest[0]
    return None
