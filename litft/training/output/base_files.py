"""Whether the base of a resumed run has the files with which the run began."""

import threading
from pathlib import Path
from typing import Any

from litft.data.digests import file_hash


class BaseFiles:
    """The weight files of a base, and its config.json: their sizes, times and hashes.

    Files with the same size and time are taken for the same. Others are compared by their hashes,
    which one thread computes
    while the run begins: the files were just read, so that they are mostly in the system's cache.
    """

    def __init__(
        self, paths: list[Path], role: str = "the base of what was trained"
    ) -> None:
        # role: what the files are a part of, for messages
        self.paths = paths
        self.role = role
        # by file name; of the files that were read to their end
        self._hashes: dict[str, str] = {}
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to hash the files whose hashes are not known."""
        self._thread = threading.Thread(target=self._hash, name="base hashes", daemon=True)
        self._thread.start()

    def record(self) -> dict[str, dict[str, Any]]:
        """Return size, time in nanoseconds and hash of each file, for a checkpoint.

        Waits for the thread.
        """
        if self._thread is not None:
            self._thread.join()
        entries = {}
        for path in self.paths:
            if path.name in self._hashes:
                entries[path.name] = {**_stamp(path), "hash": self._hashes[path.name]}
        return entries

    def check(self, recorded: dict[str, dict[str, Any]]) -> None:
        """Raise ValueError if a file is another one than the recorded one.

        Its hash is computed if size or time differ.
        """
        for path in self.paths:
            entry = recorded.get(path.name)
            if entry is None:
                continue
            # the hash is only computed if size or time differ
            stamp = _stamp(path)
            if (
                any(entry.get(name) != value for name, value in stamp.items())
                and file_hash(path) != entry["hash"]
            ):
                raise ValueError(
                    f"{path} has changed since the run began, and it is a part of {self.role}; "
                    "restore the file, or start another run"
                )
            # unchanged, so it need not be hashed again
            self._hashes[path.name] = entry["hash"]

    def _hash(self) -> None:
        for path in self.paths:
            if path.name in self._hashes:
                continue
            try:
                self._hashes[path.name] = file_hash(path)
            except OSError:
                # then only the first values of each tensor are compared
                continue


def _stamp(path: Path) -> dict[str, int]:
    stat = path.stat()
    return {"size": stat.st_size, "time": stat.st_mtime_ns}
