"""Files and folders that become visible only when they are complete. Imports no torch."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from litft.folder_lock import is_at, locked


def atomic_write(path: Path, text: str) -> None:
    """Write a text file; it becomes visible only when complete.

    Two processes at once write one after the other.
    """
    partial = path.with_name(f"{path.name}.partial")
    while True:
        file = partial.open("a", encoding="utf-8", newline="")
        with file:
            _wait_for_lock(file)
            # the former owner has given it its final name
            if not is_at(file, partial):
                continue
            file.truncate(0)
            file.write(text)
            file.flush()
            # on disk before it gets its name
            os.fsync(file.fileno())
            partial.replace(path)
        return


def _wait_for_lock(file: TextIO) -> None:
    """Lock a file, for as long as it is open; wait for another process that has locked it."""
    import fcntl  # not on Windows

    with suppress(OSError):  # the file system may have no locks
        fcntl.lockf(file, fcntl.LOCK_EX)


@contextmanager
def atomic_folder(folder: Path, partial: Path | None = None) -> Iterator[Path]:
    """Within the context, fill the folder that is returned; then it replaces `folder`.

    After an error it is deleted.

    partial: where to fill it, on the same disk; default: `folder` with the suffix .partial. What a
    killed process left there is deleted. Raises ValueError if another process fills it now.
    """
    if partial is None:
        partial = folder.with_name(f"{folder.name}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    with locked(partial.with_name(f"{partial.name}.lock"), folder):
        # what a killed process has left: with the lock held, nobody is writing it
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
            replace_folder(partial, folder)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and _is_disk_full(error):
                raise OSError(errno.ENOSPC, "the disk is full", str(folder)) from None
            raise


def _is_disk_full(error: OSError) -> bool:
    """Return whether an error means a full disk: numpy and safetensors say so only in their
    messages."""
    texts = (f"os error {errno.ENOSPC}", "requested and", "No space left")
    return error.errno in (errno.ENOSPC, errno.EDQUOT) or any(
        text in str(error) for text in texts
    )


def replace_folder(partial: Path, folder: Path) -> None:
    """Rename a complete folder to `folder`, replacing an existing one.

    After a crash `folder` is complete or absent.
    """
    # files before the folders that list them
    for path in sorted(partial.rglob("*"), reverse=True):
        _sync(path)
    _sync(partial)

    # two renames, since a folder that is not empty cannot be replaced in one
    old = folder.with_name(f"{folder.name}.old.partial")
    shutil.rmtree(old, ignore_errors=True)
    if folder.is_dir():
        folder.rename(old)
    partial.rename(folder)
    # the renames themselves
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
