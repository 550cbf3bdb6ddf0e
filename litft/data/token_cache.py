"""Files tokenized once: in parallel, into a cache that every later run, resumed or not, only maps into memory.

It lies under $XDG_CACHE_HOME/litft (default ~/.cache/litft) and may be deleted whenever no run reads it. An entry's name is
a hash of all that decides its contents: file, tokenizer, template, mask, length limit, this code.
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
from litft.data.digests import cache_folder
from litft.data.encoder import Encoded, Encoder
from litft.data.readers import Records
from litft.data.sources import File, HubSplit
from litft.data.token_store import NAMED, EncodingReport, TokenStore, TokenStoreWriter
from litft.errors import RankError

SKIP = "--data.skip_bad allows a share of bad ones"
CHUNK = 250  # records that a process tokenizes at once; where there are more than eight of these, several do
PR_SET_PDEATHSIG = 1  # of linux/prctl.h: end with the process that forked us
PROCESSES = 16  # at most: one process reads and writes, which is about a sixteenth of the work


def prepare(file: File | HubSplit, encoder: Encoder, allowed: float, timeout: float = math.inf) -> TokenStore:
    """The file's samples, out of the cache or put there; of several processes one works and the others wait.

    allowed: the part of the records that may be bad. timeout: seconds that the others wait for one that makes no progress.
    Raises ValueError that lists the bad records where there are more, and for a wait in vain.
    """
    digest = file.digest()
    folder = cache_folder() / _key(file, digest, encoder)
    store = TokenStore.opened(folder)
    if store is None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with folder.with_suffix(".lock").open("w") as lock:
                _wait(lock, folder.with_suffix(".partial"), file.label, timeout)
                if TokenStore.opened(folder) is None:
                    _write(file, digest, encoder, allowed, folder, lock)
        except OSError as error:
            if error.filename and not str(error.filename).startswith(str(cache_folder())):
                raise
            remedy = "XDG_CACHE_HOME names another place"
            raise ValueError(f"the cache of tokenized data, {folder}: {error.strerror}; {remedy}") from None
        store = TokenStore(folder)
    _check_bad(file.label, store.report, allowed)
    return store


def _wait(lock: TextIO, partial: Path, label: str, timeout: float) -> None:
    """Until no other process holds the lock, or the one that does writes nothing any more."""
    seen, since = None, time.monotonic()
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        if seen is None:
            print(f"another process is tokenizing {label}; waiting for it", file=sys.stderr, flush=True)
        now = sum(path.stat().st_size for path in partial.glob("tokens.bin"))
        if now != seen:
            seen, since = now, time.monotonic()
        if time.monotonic() - since > timeout:
            reason = f"another process is tokenizing {label}, and has written nothing for {timeout:.0f} s (--timeout)"
            raise RankError(f"{reason}; end it, or raise --timeout")
        time.sleep(0.05)


def _key(file: File | HubSplit, digest: str, encoder: Encoder) -> str:
    """What decides the samples, hashed."""
    parts = (repr(file), digest, encoder.digest, _code())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@lru_cache
def _code() -> str:
    """The version of everything between a record and its tokens."""
    here = Path(__file__).parent
    ours = sorted(here.glob("*.py"))
    theirs = [f"{name} {version(name)}" for name in ("jinja2", "tokenizers", "sentencepiece")]
    return hashlib.sha256(b"".join([path.read_bytes() for path in ours]) + repr(theirs).encode()).hexdigest()


def _write(file: File | HubSplit, digest: str, encoder: Encoder, allowed: float, folder: Path, lock: TextIO) -> None:
    """Fill the cache's entry, under its name only when complete."""
    partial = folder.with_suffix(".partial")
    for left in (partial, folder):  # of a process that was killed, or damaged: the lock is ours
        shutil.rmtree(left, ignore_errors=True)
    writer = TokenStoreWriter(partial, encoder.tokenizer.special_ids)
    try:
        with tqdm(desc=f"tokenizing {Path(file.name).name}", unit=" records", delay=3) as bar:
            for encoded in encode(file.records(), encoder, lock):
                writer.add(encoded)
                bar.update()
                if writer.report.bad[0] == NAMED and not allowed:  # enough to mend at once
                    raise ValueError("\n".join(writer.report.bad[1]) + f"\nreading {file.label} ended here; {SKIP}")
        _check_bad(file.label, writer.report, allowed)
        if file.digest() != digest:
            raise ValueError(f"{file.label} was changed while it was read; start again when it is whole")
        writer.close()
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _check_bad(name: str, report: EncodingReport, allowed: float) -> None:
    count, first = report.bad
    if count > allowed * report.records:
        more = f"\nand {count - len(first):,} more" if count > len(first) else ""
        share = f"\n{count:,} of {report.records:,} records of {name} are bad; {SKIP}" if count > 1 or allowed else ""
        raise ValueError("\n".join(first) + more + share)


def encode(records: Records, encoder: Encoder, lock: TextIO) -> Iterator[Encoded]:
    """What becomes of each record, in order; many records are shared out among processes."""
    chunks = iter(lambda: list(islice(records, CHUNK)), [])
    first = list(islice(chunks, 9))
    workers = min(cores(), PROCESSES)
    if len(first) < 9 or workers == 1:
        yield from (encoder(where, record) for chunk in chain(first, chunks) for where, record in chunk)
    else:
        yield from _in_parallel(chain(first, chunks), encoder, workers, lock)


def _in_parallel(chunks: Iterable[list], encoder: Encoder, workers: int, lock: TextIO) -> Iterator[Encoded]:
    # forked: the tokenizer need not travel, and the script that started us need not be run again
    pool = ProcessPoolExecutor(workers, get_context("fork"), _begin, (encoder, lock, os.getpid()))
    try:
        waiting = deque(pool.submit(_encode_chunk, chunk) for chunk in islice(chunks, 3 * workers))
        while waiting:
            yield from waiting.popleft().result()
            waiting.extend(pool.submit(_encode_chunk, chunk) for chunk in islice(chunks, 1))
    except BrokenProcessPool:
        raise ValueError(
            "a process that tokenizes was killed, as the system does where memory runs out; free some"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: Encoder  # of a process of the pool


def _begin(encoder: Encoder, lock: TextIO, parent: int) -> None:
    global _encoder
    _encoder = encoder
    lock.close()  # or a killed run would leave it with us
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has died before it could be said
            os._exit(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first process's to answer


def _encode_chunk(chunk: list) -> list[Encoded]:
    return [_encoder(where, record) for where, record in chunk]
