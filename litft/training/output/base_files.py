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
        # by file name; size, time and hash of the files that were read to their end
        self._entries: dict[str, dict[str, Any]] = {}
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
        return dict(self._entries)

    def check(self, recorded: dict[str, dict[str, Any]]) -> None:
        """Raise ValueError if a file is another one than the recorded one.

        Its hash is computed if size or time differ.
        """
        for path in self.paths:
            entry = recorded.get(path.name)
            if entry is None:
                continue
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
            self._entries[path.name] = {**stamp, "hash": entry["hash"]}

    def _hash(self) -> None:
        for path in self.paths:
            if path.name in self._entries:
                continue
            try:
                stamp = _stamp(path)
                entry = {**stamp, "hash": file_hash(path)}
                # replaced meanwhile: the hash may be that of neither file
                if _stamp(path) == stamp:
                    self._entries[path.name] = entry
            except OSError:
                # then only the fingerprint is compared
                continue


def _stamp(path: Path) -> dict[str, int]:
    stat = path.stat()
    return {"size": stat.st_size, "time": stat.st_mtime_ns}
