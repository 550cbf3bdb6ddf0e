"""Files of examples as a stream of records: JSON, JSONL, CSV, TSV, Parquet and text, plain or
compressed by gzip or zstd.

Only the current record is in memory, so a file may be larger than memory. Errors name the file and
the line or index.
"""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from litft.data.formats import Record, field_with_records
from litft.data.messages import json_type
from litft.errors import missing_path

# bytes read at once; a text file becomes records of about this size
READ_BYTES = 1 << 20
# bytes of a .zst file, which may be a thousand times as many of text
COMPRESSED_BLOCK = 1 << 11
# characters after an error in JSON that may end within a word, an escape or a number
LONGEST_TOKEN = 16

Records = Iterator[tuple[str, Record | ValueError]]


def read_records(path: Path) -> Records:
    """Yield each record of a file with a label of its position, or a ValueError in place of a bad
    record.

    Raise ValueError if the rest of the file cannot be read either.
    """
    suffix, compression = split_suffixes(require_file(path))
    if suffix not in READERS:
        file_type = suffix or "a file without a suffix"
        if suffix in (".xlsx", ".xls", ".ods"):
            raise ValueError(f"{path}: cannot read {suffix}; save the sheet as CSV UTF-8")
        raise ValueError(
            f"{path}: cannot read {file_type}; use {', '.join(READERS)}, optionally followed by "
            ".gz or .zst"
        )
    has_records = False
    try:
        with OPENERS[compression](path) as file:
            for where, record in READERS[suffix](path, file):
                has_records = True
                if not isinstance(record, dict | ValueError):
                    record = ValueError(
                        f"{where}: an example must be an object with fields, found "
                        f"{json_type(record)}"
                    )
                yield where, record
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path} is not a complete {compression} file ({error}); download it again"
        ) from None
    if not has_records:
        raise ValueError(f"{path} contains no examples; it needs at least one")


def require_file(path: Path) -> Path:
    """Return the path; raise ValueError if it is not a file."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file of examples in it")
    if path.exists() and not path.is_file():
        raise ValueError(
            f"{path} is a pipe or a device, which can be read only once; write the examples to a "
            "file"
        )
    if not path.is_file():
        if path.parent.is_dir():
            remedy = "name a file of examples, or a folder with train.jsonl"
        else:
            remedy = f"there is no folder {path.parent} either"
        raise ValueError(missing_path(path, remedy))
    return path


def split_suffixes(path: Path) -> tuple[str, str]:
    """Return the suffixes of a file's format (".jsonl") and of its compression (".gz", or "")."""
    last = path.suffix.lower()
    if last in OPENERS:
        return Path(path.stem).suffix.lower(), last
    return last, ""


class _Zstandard(io.RawIOBase):
    """The content of a .zst file.

    Raise EOFError if it ends within a frame, which the library's own reader ignores.
    """

    def __init__(self, path: Path) -> None:
        self.library = _library("zstandard", path)
        self.file = path.open("rb")
        # decompressed bytes, and how many of them were returned
        self.buffered = b""
        self.at = 0
        self.decompressor = self.library.ZstdDecompressor().decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        # a block may decompress to nothing, such as the header of a frame
        while self.at == len(self.buffered):
            block = self.file.read(COMPRESSED_BLOCK)
            if not block and not self.decompressor.eof:
                raise EOFError("it is truncated")
            if not block:
                return 0
            self.buffered = self._decompress(block)
            self.at = 0
        count = min(len(buffer), len(self.buffered) - self.at)
        buffer[:count] = memoryview(self.buffered)[self.at : self.at + count]
        self.at += count
        return count

    def _decompress(self, block: bytes) -> bytes:
        pieces = []
        while block:
            if self.decompressor.eof:  # another frame begins
                self.decompressor = self.library.ZstdDecompressor().decompressobj()
            try:
                pieces.append(self.decompressor.decompress(block))
            except self.library.ZstdError as error:
                if "too much memory" in str(error):
                    reason = (
                        "was compressed with a window of more than 128 MiB, which takes as much "
                        "memory to read"
                    )
                    raise ValueError(
                        f"{self.file.name} {reason}; compress it without --long or --ultra"
                    ) from None
                raise EOFError(str(error)) from None
            block = self.decompressor.unused_data
        return b"".join(pieces)

    def close(self) -> None:
        self.file.close()
        super().close()


def _zst(path: Path) -> io.BufferedIOBase:
    return io.BufferedReader(_Zstandard(path), READ_BYTES)


def _library(name: str, path: Path) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise ValueError(
            f"{path}: reading this file needs {name}; pip install 'litft[data]'"
        ) from None


OPENERS: dict[str, Callable[[Path], io.BufferedIOBase]] = {
    "": lambda path: path.open("rb"),
    ".gz": gzip.open,
    ".zst": _zst,
}


def _blocks(path: Path, file: io.BufferedIOBase) -> Iterator[str]:
    """Yield a file's text block by block; raise ValueError if it is neither UTF-8 nor, with a byte
    order mark, UTF-16."""
    decoder = None
    offset = 0
    while block := file.read(READ_BYTES):
        if decoder is None:
            if block.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
                raise ValueError(f"{path} is UTF-32 text; save it as UTF-8")
            is_utf16 = block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            encoding = "utf-16" if is_utf16 else "utf-8-sig"
            decoder = codecs.getincrementaldecoder(encoding)()
        # the decoder counts the position of an error from the bytes that it kept of the last block
        num_pending = len(decoder.getstate()[0])
        yield _decode(decoder, block, path, offset - num_pending)
        offset += len(block)
    if decoder and (
        rest := _decode(decoder, b"", path, offset - len(decoder.getstate()[0]), final=True)
    ):
        yield rest


def _decode(
    decoder: codecs.IncrementalDecoder,
    block: bytes,
    path: Path,
    offset: int,
    final: bool = False,
) -> str:
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as error:
        position = f"at byte {offset + error.start}"
        raise ValueError(
            f"{path} is not UTF-8 text ({position}); save it as UTF-8 (in Excel: CSV UTF-8)"
        ) from None


def _lines(path: Path, file: io.BufferedIOBase) -> Records:
    """Yield one record per line."""
    for number, line in enumerate(_text_lines(path, file), 1):
        if number == 1 and line.strip() == "[":
            raise ValueError(
                f"{path} is one array of records, not a record on each line; name it .json"
            )
        if line.strip():
            where = f"{path}, line {number}"
            try:
                # files that were joined have several byte order marks
                record = json.loads(line.removeprefix("\ufeff"), object_pairs_hook=_object)
            except (ValueError, RecursionError) as error:
                record = ValueError(
                    f"{where}: invalid JSON ({error}); each line must be one object"
                )
            yield where, record


def _text_lines(path: Path, file: io.BufferedIOBase) -> Iterator[str]:
    """Yield lines split at line feeds only: JSON strings may contain other line separators."""
    pieces: list[str] = []
    for block in _blocks(path, file):
        *lines, rest = block.split("\n")
        for line in lines:
            yield "".join((*pieces, line))
            pieces = []
        pieces.append(rest)
    yield "".join(pieces)


def _object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raise ValueError if a field is there twice, of which JSON keeps the
    last."""
    found = dict(fields)
    if len(found) < len(fields):
        names = [name for name, _ in fields]
        name = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {name!r} is there twice; remove one")
    return found


_SPACE = re.compile(r"[ \t\r\n]*")


class _Values:
    """Parses JSON values from a file's text, keeping no more text in memory than the current value
    needs."""

    def __init__(self, path: Path, file: io.BufferedIOBase) -> None:
        self.path = path
        self.blocks = _blocks(path, file)
        self.decode = json.JSONDecoder(object_pairs_hook=_object).raw_decode
        # buffered text, position in it, characters dropped before it
        self.text = ""
        self.at = 0
        self.dropped = 0

    def read_more(self) -> bool:
        """Drop the consumed text, and read as much again as is left; return False at the end of the
        file."""
        self.text = self.text[self.at :]
        self.dropped = self.dropped + self.at
        self.at = 0
        # a value is parsed again from its start: to double the text each time keeps this linear
        num_missing = len(self.text) + 1
        blocks = []
        while num_missing > 0 and (block := next(self.blocks, None)) is not None:
            blocks.append(block)
            num_missing -= len(block)
        self.text += "".join(blocks)
        return bool(blocks)

    def peek(self) -> str:
        """Skip whitespace and return the next character without consuming it; "" at the end of the
        file."""
        while True:
            space = _SPACE.match(self.text, self.at)
            # the pattern matches no space, too
            assert space is not None
            self.at = space.end()
            if self.at < len(self.text) or not self.read_more():
                return self.text[self.at : self.at + 1]

    def parse(self) -> Any:
        """Return the next value; raise ValueError if the text is invalid."""
        while True:
            try:
                value, end = self.decode(self.text, self.at)
            except json.JSONDecodeError as error:
                offset = self.dropped + error.pos
                # where the text is incomplete, the error is at its end, or an open quotation mark
                is_cut = error.msg.startswith(
                    "Unterminated string"
                ) or error.pos + LONGEST_TOKEN > len(self.text)
                if not is_cut or not self.read_more():
                    raise self.error(error.msg, offset) from None
            # too many digits, or too deep nesting
            except (
                ValueError,
                RecursionError,
            ) as error:
                raise self.error(str(error)) from None
            else:
                # a number may continue in the next block
                if end < len(self.text) or not self.read_more():
                    self.at = min(end, len(self.text))
                    return value

    def error(self, message: str, offset: int | None = None) -> ValueError:
        """Return an error with the line and column of `offset` in the whole text; None: where the
        next value begins."""
        offset = self.dropped + self.at if offset is None else offset
        # the text before the position was dropped, so the lines are counted in the file
        with OPENERS[split_suffixes(self.path)[1]](self.path) as file:
            before = ""
            left = offset
            line = 1
            column = 1
            for block in _blocks(self.path, file):
                before = block[:left]
                left = left - len(block)
                line += before.count("\n")
                if "\n" in before:
                    column = len(before) - before.rfind("\n")
                else:
                    column = column + len(before)
                if left <= 0:
                    break
        if message == "Extra data":
            remedy = "a file with one object per line must be named .jsonl"
        else:
            remedy = "fix it there"
        return ValueError(
            f"{self.path}, line {line}: invalid JSON ({message}, column {column}); {remedy}"
        )


def _array(path: Path, file: io.BufferedIOBase) -> Records:
    """Yield one record per element."""
    values = _Values(path, file)
    first = values.peek()
    if first and first != "[":
        value = values.parse()
        if values.peek():
            raise values.error("Extra data")
        raise ValueError(
            f"{path}: expected an array of examples, found {json_type(value)}; "
            f"{_array_remedy(value)}"
        )
    values.at += 1
    index = 0
    while first and values.peek() != "]":
        if index:
            if values.peek() != ",":
                raise values.error("Expecting ',' delimiter")
            values.at += 1
            if values.peek() == "]":
                raise values.error("a comma before ] has nothing after it")
        yield f"{path}, record {index}", values.parse()
        index += 1
    values.at += 1
    if values.peek():
        raise values.error("Extra data")


def _array_remedy(value: Any) -> str:
    """Return how to make an array of examples of another value."""
    name = field_with_records(value) if isinstance(value, dict) else None
    if name is None:
        return "put [ and ] around it"
    return (
        f"its field {name!r} has {len(value[name]):,} of them: write only "
        "that array into the file"
    )


def _table(separator: str, path: Path, file: io.BufferedIOBase) -> Records:
    """Yield one record per row below the header; quoted cells may contain line breaks.

    A header without `separator` is read with the semicolons or the tabs that it has.
    """
    # the line breaks within quoted cells belong to their text
    lines = (line + "\n" for line in _text_lines(path, file))
    header = next(lines, "")
    skipped = 0  # lines before the header
    declared = re.fullmatch(r"sep=(.)\s*", header)
    if declared:  # an instruction to Excel
        separator = declared[1]
        header = next(lines, "")
        skipped = 1
    elif separator not in header:
        # Excel writes a semicolon where the comma is the decimal mark, and tabs as Unicode text
        for other in (";", "\t"):
            if other in header:
                separator = other
                break
    csv.field_size_limit(2**31 - 1)  # the library's default is 128 KiB
    last_line = 1 + skipped  # of the last complete row
    try:
        if header:
            lines = chain([header], lines)
        rows = csv.reader(lines, delimiter=separator, strict=True)
        names = _without_empty_end(next(rows, []))
        _check_names(names, f"{path}, line {1 + skipped}", "the first line is the header")
        for row in rows:
            # a row may have several lines; this is its last one
            last_line = rows.line_num + skipped
            where = f"{path}, line {last_line}"
            if len(row) > len(names):
                row = _without_empty_end(row, len(names))
            # the reader returns an empty list for a blank line, which is no record
            if len(row) == len(names):
                yield where, dict(zip(names, row, strict=True))
            elif row:
                reason = (
                    f"{len(row)} cells for {len(names)} columns; put quotes around text with "
                    f"{separator!r}"
                )
                yield where, ValueError(f"{where}: {reason}")
    except csv.Error as error:
        if "unexpected end of data" in str(error):
            reason = "a quotation mark opens a cell here that is never closed"
            raise ValueError(
                f"{path}, line {last_line + 1}: {reason}; close it, or double it within a cell"
            ) from None
        if "new-line character" in str(error):
            reason = (
                "a lone carriage return ends a line here; write the file with line feeds, as most "
                "programs do"
            )
            raise ValueError(f"{path}, line {rows.line_num + skipped}: {reason}") from None
        raise ValueError(
            f"{path}, line {rows.line_num + skipped}: invalid table ({error}); fix it there"
        ) from None


def _without_empty_end(row: list[str], length: int = 0) -> list[str]:
    """Return a row without the empty cells at its end, which spreadsheets add, but at least
    `length` cells."""
    while len(row) > length and not row[-1].strip():
        row = row[:-1]
    return row


def _parquet(path: Path, file: io.BufferedIOBase) -> Records:
    """Yield one record per row."""
    parquet = _library("pyarrow.parquet", path)
    with _parquet_errors(path):
        # Parquet is read from its end, and a stream of zstd cannot seek
        if not file.seekable():
            file = io.BytesIO(file.read())
        source = parquet.ParquetFile(file)
    _check_names(source.schema_arrow.names, str(path), "rename one of them")
    index = 0
    with _parquet_errors(path):
        for batch in source.iter_batches(batch_size=256):
            for record in _rows(batch):
                yield f"{path}, row {index}", drop_nulls(record)
                index += 1


@contextmanager
def _parquet_errors(path: Path) -> Iterator[None]:
    """Within the context, pyarrow's errors of several kinds mean that the file is damaged."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(
            f"{path} is not a complete Parquet file ({str(error)[:200]}); download it again"
        ) from None


def _check_names(names: list[str], where: str, remedy: str) -> None:
    """Raise ValueError if two columns of a table have the same name: a record would have only one
    of them."""
    if len(set(names)) < len(names):
        raise ValueError(f"{where}: two columns have the same name; {remedy}")


def _rows(batch: Any) -> list[Record]:
    """Return the rows of a batch of Arrow; times beyond Python's years, 1 to 9999, as Arrow writes
    them."""
    try:
        return batch.to_pylist()
    except (OverflowError, ValueError):
        types = _library("pyarrow.types", Path())
        columns = []
        for column in batch.columns:
            is_time = types.is_timestamp(column.type) or types.is_date(column.type)
            if is_time:
                column = column.cast("string")
            columns.append(column.to_pylist())
        names = batch.schema.names
        return [
            dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)
        ]


def drop_nulls(record: Mapping[str, Any]) -> Record:
    """Remove null entries of nested objects: an Arrow struct has every field that the same struct
    of another record has."""
    return {name: _without_nulls(value) for name, value in record.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _without_nulls(item) for name, item in value.items() if item is not None
        }
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _plain(path: Path, file: io.BufferedIOBase) -> Records:
    """Yield the text in parts of at most two blocks, cut at a line end where possible."""
    text = ""
    number = 0
    for block in _blocks(path, file):
        if not number and not text and _is_table_of_excel(path, block):
            raise ValueError(
                f"{path} is a table with tabs, as Excel saves Unicode text; rename it to .tsv"
            )
        text += block
        if len(text) >= 2 * READ_BYTES:
            # at least one block is kept, so that the last part is not a short one
            cut = text.rfind("\n", 0, READ_BYTES) + 1 or READ_BYTES
            yield (
                f"{path}, part {number}",
                {"text": text[:cut], "begins": number == 0, "ends": False},
            )
            text = text[cut:]
            number = number + 1
    # after earlier parts, a last one of spaces alone still says that the text ends
    if text.strip() or number:
        yield f"{path}, part {number}", {"text": text, "begins": number == 0, "ends": True}


def _is_table_of_excel(path: Path, text: str) -> bool:
    """Return whether a .txt file is a table with tabs: Excel saves these in UTF-16."""
    with path.open("rb") as file:
        is_utf16 = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    first_lines = text.splitlines()[:5]
    return is_utf16 and len(first_lines) > 1 and all("\t" in line for line in first_lines)


READERS: dict[str, Callable[[Path, io.BufferedIOBase], Records]] = {
    ".json": _array,
    ".jsonl": _lines,
    ".csv": partial(_table, ","),
    ".tsv": partial(_table, "\t"),
    ".parquet": _parquet,
    ".txt": _plain,
}
