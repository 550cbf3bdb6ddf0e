"""Tokenized samples on disk: written once, mapped into memory by every process, read one at a time.

A folder holds tokens.bin, its entries one behind the other, an index of five arrays, and report.json, which is written
last. An entry is an example, or a span of a text, over which samples are laid when it is known on which side of the split
each lies. They may be more than memory holds: only the index is loaded.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from litft.data.encoder import IDS, LEARNED, Encoded, Sample, hashed, to_sample

EXAMPLE, TEXT, FOLLOWS = range(3)  # an entry's kind: as it is; a text, or its first span; a further span
# a value of each entry
ARRAYS = {"supervised": np.int32, "units": np.uint64, "turns": np.int32, "digests": np.uint64, "kinds": np.uint8}
NAMED = 10  # records of a kind that a report names, besides their count


@dataclass
class EncodingReport:
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


class TokenStoreWriter:
    """Fills a folder with samples; `close` makes it one that `TokenStore` opens."""

    def __init__(self, folder: Path, special_ids: set[int]) -> None:
        folder.mkdir(parents=True)
        self.folder, self.special = folder, np.array(sorted(special_ids), np.uint32)
        self.report, self._file, self._hash = EncodingReport(), (folder / "tokens.bin").open("wb"), hashlib.sha256()
        self._lengths: list[int] = []
        self._supervised: list[int] = []
        self._units: list[int] = []
        self._digests: list[int] = []
        self._kinds: list[int] = []
        self._turns: list[int] = []
        self._ends, self._found = set(), set()

    def add(self, encoded: Encoded) -> None:
        """Append a record's samples. Those of equal units go into one split."""
        self.report.add(encoded)
        self._ends |= encoded.ends
        for number, (kept, unit, turn) in enumerate(zip(encoded.samples, encoded.units, encoded.turns, strict=True)):
            kind = (TEXT if number == 0 else FOLLOWS) if encoded.text else EXAMPLE
            data, ids = kept.tobytes(), kept & IDS
            self._file.write(data)
            self._hash.update(len(kept).to_bytes(8, "little") + data)
            self._lengths.append(len(kept))
            first = 0 if kind == FOLLOWS else 1  # which is never a target
            self._supervised.append(int(np.count_nonzero(kept[first:] & LEARNED)))
            self._units.append(unit)
            self._turns.append(turn)
            self._kinds.append(kind)
            self._digests.append(hashed(data))
            self._found.update(np.intersect1d(ids, self.special).tolist())
            if (largest := int(ids.max())) > self.report.largest[0]:
                self.report.largest = [largest, encoded.where]

    def close(self) -> None:
        """Write the index and the report."""
        self._file.close()
        offsets = np.concatenate(([0], np.cumsum(np.array(self._lengths, np.int64))))
        np.save(self.folder / "offsets.npy", offsets.astype(np.int64))
        for name, kind in ARRAYS.items():
            np.save(self.folder / f"{name}.npy", np.array(getattr(self, f"_{name}"), kind))
        self.report.samples, self.report.supervised = len(self._lengths), sum(self._supervised)
        self.report.tokens = int(offsets[-1]) - sum(kind != FOLLOWS for kind in self._kinds)
        self.report.ends, self.report.special = sorted(map(int, self._ends)), sorted(self._found)
        self.report.content = self._hash.hexdigest()
        (self.folder / "report.json").write_text(json.dumps(asdict(self.report)), "utf-8")


class TokenStore:
    """A written folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.report = EncodingReport(**json.loads((folder / "report.json").read_text("utf-8")))
        self.offsets = np.load(folder / "offsets.npy")
        arrays = (np.load(folder / f"{name}.npy") for name in ARRAYS)
        self.supervised, self.units, self.turns, self.digests, self.kinds = arrays

    @classmethod
    def opened(cls, folder: Path) -> "TokenStore | None":
        """The store of a folder; None where it holds none, or not all of one."""
        try:
            store = cls(folder)
            count, size = store.report.samples, (folder / "tokens.bin").stat().st_size
            whole = size == 4 * store.offsets[-1] and len(store.offsets) == count + 1
            arrays = (getattr(store, name) for name in ARRAYS)
            return store if whole and all(len(array) == count for array in arrays) else None
        except (OSError, ValueError, TypeError, EOFError, IndexError):
            return None

    @cached_property
    def _tokens(self) -> np.ndarray:
        path = self.folder / "tokens.bin"
        return np.memmap(path, np.uint32, "r") if self.offsets[-1] else np.zeros(0, np.uint32)

    def kept(self, start: int, size: int) -> np.ndarray:
        """The stored tokens of the sample at this offset, with their flags, (size,), uint32."""
        return np.array(self._tokens[start : start + size])

    def laid_out(self, chosen: np.ndarray, limit: int) -> "SampleIndex":
        """The samples of these entries, in ascending order: an example as it is, of neighbouring spans of a text windows.

        A window feeds `limit` tokens at most; each token of a run of neighbours is a target once, but for the first.
        """
        opens = (self.kinds[chosen] != FOLLOWS) | (np.diff(chosen, prepend=-2) != 1)
        heads, lasts = np.flatnonzero(opens), np.flatnonzero(np.roll(opens, -1))
        begins, ends = self.offsets[chosen[heads]], self.offsets[chosen[lasts] + 1]
        text = self.kinds[chosen[heads]] != EXAMPLE
        windows = np.where(text, -(-(ends - begins - 1) // limit), 1)
        of = np.repeat(np.arange(len(heads)), windows)
        number = np.arange(len(of)) - np.repeat(np.cumsum(windows) - windows, windows)
        starts = begins[of] + number * limit * text[of]
        sizes = np.where(text[of], np.minimum(limit + 1, ends[of] - starts), ends[of] - starts)
        head = chosen[heads][of]
        supervised = np.where(text[of], sizes - 1, self.supervised[head])
        units = np.where(text[of], np.uint64(0), self.units[head])
        return SampleIndex(starts, sizes, supervised, self.digests[head], units, self.turns[head])


class SampleIndex(NamedTuple):
    """The samples of a store: an array with a value for each."""

    starts: np.ndarray  # offset of its first token
    sizes: np.ndarray  # number of its tokens
    supervised: np.ndarray  # tokens that are learned
    digests: np.ndarray  # hash of an example's tokens; unused for a window of a text
    units: np.ndarray  # hash of its record's content; 0 for a window of a text
    turns: np.ndarray  # twice the message that is its last whole answer, or -1; 1 more where a cut answer follows


class Samples(Sequence):
    """Some samples of some stores, read when they are asked for."""

    def __init__(self, stores: list[TokenStore], which: np.ndarray, places: SampleIndex) -> None:
        self.stores, self.which, self.places = stores, which, places  # sample i lies at places[i] of stores[which[i]]

    @classmethod
    def of(cls, parts: list[tuple[TokenStore, np.ndarray]], limit: int) -> "Samples":
        """Of each store the samples of these entries, a text's of so many tokens at most."""
        places = [store.laid_out(chosen, limit) for store, chosen in parts]
        which = [np.full(len(each.starts), number, np.int64) for number, each in enumerate(places)]
        together = SampleIndex(*(np.concatenate(arrays) for arrays in zip(*places, strict=True)))
        return cls([store for store, _ in parts], np.concatenate(which), together)

    def __len__(self) -> int:
        return len(self.which)

    @property
    def sizes(self) -> list[int]:
        """How many are of each store."""
        return np.bincount(self.which, minlength=len(self.stores)).tolist()

    def __getitem__(self, index: Any) -> "Sample | Samples":
        if isinstance(index, slice):
            return Samples(self.stores, self.which[index], SampleIndex(*(array[index] for array in self.places)))
        return to_sample(self._kept(index))

    def _kept(self, index: int) -> np.ndarray:
        return self.stores[self.which[index]].kept(int(self.places.starts[index]), int(self.places.sizes[index]))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each that are fed to the network."""
        return self.places.sizes - 1

    @property
    def supervised(self) -> np.ndarray:
        """Tokens of each that the loss counts."""
        return self.places.supervised

    @property
    def digests(self) -> np.ndarray:
        """A hash of each one's tokens; windows of texts are read for it."""
        found = self.places.digests.copy()
        for index in np.flatnonzero(self.places.units == 0):
            found[index] = hashed(self._kept(index).tobytes())
        return found

    @property
    def names(self) -> list[tuple[int, int, int]]:
        """Of each its unit, its turn (which answers it has: see `Places.turns`), and how many came before that have both.

        The same whatever template and tokenizer made the sample, where the same answers are whole and cut. The unit of text
        is 0.
        """
        seen: Counter[tuple[int, int]] = Counter()
        names = []
        for name in zip(self.places.units.tolist(), self.places.turns.tolist(), strict=True):
            names.append((*name, seen[name]))
            seen[name] += 1
        return names

    @property
    def identity(self) -> bytes:
        """Which samples of the stores these are, in which order."""
        return b"".join(array.tobytes() for array in (self.which, self.places.starts, self.places.sizes))
