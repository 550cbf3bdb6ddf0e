"""Locks, so that two processes never write into the same folder. Imports no torch.

A lock is a record lock (`fcntl.lockf`) on a file. The kernel releases it when its process ends, in
any way, also over NFS. The file names the owner, for the message of the process that is refused.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

LOCK = ".lock"
# seconds; NFS 4 has leases of 90 (RFC 8881)
LEASE = 100.0
# record locks do not exclude other threads of the same process
_held: set[Path] = set()


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Within the context, own a folder, which is created if need be.

    An empty folder is deleted at the end.

    Raises ValueError if a process that still runs owns it, with that process and its host.
    """
    # mkdir would fail with a misleading message
    if folder.is_symlink() and not folder.exists():
        target = folder.readlink()
        raise ValueError(
            f"{folder} is a link to {target}, which does not exist; create it, or name another "
            "folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder / LOCK, folder):
            yield
    finally:
        # another process may begin in it now
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def locked(path: Path, folder: Path) -> Iterator[None]:
    """Within the context, hold the lock at `path` of a folder.

    Raises ValueError if another process holds it.
    """
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
            # while the lock is held, so that `_try_lock` notices
            path.unlink(missing_ok=True)


@contextmanager
def _locked_file(path: Path, folder: Path) -> Iterator[TextIO]:
    """Open and lock a file; raise ValueError if another process has locked it."""
    file = _try_lock(path)
    deadline = time.monotonic() + LEASE
    while file is None:
        owner = _owner(path)
        # a file server keeps the locks of a host that is gone until its lease is over
        is_here = owner.host in ("", socket.gethostname())
        if is_here or time.monotonic() > deadline:
            raise ValueError(_refusal(folder, str(owner)))
        time.sleep(min(1.0, LEASE))
        file = _try_lock(path)
    with file:
        yield file


def _try_lock(path: Path) -> TextIO | None:
    """Open and lock a file; return None if another process has locked it."""
    import fcntl  # not on Windows

    # until the locked file is the one at this path
    while True:
        try:
            file = path.open("a+", encoding="utf-8")
        except FileNotFoundError:
            # the previous owner has deleted its empty folder in the meantime
            path.parent.mkdir(parents=True, exist_ok=True)
            continue
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.close()
            return None
        except OSError:
            # The file system has no locks, so that nothing can be excluded.
            pass
        # The previous owner may have deleted the file in
        # the meantime. Then other processes open a new one.
        if is_at(file, path):
            return file
        file.close()


def owner_text(folder: Path) -> str:
    """Return who is writing into a folder, for a message; empty if nobody is. Takes no lock, since
    that would refuse a process that starts now."""
    path = folder / LOCK
    if not path.is_file():
        return ""
    owner = _owner(path)
    # what a killed process has left; that of another host cannot be asked
    if owner.host == socket.gethostname() and not _is_alive(owner.process):
        return ""
    return str(owner)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except PermissionError:
        # it belongs to another user
        return True
    except (ProcessLookupError, TypeError, OverflowError):
        # it has ended, or the lock file is damaged
        return False
    return True


def is_at(file: TextIO, path: Path) -> bool:
    """Return whether the open file is the one that has this path now."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@dataclass(frozen=True)
class _Owner:
    """Who holds a lock."""

    host: str = ""
    process: int = 0
    since: str = ""

    def __str__(self) -> str:
        if not self.host:
            return "another process"
        return f"process {self.process} on {self.host}, since {self.since}"


def _write_owner(file: TextIO) -> None:
    owner = _Owner(socket.gethostname(), os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S"))
    file.truncate(0)
    file.write(json.dumps(asdict(owner)) + "\n")
    file.flush()


def _owner(path: Path) -> _Owner:
    """Return who holds a lock, without its names while they are written."""
    try:
        return _Owner(**json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return _Owner()


def _refusal(folder: Path, owner: str) -> str:
    return (
        f"{folder} is in use by {owner}; wait until that process ends, end it, or name another "
        "folder"
    )
