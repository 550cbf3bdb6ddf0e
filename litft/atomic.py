"""Files and folders that become visible only when they are complete. Imports no torch."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def atomic_write(path: Path, text: str) -> None:
    """Write a text file; it becomes visible only when complete."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, "utf-8", newline="")
    _sync(partial)
    partial.replace(path)


@contextmanager
def atomic_folder(folder: Path, partial: Path | None = None) -> Iterator[Path]:
    """Within the context, fill the folder that is returned; then it replaces `folder`. After an error it is deleted.

    partial: where to fill it, on the same disk; default: `folder` with the suffix .partial, made anew.
    """
    if partial is None:
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
        partial.mkdir(parents=True)
    try:
        yield partial
        replace_folder(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def replace_folder(partial: Path, folder: Path) -> None:
    """Rename a complete folder to `folder`, replacing an existing one. After a crash `folder` is complete or absent."""
    for path in sorted(partial.rglob("*"), reverse=True):
        _sync(path)
    _sync(partial)
    old = folder.with_name(f"{folder.name}.old.partial")
    shutil.rmtree(old, ignore_errors=True)
    if folder.is_dir():
        folder.rename(old)
    partial.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
