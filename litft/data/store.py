"""Tokenized samples on disk: written once, mapped into memory by every process, read one at a time.

A folder holds tokens.bin, the samples one behind the other, an index of four arrays, and report.json, which is written
last. Samples may be more than memory holds: only the index is loaded.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from litft.data.samples import IDS, LEARNED, Encoded, Sample, to_sample

NAMED = 10  # records of a kind that a report names, besides their count


@dataclass
class Report:
    """What became of a file's records."""

    records: int = 0
    samples: int = 0
    tokens: int = 0  # fed to the network
    supervised: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    notes: dict[str, list] = field(default_factory=dict)  # what happened: [how often, the first places]
    bad: list = field(default_factory=lambda: [0, []])  # [how many, the first messages]
    ends: list[int] = field(default_factory=list)  # tokens that close answers
    special: list[int] = field(default_factory=list)  # special tokens that occur
    largest: list = field(default_factory=lambda: [-1, ""])  # the largest token id, and where
    content: str = ""  # the hash of all samples

    def add(self, encoded: Encoded) -> None:
        """Count one record."""
        self.records += 1
        if encoded.error is not None:
            _count(self.bad, encoded.error)
            return
        self.formats[encoded.form] = self.formats.get(encoded.form, 0) + 1
        for note in encoded.notes:
            _count(self.notes.setdefault(note, [0, []]), encoded.where)


def _count(entry: list, name: str) -> None:
    entry[0] += 1
    if len(entry[1]) < NAMED:
        entry[1].append(name)


class Writer:
    """Fills a folder with samples; `close` makes it one that `Store` opens."""

    def __init__(self, folder: Path, special_ids: set[int]) -> None:
        folder.mkdir(parents=True)
        self.folder, self.special = folder, np.array(sorted(special_ids), np.uint32)
        self.report, self._file, self._hash = Report(), (folder / "tokens.bin").open("wb"), hashlib.sha256()
        self._lengths: list[int] = []
        self._supervised: list[int] = []
        self._units: list[int] = []
        self._digests: list[int] = []
        self._unit, self._ends, self._found = 0, set(), set()

    def add(self, encoded: Encoded) -> None:
        """Append a record's samples. What belongs together is one unit, and goes into one split."""
        self.report.add(encoded)
        self._ends |= encoded.ends
        for number, kept in enumerate(encoded.samples):
            data, ids = kept.tobytes(), kept & IDS
            self._file.write(data)
            self._hash.update(len(kept).to_bytes(8, "little") + data)
            self._lengths.append(len(kept))
            self._supervised.append(int(np.count_nonzero(kept[1:] & LEARNED)))  # the first is never a target
            self._unit += number > 0 and not encoded.whole
            self._units.append(self._unit)
            self._digests.append(int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little"))
            self._found.update(np.intersect1d(ids, self.special).tolist())
            if (largest := int(ids.max())) > self.report.largest[0]:
                self.report.largest = [largest, encoded.where]
        self._unit += bool(encoded.samples)

    def close(self) -> None:
        """Write the index and the report."""
        self._file.close()
        offsets = np.concatenate(([0], np.cumsum(np.array(self._lengths, np.int64))))
        arrays = {"supervised": np.int32, "units": np.int64, "digests": np.uint64}
        np.save(self.folder / "offsets.npy", offsets.astype(np.int64))
        for name, kind in arrays.items():
            np.save(self.folder / f"{name}.npy", np.array(getattr(self, f"_{name}"), kind))
        self.report.samples, self.report.supervised = len(self._lengths), sum(self._supervised)
        self.report.tokens = int(offsets[-1]) - len(self._lengths)
        self.report.ends, self.report.special = sorted(map(int, self._ends)), sorted(self._found)
        self.report.content = self._hash.hexdigest()
        (self.folder / "report.json").write_text(json.dumps(asdict(self.report)), "utf-8")


class Store:
    """A written folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.report = Report(**json.loads((folder / "report.json").read_text("utf-8")))
        self.offsets, self.supervised, self.units, self.digests = (
            np.load(folder / f"{name}.npy") for name in ("offsets", "supervised", "units", "digests")
        )

    @classmethod
    def opened(cls, folder: Path) -> "Store | None":
        """The store of a folder; None where it holds none, or not all of one."""
        try:
            store = cls(folder)
            count, size = store.report.samples, (folder / "tokens.bin").stat().st_size
            whole = size == 4 * store.offsets[-1] and len(store.offsets) == count + 1
            return store if whole and all(len(a) == count for a in (store.supervised, store.units, store.digests)) else None
        except (OSError, ValueError, TypeError, EOFError, IndexError):
            return None

    @cached_property
    def _tokens(self) -> np.ndarray:
        path = self.folder / "tokens.bin"
        return np.memmap(path, np.uint32, "r") if self.offsets[-1] else np.zeros(0, np.uint32)

    def sample(self, index: int) -> Sample:
        """Read one."""
        return to_sample(np.array(self._tokens[self.offsets[index] : self.offsets[index + 1]]))


class Samples(Sequence):
    """Some samples of some stores, read when they are asked for."""

    def __init__(self, stores: list[Store], which: np.ndarray, chosen: np.ndarray) -> None:
        self.stores, self.which, self.chosen = stores, which, chosen  # sample i is number chosen[i] of stores[which[i]]

    @classmethod
    def of(cls, parts: list[tuple[Store, np.ndarray]]) -> "Samples":
        """Of each store the samples of these numbers."""
        which = [np.full(len(chosen), number, np.int16) for number, (_, chosen) in enumerate(parts)]
        chosen = [numbers for _, numbers in parts]
        return cls(
            [s for s, _ in parts], *(np.concatenate([np.zeros(0, np.int64), *p]).astype(int) for p in (which, chosen))
        )

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def sizes(self) -> list[int]:
        """How many are of each store."""
        return np.bincount(self.which, minlength=len(self.stores)).tolist()

    def __getitem__(self, index: Any) -> "Sample | Samples":
        if isinstance(index, slice):
            return Samples(self.stores, self.which[index], self.chosen[index])
        return self.stores[self.which[index]].sample(int(self.chosen[index]))

    def _gather(self, values: Callable[[Store], np.ndarray]) -> np.ndarray:
        """One value a sample, out of the stores' own arrays."""
        tables = [values(store) for store in self.stores]
        found = np.zeros(len(self), tables[0].dtype if tables else np.int64)
        for number, table in enumerate(tables):
            mine = self.which == number
            found[mine] = table[self.chosen[mine]]
        return found

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each that are fed to the network."""
        return self._gather(lambda store: np.diff(store.offsets) - 1)

    @cached_property
    def supervised(self) -> np.ndarray:
        """Tokens of each that the loss counts."""
        return self._gather(lambda store: store.supervised)

    @cached_property
    def digests(self) -> np.ndarray:
        """A hash of each."""
        return self._gather(lambda store: store.digests)
