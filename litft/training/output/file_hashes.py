"""Hashes of a checkpoint's files: computed while they are written, compared before a run is
resumed.

They find bits that a disk, a network or a copy has changed. The hash is XXH3 of 64 bits
(github.com/Cyan4973/xxHash), whose speed is that of memory, so that writing takes no longer.
"""

import io
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from xxhash import xxh3_64

from litft.data.digests import file_hash

# bytes: handing a smaller piece to another thread takes longer than hashing it
_LARGE = 1 << 20
# of the file with a file's hash, next to it until the checkpoint is complete
_SUFFIX = ".xxh3"


class HashingWriter(FileSystemWriter):
    """DCP's writer, which also leaves the hash of each file that this process writes next to it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _HashingFileSystem()


class _HashingFileSystem(FileSystem):
    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file; if it is written, its hash is stored at the end."""
        with super().create_stream(path, mode) as file:
            if mode != "wb":
                yield file
                return
            with ThreadPoolExecutor(max_workers=1) as hasher:
                stream = _HashingStream(file, hasher)
                try:
                    yield stream
                except Exception:
                    # torch's own error says nothing of a full disk
                    if stream.error is not None:
                        raise stream.error from None
                    raise
        path = Path(path)
        path.with_name(path.name.removesuffix(".tmp") + _SUFFIX).write_text(
            stream.hash.hexdigest(), "utf-8"
        )


class _HashingStream(io.BufferedIOBase):
    """A file that is written from its beginning to its end, and hashed on the way.

    A large piece is hashed by another thread while it is written: both run without Python's lock.
    """

    def __init__(self, file: Any, hasher: Executor) -> None:
        self.file = file
        self.hasher = hasher
        self.hash = xxh3_64()
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if memoryview(data).nbytes < _LARGE:
            self.hash.update(data)
            return self._write(data)
        hashing = self.hasher.submit(self.hash.update, data)
        try:
            return self._write(data)
        finally:
            hashing.result()

    def _write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def tell(self) -> int:
        return self.file.tell()

    def flush(self) -> None:
        if not self.file.closed:
            self.file.flush()

    def fileno(self) -> int:
        return self.file.fileno()

    def close(self) -> None:
        self.file.close()


def collect_hashes(folder: Path) -> dict[str, str]:
    """Return the hashes that `HashingWriter` left in a folder, by file, and delete their files."""
    hashes = {}
    for path in folder.glob(f"*{_SUFFIX}"):
        hashes[path.name.removesuffix(_SUFFIX)] = path.read_text("utf-8")
        path.unlink()
    return hashes


def check_hashes(folder: Path, hashes: dict[str, str], names: Iterable[str]) -> None:
    """Raise ValueError if one of the files `names` does not have its hash.

    Raises OSError if it cannot be read.
    """
    for name in names:
        if file_hash(folder / Path(name).name) != hashes[name]:
            raise ValueError(
                f"{name} has changed since it was written: its hash is another one"
            )


def object_hash(value: Any) -> str:
    """Return the hash of an object as JSON; the order of its fields does not matter."""
    return xxh3_64(json.dumps(value, sort_keys=True).encode()).hexdigest()
