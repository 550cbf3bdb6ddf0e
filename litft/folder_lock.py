"""Locks, so that two processes never write into the same folder. Imports no torch.

A lock is a record lock (`fcntl.lockf`) on a file. The kernel releases it when its process ends, in any way, also over NFS.
The file names the owner, for the message of the process that is refused.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

LOCK = ".lock"
_held: set[Path] = set()  # record locks do not exclude other threads of the same process


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Within the context, own a folder, which is created if need be. An empty folder is deleted at the end.

    Raises ValueError if a process that still runs owns it, with that process and its host.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder / LOCK, folder):
            yield
    finally:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def locked(path: Path, folder: Path) -> Iterator[None]:
    """Within the context, hold the lock at `path` of a folder. Raises ValueError if another process holds it."""
    key = path.resolve()
    if key in _held:
        raise ValueError(_refusal(folder, "this process"))
    with _locked_file(path, folder) as file:
        _write_owner(file)
        _held.add(key)
        try:
            yield
        finally:
            _held.discard(key)
            path.unlink(missing_ok=True)


@contextmanager
def _locked_file(path: Path, folder: Path) -> Iterator[TextIO]:
    """Open and lock a file; raise ValueError if another process has locked it."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            with file:
                raise ValueError(_refusal(folder, _owner(file))) from None
        except OSError:
            # The file system has no locks, so that nothing can be excluded.
            pass
        # The previous owner may have deleted the file in the meantime. Then other processes open a new one.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            break
        file.close()
    with file:
        yield file


def _write_owner(file: TextIO) -> None:
    owner = {"host": socket.gethostname(), "process": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    file.truncate(0)
    file.write(json.dumps(owner) + "\n")
    file.flush()


def _owner(file: TextIO) -> str:
    """Return who holds a lock, as text."""
    file.seek(0)
    try:
        owner = json.loads(file.read())
        return f"process {owner['process']} on {owner['host']}, since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it is being written
        return "another process"


def _refusal(folder: Path, owner: str) -> str:
    return f"{folder} is in use by {owner}; wait until that process ends, end it, or name another folder"
