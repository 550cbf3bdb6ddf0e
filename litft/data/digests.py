"""What files hold, as hashes that are kept: reading a file of many GB again on every start would take minutes."""

import fcntl
import hashlib
import json
import os
import time
from pathlib import Path

SETTLED = 2 * 10**9  # ns: a file that was written shortly before it was hashed may change within one tick of its clock


def cache_folder() -> Path:
    """Where tokenized data is kept, and what files hold."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "litft"


def digest_of(path: Path) -> str:
    """The sha256 of a file's bytes, as it was noted where the file is the one that was hashed.

    That it is, its place, size, both of its times and its inode say together; a time of change alone could be set back. Of
    several processes one reads the file, and the others wait for it.
    """
    kept_in = cache_folder() / "digests"
    entry = kept_in / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with entry.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return _known(path, entry) or _noted(path, entry)
    except OSError as error:
        if error.filename and not str(error.filename).startswith(str(kept_in)):
            raise
        return _hashed(path)  # where nothing can be kept


def _identity(path: Path) -> list:
    found = path.stat()
    return [str(path.resolve()), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _known(path: Path, entry: Path) -> str | None:
    try:
        kept = json.loads(entry.read_text("utf-8"))
        identity = _identity(path)
        settled = kept["at"] - max(identity[2:4]) > SETTLED
        return kept["digest"] if kept["identity"] == identity and settled else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _noted(path: Path, entry: Path) -> str:
    at, identity = time.time_ns(), _identity(path)
    digest = _hashed(path)
    if _identity(path) != identity:  # it was written meanwhile
        return digest
    partial = entry.with_suffix(".partial")
    partial.write_text(json.dumps({"identity": identity, "at": at, "digest": digest}), "utf-8")
    partial.replace(entry)
    return digest


def _hashed(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            found.update(block)
    return found.hexdigest()
