"""The cache of tokenized files: each file is tokenized once, in parallel; later runs only map the
result into memory.

The cache is stored in $XDG_CACHE_HOME/litft (default ~/.cache/litft) and may be deleted while no
run reads it. An entry's name is a hash of everything that decides its content: file, tokenizer,
template, mask, length limit, and this code.
"""

import ctypes
import fcntl
import hashlib
import math
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from importlib.metadata import version
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from litft.args.processes import cores
from litft.atomic import atomic_folder
from litft.data.digests import cache_folder
from litft.data.encoded import Encoded
from litft.data.encoder import Encoder
from litft.data.encoding_report import MAX_NAMED, EncodingReport
from litft.data.readers import Records
from litft.data.sources import File, HubSplit
from litft.data.token_store import TokenStore, TokenStoreWriter
from litft.errors import RankError

# records that a process tokenizes at once; files of
# more than eight chunks are tokenized in parallel
RECORDS_PER_TASK = 250
# linux/prctl.h: the signal sent to a process when its parent dies
PR_SET_PDEATHSIG = 1
# one process reads and writes for all, which is about a sixteenth of the work
MAX_PROCESSES = 16


def tokenized(
    file: File | HubSplit, encoder: Encoder, max_bad: float, timeout: float = math.inf
) -> TokenStore:
    """Return the samples that the encoder makes of the file, from the cache if it has them; other
    processes wait meanwhile.

    max_bad: the fraction of records that may be bad. timeout: seconds to wait for another process
    that makes no progress. Raise ValueError listing the bad records if there are more, and
    RankError if the wait times out.
    """
    digest = file.digest()
    folder = cache_folder() / _key(file, digest, encoder)
    store = TokenStore.open_or_none(folder)
    if store is None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with folder.with_suffix(".lock").open("w") as lock:
                _wait(lock, folder.with_suffix(".partial"), file.label, timeout)
                # the process that held the lock may have written the store in the meantime
                if TokenStore.open_or_none(folder) is None:
                    _write(file, digest, encoder, max_bad, folder, lock)
        except OSError as error:
            if error.filename and not str(error.filename).startswith(str(cache_folder())):
                raise
            remedy = "set XDG_CACHE_HOME to another folder"
            raise ValueError(
                f"cannot write the cache of tokenized data, {folder}: {error.strerror}; {remedy}"
            ) from None
        store = TokenStore(folder)
    _check_bad(file.label, store.report, max_bad)
    return store


def _wait(lock: TextIO, partial: Path, label: str, timeout: float) -> None:
    """Wait for the lock; raise RankError if the process that holds it has written nothing for
    `timeout` seconds."""
    last_size = None
    since = time.monotonic()
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        if last_size is None:
            print(
                f"another process is tokenizing {label}; waiting for it",
                file=sys.stderr,
                flush=True,
            )
        # the process that holds the lock is alive if its file grows
        size = sum(path.stat().st_size for path in partial.glob("tokens.bin"))
        if size != last_size:
            last_size = size
            since = time.monotonic()
        if time.monotonic() - since > timeout:
            reason = (
                f"another process is tokenizing {label}, and has written nothing for {timeout:.0f} "
                "s (--timeout)"
            )
            raise RankError(f"{reason}; end it, or raise --timeout")
        time.sleep(0.05)


def _key(file: File | HubSplit, digest: str, encoder: Encoder) -> str:
    """Return the hash of everything that decides the samples."""
    # the name, the number of records and the way of reading are a part of the file's `repr`
    parts = (repr(file), digest, encoder.digest, _code_version())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@lru_cache
def _code_version() -> str:
    """Return the hash of the code between a record and its tokens: this folder's files and the
    libraries' versions."""
    folder = Path(__file__).parent
    sources = sorted(folder.glob("*.py"))
    libraries = [
        f"{name} {version(name)}" for name in ("jinja2", "tokenizers", "sentencepiece")
    ]
    return hashlib.sha256(
        b"".join([path.read_bytes() for path in sources]) + repr(libraries).encode()
    ).hexdigest()


def _write(
    file: File | HubSplit,
    digest: str,
    encoder: Encoder,
    max_bad: float,
    folder: Path,
    lock: TextIO,
) -> None:
    """Write the cache entry, which becomes visible only when complete.

    The caller holds the lock.
    """
    shutil.rmtree(folder, ignore_errors=True)  # it is damaged
    with atomic_folder(folder, folder.with_suffix(".partial")) as partial:
        counted_ids = encoder.tokenizer.special_ids | encoder.tokenizer.new_ids
        writer = TokenStoreWriter(partial, counted_ids)
        with tqdm(
            desc=f"tokenizing {Path(file.name).name}", unit=" records", delay=3
        ) as bar:
            for encoded in encode(file.records(), encoder, lock):
                writer.add(encoded)
                bar.update()
                # enough to fix at once
                if writer.report.bad[0] == MAX_NAMED and not max_bad:
                    lines = "\n".join(writer.report.bad_lines())
                    hint = "--data.skip_bad allows a share of bad records"
                    raise ValueError(f"{lines}\nreading {file.label} stopped here; {hint}")
        _check_bad(file.label, writer.report, max_bad)
        # the hash that names this entry was taken before the file was read
        if file.digest() != digest:
            raise ValueError(
                f"{file.label} changed while it was read; start again when it is completely written"
            )
        writer.close()


def _check_bad(name: str, report: EncodingReport, max_bad: float) -> None:
    count, messages = report.bad
    # as a ratio: 0.29 * 100 is less than 29
    if count and count / report.records > max_bad:
        if count > len(messages):
            more = f"\nand {count - len(messages):,} more"
        else:
            more = ""
        skip_hint = ""
        if count < report.records:
            # rounded up to a percent, so that the value lets this file pass
            percent = -(-100 * count // report.records)
            skip_hint = f"; --data.skip_bad {percent / 100:g} skips them"
        if count > 1 or max_bad:
            share = (
                f"\n{count:,} of {report.records:,} records of {name} are bad{skip_hint}"
            )
        else:
            share = ""
        raise ValueError("\n".join(report.bad_lines()) + more + share)


def encode(records: Records, encoder: Encoder, lock: TextIO) -> Iterator[Encoded]:
    """Yield the encoding of each record, in order; many records are encoded by several
    processes."""
    chunks = iter(lambda: list(islice(records, RECORDS_PER_TASK)), [])
    # a ninth chunk shows that the file is long enough to pay for the start of processes
    first_chunks = list(islice(chunks, 9))
    workers = min(cores(), MAX_PROCESSES)
    pool = None
    if len(first_chunks) == 9 and workers > 1:
        pool = _make_pool(encoder, workers, lock)
    if pool is None:
        for chunk in chain(first_chunks, chunks):
            for where, record in chunk:
                yield encoder(where, record)
    else:
        yield from _in_parallel(chain(first_chunks, chunks), pool, workers)


def _make_pool(encoder: Encoder, workers: int, lock: TextIO) -> ProcessPoolExecutor | None:
    """Return a pool of processes; None if there is no room for its semaphores, as in containers
    with a small /dev/shm."""
    # fork: the tokenizer is not pickled, and the main script is not imported again
    try:
        return ProcessPoolExecutor(
            workers, get_context("fork"), _init_worker, (encoder, lock, os.getpid())
        )
    except OSError as error:
        reason = error.strerror or str(error)
        print(
            f"note: one process tokenizes: several cannot share memory ({reason}; /dev/shm)",
            file=sys.stderr,
        )
        return None


def _in_parallel(
    chunks: Iterable[list], pool: ProcessPoolExecutor, workers: int
) -> Iterator[Encoded]:
    try:
        # a few chunks per process keep all of them busy, and the rest of the file out of memory
        pending = deque(
            pool.submit(_encode_chunk, chunk) for chunk in islice(chunks, 3 * workers)
        )
        while pending:
            yield from pending.popleft().result()
            pending.extend(pool.submit(_encode_chunk, chunk) for chunk in islice(chunks, 1))
    except BrokenProcessPool:
        raise ValueError(
            "a tokenizing process was killed, probably because memory ran out; free some"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: Encoder  # set in each process of the pool


def _init_worker(encoder: Encoder, lock: TextIO, parent: int) -> None:
    global _encoder
    _encoder = encoder
    # otherwise this process would still hold the lock after the parent is killed
    lock.close()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before prctl was called
            os._exit(1)
    # each process has one core; threads of the library would only compete for it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C


def _encode_chunk(chunk: list) -> list[Encoded]:
    return [_encoder(where, record) for where, record in chunk]
