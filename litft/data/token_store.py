"""Tokenized samples on disk: written once, mapped into memory by every process, read one at a time.

A folder contains tokens.bin with the concatenated entries, one .npy file for each array of the
index, and report.json, which is written last. An entry is an example, or a span of a text. Samples
of a text are windows over neighbouring spans, made once the split is known. Only the index is
loaded, so the tokens may exceed memory.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, overload

import numpy as np
from xxhash import xxh3_64

from litft.data.digests import file_hash, hash64
from litft.data.encoded import Encoded
from litft.data.encoding_report import EncodingReport
from litft.data.review import Finding, FoundRecord, Review
from litft.data.sample import ID_MASK, SUPERVISED, PromptRecord, Sample, to_sample
from litft.data.similarity import NUM_HASHES

# an entry's kind: an example; a text or its first span; a later span of it
EXAMPLE, TEXT, CONTINUATION = range(3)
# of prompts: what reward functions get, one JSON text after the other, and where each begins
COLUMNS = "columns.bin"
COLUMN_OFFSETS = "column_offsets.npy"
# the index: one value for each entry
ARRAYS = {
    "supervised": np.int32,
    "units": np.uint64,
    "turns": np.int32,
    "digests": np.uint64,
    "kinds": np.uint8,
}
ARRAYS |= {"first_sizes": np.int32, "labels": np.int8}  # see SampleIndex
# of the records that are compared with others: their signatures, see `similarity`; the hashes of
# their content; and of each entry, the row of its record in both, or NO_ROW
SIGNATURES = "signatures.bin"
CONTENTS = "contents.npy"
ARRAYS |= {"rows": np.int64}
NO_ROW = -1
# every note on every record, a JSON object a line: report.json counts them, and names the first
FINDINGS = "findings.jsonl"
NO_LABEL = -1
# bytes; larger tokens.bin are not hashed when a store is opened, which would take seconds
MAX_HASHED = 1 << 30
# the least share of the records of token ids that end with a token, if answers end with it
END_SHARE = 0.1


class TokenStoreWriter:
    """Writes samples to a folder; after `close`, `TokenStore` can open it."""

    def __init__(self, folder: Path, counted_ids: set[int]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.counted_ids = np.array(sorted(counted_ids), np.uint32)
        self.report = EncodingReport()
        self._file = (folder / "tokens.bin").open("wb")
        self._hash = hashlib.sha256()
        self._lengths: list[int] = []
        self._supervised: list[int] = []
        self._units: list[int] = []
        self._digests: list[int] = []
        self._kinds: list[int] = []
        self._turns: list[int] = []
        self._first_sizes: list[int] = []
        self._labels: list[int] = []
        self._ends = set()
        self._used_special = set()
        self._last_tokens: Counter[int] = Counter()  # of records of token ids
        self._tokens_hash = xxh3_64()
        self._columns: list[bytes] = []  # of prompts
        self._review = Review()
        self._signatures = (folder / SIGNATURES).open("wb")
        self._contents: list[int] = []
        self._rows: list[int] = []
        self._findings = (folder / FINDINGS).open("w", encoding="utf-8")

    def add(self, encoded: Encoded) -> None:
        """Append a record's samples. Samples with equal units go into the same split."""
        self.report.add(encoded)
        self._write_notes(encoded)
        self._ends |= encoded.ends
        if encoded.last_token is not None:
            self._last_tokens[encoded.last_token] += 1
        self._first_sizes += encoded.first_sizes or [0] * len(encoded.samples)
        self._columns += encoded.columns
        for columns in encoded.columns:
            self._hash.update(columns)
        row = NO_ROW
        if encoded.facts is not None and encoded.signatures is not None:
            row = len(self._contents)
            self._contents.append(encoded.facts.content)
            self._signatures.write(encoded.signatures.tobytes())
            self._review.add(encoded.where, encoded.facts)
        self._rows += [row] * len(encoded.samples)
        self._labels += map(int, encoded.labels or [NO_LABEL] * len(encoded.samples))
        # others have none, and keep their hash
        for fact in (*encoded.first_sizes, *encoded.labels):
            self._hash.update(int(fact).to_bytes(8, "little"))
        for number, (stored, unit, turn) in enumerate(
            zip(encoded.samples, encoded.units, encoded.turns, strict=True)
        ):
            if encoded.text:
                kind = TEXT if number == 0 else CONTINUATION
            else:
                kind = EXAMPLE
            data = stored.tobytes()
            ids = stored & ID_MASK
            self._file.write(data)
            self._tokens_hash.update(data)
            # with its length: other samples of the same tokens in a row have another hash
            self._hash.update(len(stored).to_bytes(8, "little") + data)
            self._lengths.append(len(stored))
            # the first token of an example or a text is never a target
            first = 0 if kind == CONTINUATION else 1
            # nor that of a rejected answer
            self._supervised.append(int(np.count_nonzero(stored[first:] & SUPERVISED)))
            self._units.append(unit)
            self._turns.append(turn)
            self._kinds.append(kind)
            self._digests.append(hash64(data))
            self._used_special.update(np.intersect1d(ids, self.counted_ids).tolist())
            largest = int(ids.max())
            if largest > self.report.largest[0]:
                self.report.largest = [largest, encoded.where]

    def _write_notes(self, encoded: Encoded) -> None:
        if encoded.error is not None:
            place, _, reason = encoded.error.partition(": ")
            self._write_finding(Finding(f"bad: {reason}", [FoundRecord(place)]))
        for note in encoded.notes:
            self._write_finding(Finding(note, [FoundRecord(encoded.where)]))

    def _write_finding(self, finding: Finding) -> None:
        for record in finding.records:
            line = {
                "finding": finding.note,
                "record": record.place,
                "earlier": record.earlier,
            }
            self._findings.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _usual_last_tokens(self) -> set[int]:
        """Return the tokens that end records of token ids, but for those of few records: a length
        limit has cut these."""
        least = END_SHARE * self._last_tokens.total()
        return {token for token, count in self._last_tokens.items() if count >= least}

    def close(self) -> None:
        """Write the index and the report."""
        self._file.close()
        self._signatures.close()
        offsets = self._write_index()
        self._write_columns()
        report = self.report
        # The last token of each document is a target only, never an input. A later span continues
        # the text before it, whose last token is then an input; a pair has two documents.
        num_documents = sum(kind != CONTINUATION for kind in self._kinds)
        num_second_documents = sum(size > 0 for size in self._first_sizes)
        self._ends |= self._usual_last_tokens()
        report.samples = len(self._lengths)
        report.supervised = sum(self._supervised)
        report.tokens = int(offsets[-1]) - num_documents - num_second_documents
        report.ends = sorted(map(int, self._ends))
        report.special = sorted(self._used_special)
        report.content = self._hash.hexdigest()
        of_records = _read_signatures(self.folder)[:, 0]
        findings = list(self._review.findings(of_records))
        report.add_findings(findings)
        for finding in findings:
            self._write_finding(finding)
        self._findings.close()

        # the hashes of the other files; report.json comes last, and makes the store complete
        report.hashes = {"tokens.bin": self._tokens_hash.hexdigest()}
        for path in sorted(self.folder.iterdir()):
            if path.name != "tokens.bin":
                report.hashes[path.name] = file_hash(path)
        (self.folder / "report.json").write_text(json.dumps(asdict(report)), "utf-8")

    def _write_index(self) -> np.ndarray:
        """Write the arrays of the index, and return the offsets of the entries."""
        lengths = np.array(self._lengths, np.int64)
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        np.save(self.folder / "offsets.npy", offsets)
        for name, dtype in ARRAYS.items():
            values = np.array(getattr(self, f"_{name}"), dtype)
            np.save(self.folder / f"{name}.npy", values)
        np.save(self.folder / CONTENTS, np.array(self._contents, np.uint64))
        return offsets

    def _write_columns(self) -> None:
        """Write what reward functions get of each prompt, if there are prompts."""
        if not self._columns:
            return
        sizes = [len(columns) for columns in self._columns]
        np.save(self.folder / COLUMN_OFFSETS, np.concatenate(([0], np.cumsum(sizes))))
        (self.folder / COLUMNS).write_bytes(b"".join(self._columns))


def _read_signatures(folder: Path) -> np.ndarray:
    """Return the signatures of a store's records, (N, 2, 128) uint32: of the whole record, and of
    its prompt."""
    path = folder / SIGNATURES
    # numpy cannot map an empty file
    if path.stat().st_size:
        stored = np.memmap(path, np.uint32, "r")
    else:
        stored = np.zeros(0, np.uint32)
    return stored.reshape(-1, 2, NUM_HASHES)


class TokenStore:
    """Reads a folder that `TokenStoreWriter` has written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.report = EncodingReport(
            **json.loads((folder / "report.json").read_text("utf-8"))
        )
        self.offsets = np.load(folder / "offsets.npy")
        arrays = (np.load(folder / f"{name}.npy") for name in ARRAYS)
        (
            self.supervised,
            self.units,
            self.turns,
            self.digests,
            self.kinds,
            self.first_sizes,
            self.labels,
            self.rows,
        ) = arrays

    @classmethod
    def open_or_none(cls, folder: Path) -> "TokenStore | None":
        """Open the store in a folder; return None if it is missing, incomplete or damaged."""
        try:
            store = cls(folder)

            # a token has 4 bytes; of a store that was copied in part, the files do not fit together
            count = store.report.samples
            size = (folder / "tokens.bin").stat().st_size
            complete = size == 4 * store.offsets[-1] and len(store.offsets) == count + 1
            arrays = (getattr(store, name) for name in ARRAYS)
            complete = complete and all(len(array) == count for array in arrays)
            if complete and store._is_unchanged():
                return store
            return None
        except (OSError, ValueError, TypeError, EOFError, IndexError):
            return None

    def _is_unchanged(self) -> bool:
        """Return whether the files have the hashes with which they were written."""
        for name, written in self.report.hashes.items():
            path = self.folder / name
            if path.stat().st_size > MAX_HASHED:
                continue
            if file_hash(path) != written:
                return False
        return True

    @cached_property
    def _tokens(self) -> np.ndarray:
        path = self.folder / "tokens.bin"
        # numpy cannot map an empty file
        if self.offsets[-1]:
            return np.memmap(path, np.uint32, "r")
        return np.zeros(0, np.uint32)

    def read(self, start: int, size: int) -> np.ndarray:
        """Return `size` stored tokens with their flags from offset `start`, (size,) uint32."""
        return np.array(self._tokens[start : start + size])

    @cached_property
    def signatures(self) -> np.ndarray:
        """The signatures of the records that are compared with others, (N, 2, 128) uint32: of the
        whole record, and of its prompt; `rows` has each entry's row."""
        return _read_signatures(self.folder)

    def findings(self) -> Iterator[dict[str, str]]:
        """Yield every finding on a record: what was found, the place of the record, and that of the
        earlier record that it repeats, or an empty text."""
        with (self.folder / FINDINGS).open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)

    @cached_property
    def contents(self) -> np.ndarray:
        """The hashes of the content of these records, (N,) uint64."""
        return np.load(self.folder / CONTENTS)

    @cached_property
    def _column_offsets(self) -> np.ndarray:
        return np.load(self.folder / COLUMN_OFFSETS)

    def prompt(self, entry: int) -> PromptRecord | None:
        """Return the record of a prompt; None for other entries."""
        if COLUMNS not in self.report.hashes:
            return None
        start, end = self._column_offsets[entry : entry + 2]
        with (self.folder / COLUMNS).open("rb") as file:
            file.seek(start)
            return PromptRecord(*json.loads(file.read(end - start)))

    def index_samples(self, entries: np.ndarray, limit: int) -> "SampleIndex":
        """Return the samples of these entries, given in ascending order.

        An example is one sample. A run of neighbouring spans of a text is divided into windows of
        at most `limit` input tokens, such that each token but the first of the run is a target
        once.
        """
        # runs: one example each, or neighbouring spans of one text
        # the prepended -2 makes the first entry follow nothing
        follows = np.diff(entries, prepend=-2) == 1
        is_first = ~((self.kinds[entries] == CONTINUATION) & follows)
        firsts = entries[is_first]
        # a run ends where the next one begins; the first
        # mark, rolled to the end, closes the last run
        lasts = entries[np.roll(is_first, -1)]
        begins = self.offsets[firsts]
        ends = self.offsets[lasts + 1]
        is_text = self.kinds[firsts] != EXAMPLE

        # windows: an example is one, with all of its tokens
        num_text_windows = -(-(ends - begins - 1) // limit)
        num_windows = np.where(is_text, num_text_windows, 1)
        run = np.repeat(np.arange(len(firsts)), num_windows)  # of each window
        windows_before = np.cumsum(num_windows) - num_windows  # in earlier runs
        number = np.arange(len(run)) - windows_before[run]  # of each window within its run
        of_text = is_text[run]
        # neighbouring windows share one token, the last
        # target of one and the first input of the next
        starts = begins[run] + number * limit * of_text
        remaining = ends[run] - starts
        sizes = np.where(of_text, np.minimum(limit + 1, remaining), remaining)
        entry = firsts[run]
        return SampleIndex(
            starts=starts,
            sizes=sizes,
            supervised=np.where(of_text, sizes - 1, self.supervised[entry]),
            digests=self.digests[entry],
            # 0 for a window of a text: `Samples.digests` computes its hash when it is needed
            units=np.where(of_text, np.uint64(0), self.units[entry]),
            turns=self.turns[entry],
            first_sizes=self.first_sizes[entry],
            labels=self.labels[entry],
            entries=entry,
        )


class SampleIndex(NamedTuple):
    """The samples of a store: arrays with one value for each."""

    starts: np.ndarray  # offset of its first token
    sizes: np.ndarray  # number of its tokens
    supervised: np.ndarray  # number of its target tokens
    # hash of an example's tokens; unused for a window of a text
    digests: np.ndarray
    # hash of its record's content; 0 for a window of a text
    units: np.ndarray
    # 2 * the message index of its last complete answer (or -1), + 1 if a partial answer follows
    turns: np.ndarray
    # number of tokens of the first of its two documents; 0: it has one
    first_sizes: np.ndarray
    # 1 for a desirable answer, 0 for an undesirable one, or NO_LABEL
    labels: np.ndarray
    entries: np.ndarray  # number of its entry, of a text the first one


class Samples(Sequence[Sample]):
    """Samples of one or more stores, read from disk on access."""

    def __init__(
        self, stores: list[TokenStore], store_numbers: np.ndarray, sample_index: SampleIndex
    ) -> None:
        # sample i is sample_index[i] of stores[store_numbers[i]]
        self.stores = stores
        self.store_numbers = store_numbers
        self.sample_index = sample_index

    @classmethod
    def of(cls, parts: list[tuple[TokenStore, np.ndarray]], limit: int) -> "Samples":
        """Return the samples of these entries of each store; windows of texts have at most `limit`
        input tokens."""
        indexes = [store.index_samples(entries, limit) for store, entries in parts]
        store_numbers = []
        for number, index in enumerate(indexes):
            store_numbers.append(np.full(len(index.starts), number, np.int64))
        joined = SampleIndex(*map(np.concatenate, zip(*indexes, strict=True)))
        stores = [store for store, _ in parts]
        return cls(stores, np.concatenate(store_numbers), joined)

    def followed_by(self, other: "Samples") -> "Samples":
        """Return these samples and then the others, each with its stores."""
        joined = map(
            np.concatenate, zip(self.sample_index, other.sample_index, strict=True)
        )
        numbers = np.concatenate(
            (self.store_numbers, other.store_numbers + len(self.stores))
        )
        return Samples([*self.stores, *other.stores], numbers, SampleIndex(*joined))

    def __len__(self) -> int:
        return len(self.store_numbers)

    @property
    def sizes(self) -> list[int]:
        """The number of samples of each store."""
        # with 0 for a store of which no sample is left
        return np.bincount(self.store_numbers, minlength=len(self.stores)).tolist()

    @overload
    def __getitem__(self, key: int) -> Sample: ...

    @overload
    def __getitem__(self, key: slice) -> "Samples": ...

    def __getitem__(self, key: int | slice) -> "Sample | Samples":
        if isinstance(key, slice):
            index = SampleIndex(*(array[key] for array in self.sample_index))
            return Samples(self.stores, self.store_numbers[key], index)
        return self._sample(key)

    def _sample(self, number: int) -> Sample:
        index = self.sample_index
        label = int(index.labels[number])
        desirable = None if label == NO_LABEL else bool(label)
        sample = to_sample(self._read(number), int(index.first_sizes[number]), desirable)
        prompt = self.stores[self.store_numbers[number]].prompt(int(index.entries[number]))
        if prompt is None:
            return sample
        return replace(sample, prompt=prompt)

    def mismatched(self, i: int, j: int, limit: int) -> Sample:
        """Return the prompt of sample i with the answer of sample j, cut to `limit` input
        tokens."""
        prompt = self._read(i)
        answer = self._read(j)

        # the first target is where the prompt ends
        starts = [
            int(np.flatnonzero(stored & SUPERVISED)[0]) for stored in (prompt, answer)
        ]
        return to_sample(
            np.concatenate((prompt[: starts[0]], answer[starts[1] :]))[: limit + 1],
            desirable=True,
        )

    def _read(self, i: int) -> np.ndarray:
        return self.stores[self.store_numbers[i]].read(
            int(self.sample_index.starts[i]), int(self.sample_index.sizes[i])
        )

    def copies(self) -> tuple[int, int]:
        """Return how many samples are copies of others, token for token, and how often the most
        frequent sample occurs. Windows of texts do not count."""
        is_record = self.sample_index.units != 0
        counts = np.unique(self.sample_index.digests[is_record], return_counts=True)[1]
        return int((counts - 1).sum()), int(counts.max(initial=0))

    def prompt_signatures(self) -> np.ndarray:
        """Return the signatures of the prompts of these samples' records, (N, 128) uint32: see
        `similarity`. Records that are not compared have none."""
        found = [np.zeros((0, NUM_HASHES), np.uint32)]
        for number, store in enumerate(self.stores):
            entries = self.sample_index.entries[self.store_numbers == number]
            rows = np.unique(store.rows[entries])
            found.append(store.signatures[rows[rows != NO_ROW], 1])
        return np.concatenate(found)

    @property
    def lengths(self) -> np.ndarray:
        """The number of input tokens of each sample."""
        return self.sample_index.sizes - 1 - (self.sample_index.first_sizes > 0)

    def document_lengths(self, indices: Sequence[int]) -> np.ndarray:
        """Return the number of input tokens of each document of these samples."""
        lengths = self.lengths[indices]
        first = self.sample_index.first_sizes[indices]
        # a sample with a single document has 0 in the first column, which is removed
        lengths = np.stack(
            (np.maximum(first - 1, 0), lengths - np.maximum(first - 1, 0)), axis=1
        ).ravel()
        return lengths[lengths > 0]

    @property
    def supervised(self) -> np.ndarray:
        """The number of target tokens of each sample."""
        return self.sample_index.supervised

    @property
    def digests(self) -> np.ndarray:
        """A hash of the tokens of each sample; windows of texts are read for it."""
        digests = self.sample_index.digests.copy()
        for i in np.flatnonzero(self.sample_index.units == 0).tolist():
            digests[i] = hash64(self._read(i).tobytes())
        return digests

    @property
    def names(self) -> list[tuple[int, int, int]]:
        """For each sample (unit, turn, number of earlier samples with the same unit and turn), see
        `SampleIndex`.

        Names are the same with every template and tokenizer, unless the length limit cuts another
        answer. The unit of texts is 0.
        """
        seen: Counter[tuple[int, int]] = Counter()
        names = []
        for name in zip(
            self.sample_index.units.tolist(), self.sample_index.turns.tolist(), strict=True
        ):
            names.append((*name, seen[name]))
            seen[name] += 1
        return names

    @property
    def identity(self) -> bytes:
        """The samples of the stores and their order, as bytes to be hashed."""
        arrays = (self.store_numbers, self.sample_index.starts, self.sample_index.sizes)
        return b"".join(array.tobytes() for array in arrays)
