"""Hashes of files' content, and of texts.

SHA-256 identifies a data file. Its hashes are cached: hashing a file of many GB again on every
start would take minutes. XXH3 of 64 bits (github.com/Cyan4973/xxHash), as fast as memory, finds
damage to files that litft has written.
"""

import fcntl
import hashlib
import json
import os
import time
from pathlib import Path

from xxhash import xxh3_64

from litft.atomic import atomic_write

HASHED_BYTES = 1 << 22  # bytes that are read at once
# ns: a file written this shortly before it was hashed may change again without a new timestamp
SETTLED = 2 * 10**9


def cache_folder() -> Path:
    """Return the folder of the caches of tokenized data and of file hashes."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "litft"


def data_home() -> Path:
    """Return the folder of programs' files that are no cache: runs need them to be repeated."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")


def digest_of(path: Path) -> str:
    """Return the sha256 of a file's bytes, from the cache if the file has not changed since it was
    hashed.

    A file is unchanged if its path, size, modification and status change times, and inode are; the
    modification time alone could have been set back. One process reads the file, and the others
    wait for it.
    """
    folder = cache_folder() / "digests"
    entry = folder / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with entry.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return _cached_digest(path, entry) or _hash_and_cache(path, entry)
    except OSError as error:
        # an error of the data file is the caller's; one of the cache only costs time
        if error.filename and not str(error.filename).startswith(str(folder)):
            raise
        return _hash_file(path)  # the cache is not writable


def _identity(path: Path) -> list:
    stat = path.stat()
    return [
        str(path.resolve()),
        stat.st_size,
        stat.st_mtime_ns,
        stat.st_ctime_ns,
        stat.st_ino,
    ]


def _cached_digest(path: Path, entry: Path) -> str | None:
    try:
        cached = json.loads(entry.read_text("utf-8"))
        identity = _identity(path)
        # see SETTLED: the times alone do not show a change right after the hashing
        settled = cached["at"] - max(identity[2:4]) > SETTLED
        if cached["identity"] == identity and settled:
            return cached["digest"]
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _hash_and_cache(path: Path, entry: Path) -> str:
    now = time.time_ns()

    # of both ends of the reading: a file that is being written has no hash to keep
    identity = _identity(path)
    digest = _hash_file(path)
    if _identity(path) != identity:  # it was written in the meantime
        return digest
    atomic_write(entry, json.dumps({"identity": identity, "at": now, "digest": digest}))
    return digest


def _hash_file(path: Path) -> str:
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASHED_BYTES):
            sha256.update(block)
    return sha256.hexdigest()


def digest_of_texts(texts: list[str]) -> str:
    """Return the sha256 of several texts in their order."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def file_hash(path: Path) -> str:
    """Return the XXH3 of a file's content. Raises OSError if it cannot be read."""
    computed = xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(HASHED_BYTES):
            computed.update(chunk)
    return computed.hexdigest()


def hash64(data: str | bytes) -> int:
    """Return a 64-bit hash of text or bytes."""
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
