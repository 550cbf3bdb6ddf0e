"""Files of examples as a stream of records: JSON, JSONL, CSV, TSV, Parquet, text; packed by gzip or zstd.

Nothing is held but the record at hand, so that a file may be larger than memory. An error names file and line or index.
"""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from litft.data.formats import Record, json_type

BLOCK = 1 << 20  # bytes read at once; a text file is given out in records of about this size

Records = Iterator[tuple[str, Record | ValueError]]


def read_records(path: Path) -> Records:
    """The records of a file, each with a label that says where it stands; in a bad one's place what is wrong with it.

    Raises ValueError where nothing behind can be read either.
    """
    suffix, packing = suffixes(existing(path))
    if suffix not in READERS:
        found = suffix or "a file without suffix"
        raise ValueError(f"{path}: cannot read {found}; use {', '.join(READERS)}, or these with .gz or .zst behind")
    found_any = False
    try:
        with PACKED[packing](path) as file:
            for where, record in READERS[suffix](path, file):
                found_any = True
                if not isinstance(record, dict | ValueError):
                    record = ValueError(f"{where}: an example must be an object with fields, found {json_type(record)}")
                yield where, record
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is no whole {packing} file ({error}); get it again") from None
    if not found_any:
        raise ValueError(f"{path} holds no examples; it needs at least one")


def existing(path: Path) -> Path:
    """The same path; ValueError where there is no file."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file of examples in it")
    if not path.is_file():
        raise ValueError(f"{path} does not exist; name a file of examples, or for training a folder with both splits")
    return path


def suffixes(path: Path) -> tuple[str, str]:
    """What a file's name says of it: the format (".jsonl"), and how it is packed (".gz", or nothing)."""
    last = path.suffix.lower()
    if last in PACKED:
        return Path(path.stem).suffix.lower(), last
    return last, ""


class _Zstandard(io.RawIOBase):
    """What a .zst file holds; one that ends within a frame raises EOFError, where the library's own reader is silent."""

    def __init__(self, path: Path) -> None:
        self.library = _library("zstandard", path)
        self.file, self.held = path.open("rb"), b""
        self.frame = self.library.ZstdDecompressor().decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while not self.held:
            block = self.file.read(1 << 14)
            if not block and not self.frame.eof:
                raise EOFError("it ends too early")
            if not block:
                return 0
            self.held = self._unpacked(block)
        count = min(len(buffer), len(self.held))
        buffer[:count], self.held = self.held[:count], self.held[count:]
        return count

    def _unpacked(self, block: bytes) -> bytes:
        pieces = []
        while block:
            if self.frame.eof:  # another frame begins
                self.frame = self.library.ZstdDecompressor().decompressobj()
            try:
                pieces.append(self.frame.decompress(block))
            except self.library.ZstdError as error:
                raise EOFError(str(error)) from None
            block = self.frame.unused_data
        return b"".join(pieces)

    def close(self) -> None:
        self.file.close()
        super().close()


def _zst(path: Path) -> BinaryIO:
    return io.BufferedReader(_Zstandard(path), BLOCK)


def _library(name: str, path: Path) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise ValueError(f"{path}: reading it needs {name}; pip install 'litft[data]'") from None


PACKED: dict[str, Callable[[Path], BinaryIO]] = {"": lambda path: path.open("rb"), ".gz": gzip.open, ".zst": _zst}


def _blocks(path: Path, file: BinaryIO) -> Iterator[str]:
    """A file's text, a block at a time; ValueError where it is no UTF-8."""
    decoder, at = codecs.getincrementaldecoder("utf-8-sig")(), 0
    while block := file.read(BLOCK):
        waiting = len(decoder.getstate()[0])
        yield _decoded(decoder, block, path, at - waiting)
        at += len(block)
    if rest := _decoded(decoder, b"", path, at - len(decoder.getstate()[0]), final=True):
        yield rest


def _decoded(decoder: codecs.IncrementalDecoder, block: bytes, path: Path, at: int, final: bool = False) -> str:
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as error:
        place = f"at byte {at + error.start}"
        raise ValueError(f"{path} is no UTF-8 text ({place}); name a text file, or convert it with iconv") from None


def _lines(path: Path, file: BinaryIO) -> Records:
    """A record a line."""
    for number, line in enumerate(_text_lines(path, file), 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                record = ValueError(f"{where}: no valid JSON ({error}); each line is one object")
            yield where, record


def _text_lines(path: Path, file: BinaryIO) -> Iterator[str]:
    """Lines that end at line feeds, and at nothing else: JSON text may hold other breaks."""
    pieces: list[str] = []
    for block in _blocks(path, file):
        *whole, rest = block.split("\n")
        for line in whole:
            yield "".join((*pieces, line))
            pieces = []
        pieces.append(rest)
    yield "".join(pieces)


_SPACE = re.compile(r"[ \t\r\n]*")


class _Values:
    """JSON values in a file's text, of which no more is held than the value at hand needs."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.blocks, self.decode = path, _blocks(path, file), json.JSONDecoder().raw_decode
        self.text, self.at, self.gone = "", 0, 0  # what is held, how far it is taken, how much was before it

    def more(self) -> bool:
        """Forget what was taken, and read as much again as is left; False at the file's end."""
        self.text, self.gone, self.at = self.text[self.at :], self.gone + self.at, 0
        wanted, found = len(self.text) + 1, []
        while wanted > 0 and (block := next(self.blocks, None)) is not None:
            found.append(block)
            wanted -= len(block)
        self.text += "".join(found)
        return bool(found)

    def mark(self) -> str:
        """The next character that is no space, not taken yet; "" at the end."""
        while True:
            self.at = _SPACE.match(self.text, self.at).end()
            if self.at < len(self.text) or not self.more():
                return self.text[self.at : self.at + 1]

    def take(self) -> Any:
        """The next value; ValueError where there is none."""
        while True:
            try:
                value, end = self.decode(self.text, self.at)
            except json.JSONDecodeError as error:
                at = self.gone + error.pos
                if not self.more():
                    raise self.wrong(error.msg, at) from None
            except (ValueError, RecursionError) as error:  # digits without end, or brackets
                raise self.wrong(str(error)) from None
            else:
                if end < len(self.text) or not self.more():  # a number may go on
                    self.at = min(end, len(self.text))
                    return value

    def wrong(self, message: str, at: int | None = None) -> ValueError:
        """What is wrong at a place of the whole text; None: where the next value begins."""
        at = self.gone + self.at if at is None else at
        with PACKED[suffixes(self.path)[1]](self.path) as file:
            before, left = "", at
            line, column = 1, 1
            for block in _blocks(self.path, file):
                before, left = block[:left], left - len(block)
                line += before.count("\n")
                column = len(before) - before.rfind("\n") if "\n" in before else column + len(before)
                if left <= 0:
                    break
        remedy = "one object a line is .jsonl: rename the file" if message == "Extra data" else "mend it there"
        return ValueError(f"{self.path}, line {line}: no valid JSON ({message}, column {column}); {remedy}")


def _array(path: Path, file: BinaryIO) -> Records:
    """A record an element."""
    values = _Values(path, file)
    if (first := values.mark()) and first != "[":
        value = values.take()
        if values.mark():
            raise values.wrong("Extra data")
        raise ValueError(f"{path}: expected an array of examples, found {json_type(value)}; put [ and ] around it")
    values.at += 1
    index = 0
    while first and values.mark() != "]":
        if index:
            if values.mark() != ",":
                raise values.wrong("Expecting ',' delimiter")
            values.at += 1
            values.mark()
        yield f"{path}, record {index}", values.take()
        index += 1
    values.at += 1
    if values.mark():
        raise values.wrong("Extra data")


def _table(separator: str, path: Path, file: BinaryIO) -> Records:
    """A record a row, below the row of names; cells in quotes may hold line breaks."""
    lines = (line + "\n" for line in _text_lines(path, file))
    limit = csv.field_size_limit(2**31 - 1)  # for texts that are longer than the library's 128 KiB
    try:
        rows = csv.reader(lines, delimiter=separator, strict=True)
        names = next(rows, [])
        if len(set(names)) < len(names):
            raise ValueError(f"{path}, line 1: two columns have the same name; the first line holds the names")
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if len(row) == len(names):
                yield where, dict(zip(names, row, strict=True))
            elif row:
                reason = f"{len(row)} cells below {len(names)} names; put quotes around text with {separator!r}"
                yield where, ValueError(f"{where}: {reason}")
    except csv.Error as error:
        raise ValueError(f"{path}, line {rows.line_num}: no valid table ({error}); mend it there") from None
    finally:
        csv.field_size_limit(limit)


def _parquet(path: Path, file: BinaryIO) -> Records:
    """A record a row."""
    parquet = _library("pyarrow.parquet", path)
    try:
        source = parquet.ParquetFile(file if file.seekable() else io.BytesIO(file.read()))
        index = 0
        for batch in source.iter_batches(batch_size=256):
            for record in batch.to_pylist():
                yield f"{path}, row {index}", of_arrow(record)
                index += 1
    except (OSError, ValueError, TypeError, KeyError) as error:  # pyarrow's own are among these
        raise ValueError(f"{path} is no whole Parquet file ({str(error)[:200]}); get it again") from None


def of_arrow(record: Record) -> Record:
    """A record without the nested entries that are there because others of their kind have them: Arrow's structs do so."""
    return {name: _without_nulls(value) for name, value in record.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _plain(path: Path, file: BinaryIO) -> Records:
    """Text to go on with: one, in parts of at most two blocks, cut at a line's end where there is one."""
    held, number = "", 0
    for block in _blocks(path, file):
        held += block
        if len(held) >= 2 * BLOCK:
            cut = held.rfind("\n", 0, BLOCK) + 1 or BLOCK
            yield f"{path}, part {number}", {"text": held[:cut], "begins": number == 0, "ends": False}
            held, number = held[cut:], number + 1
    if held.strip() or number:
        yield f"{path}, part {number}", {"text": held, "begins": number == 0, "ends": True}


READERS: dict[str, Callable[[Path, BinaryIO], Records]] = {
    ".json": _array,
    ".jsonl": _lines,
    ".csv": partial(_table, ","),
    ".tsv": partial(_table, "\t"),
    ".parquet": _parquet,
    ".txt": _plain,
}
