"""Data files of every format and compression are streamed; errors for files that cannot be read."""

import csv
import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from litft.data.readers import read_records

RECORDS = [
    {"instruction": "Say hi,\nplease.", "output": 'He said "hi"\tthere.'},
    {"instruction": "", "output": "Grüße \u2028 \U0001f600"},
    {"instruction": "x" * 200_000, "output": "[{,]}"},
]


def write(path: Path, records: list[dict]) -> Path:
    """Write records in the format and compression given by the suffix."""
    suffix, compression = (
        (path.suffix, "")
        if path.suffix not in (".gz", ".zst")
        else (Path(path.stem).suffix, path.suffix)
    )
    if suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        arrow = pytest.importorskip("pyarrow")
        parquet.write_table(arrow.Table.from_pylist(records), path, row_group_size=2)
        return path
    if suffix in (".csv", ".tsv"):
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(
                file, list(records[0]), delimiter="\t" if suffix == ".tsv" else ","
            )
            writer.writeheader()
            writer.writerows(records)
        data = path.read_bytes()
    elif suffix == ".jsonl":
        data = "\n".join(
            json.dumps(record, ensure_ascii=False) for record in records
        ).encode()
    else:
        data = json.dumps(records, ensure_ascii=False, indent=1).encode()
    if compression == ".gz":
        data = gzip.compress(data)
    elif compression == ".zst":
        data = pytest.importorskip("zstandard").compress(data)
    path.write_bytes(data)
    return path


SUFFIXES = [
    ".json",
    ".jsonl",
    ".csv",
    ".tsv",
    ".parquet",
    ".json.gz",
    ".jsonl.gz",
    ".jsonl.zst",
    ".csv.zst",
    ".JSON",
]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_gives_the_same_records(tmp_path, suffix):
    assert [
        record for _, record in read_records(write(tmp_path / f"a{suffix}", RECORDS))
    ] == RECORDS


def test_a_zst_file_of_several_frames_is_read_to_its_end(tmp_path):
    """pzstd and `cat a.zst b.zst` write such files."""
    compress = pytest.importorskip("zstandard").compress
    frames = [compress(json.dumps(record).encode() + b"\n") for record in RECORDS]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    assert [record for _, record in read_records(tmp_path / "a.jsonl.zst")] == RECORDS


def peak_memory(path):
    """Return the bytes that reading a file takes at most, and the error that ends it, if any."""
    tracemalloc.start()
    error = None
    try:
        for _ in read_records(path):
            pass
    except ValueError as caught:
        error = str(caught)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, error


def test_an_error_is_found_without_the_rest_of_the_file(tmp_path):
    record = json.dumps({"text": "hello world " * 100})
    path = tmp_path / "a.json"
    path.write_text(f'[{{"text": "a" "b"}}, {", ".join([record] * 30_000)}]')
    peak, error = peak_memory(path)
    assert "line 1: invalid JSON (Expecting ',' delimiter, column 15)" in error
    assert peak < 10 * 2**20


def test_a_text_of_one_repeated_line_is_read_in_parts(tmp_path):
    """Compressed, it is a ten-thousandth as long."""
    compress = pytest.importorskip("zstandard").compress
    line = json.dumps({"text": "hello world " * 100}).encode() + b"\n"
    (tmp_path / "a.jsonl.zst").write_bytes(compress(line * 80_000))
    peak, error = peak_memory(tmp_path / "a.jsonl.zst")
    assert error is None and peak < 60 * 2**20


def test_null_fields_added_by_arrow_are_removed(tmp_path):
    """Arrow gives every struct the union of all fields, filled with null."""
    records = [
        {"tools": [{"name": "f", "arguments": {"x": 1}}]},
        {"tools": [{"name": "g", "arguments": {"y": "a"}}]},
    ]
    assert [
        record for _, record in read_records(write(tmp_path / "a.parquet", records))
    ] == records


def test_a_byte_order_mark_and_windows_line_ends(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b"\xef\xbb\xbf" + b'{"text": "a"}\r\n\r\n{"text": "b"}\r\n'
    )
    assert [record["text"] for _, record in read_records(tmp_path / "a.jsonl")] == [
        "a",
        "b",
    ]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_with_a_byte_order_mark(tmp_path, encoding):
    """Excel's "Unicode text"; the file is longer than a block."""
    mark, rows = (
        "\ufeff" * (encoding == "utf-16-be"),
        [f"Gr\u00fc\u00dfe {n} \U0001f43b\t{n}" for n in range(50_000)],
    )
    (tmp_path / "a.tsv").write_bytes(
        (mark + "question\tanswer\n" + "\n".join(rows)).encode(encoding)
    )
    records = [record for _, record in read_records(tmp_path / "a.tsv")]
    assert len(records) == 50_000 and records[49_999] == {
        "question": "Gr\u00fc\u00dfe 49999 \U0001f43b",
        "answer": "49999",
    }


def test_a_table_that_excel_writes_with_semicolons(tmp_path):
    (tmp_path / "a.csv").write_bytes(
        b'\xef\xbb\xbfQuestion;Answer\r\n"Bread; or rolls?";1,20\r\n'
    )
    assert [record for _, record in read_records(tmp_path / "a.csv")] == [
        {"Question": "Bread; or rolls?", "Answer": "1,20"}
    ]
    (tmp_path / "a.csv").write_text("sep=|\nquestion|answer||\na|b||\nc|d\n")
    expected = [{"question": "a", "answer": "b"}, {"question": "c", "answer": "d"}]
    assert [record for _, record in read_records(tmp_path / "a.csv")] == expected
    # Excel's Unicode text, with the name of a CSV file, and with its own
    content = "question\tanswer\na, b\tc\n".encode("utf-16")
    (tmp_path / "a.csv").write_bytes(content)
    expected = [{"question": "a, b", "answer": "c"}]
    assert [record for _, record in read_records(tmp_path / "a.csv")] == expected
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match=r"a table with tabs.*rename it to \.tsv"):
        list(read_records(tmp_path / "a.txt"))
    (tmp_path / "a.csv").write_text("question,answer;unit\na;b,c\n")
    assert [record for _, record in read_records(tmp_path / "a.csv")] == [
        {"question": "a;b", "answer;unit": "c"}
    ]


@pytest.mark.parametrize("size", [10, 1 << 20, 5 << 20])
def test_a_text_is_read_completely_in_parts(tmp_path, size):
    """Multi-byte characters cross block boundaries."""
    text = ("Ein grüßender Bär 🐻.\n" * (size // 20 + 1))[: size // 2] + "ü" * (size // 4)
    (tmp_path / "a.txt").write_text(text, "utf-8")
    records = [record for _, record in read_records(tmp_path / "a.txt")]
    assert "".join(record["text"] for record in records) == text
    assert [record["begins"] for record in records] == [True] + [False] * (len(records) - 1)
    assert [record["ends"] for record in records] == [False] * (len(records) - 1) + [True]
    assert size < 1 << 21 or len(records) > 1


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".json.gz"])
def test_a_file_larger_than_memory_is_streamed(tmp_path, suffix):
    """A file of 64 MB is read with 12 MB of memory."""
    path = write(
        tmp_path / f"a{suffix}", [{"text": f"{n} " + "x" * 16_000} for n in range(4000)]
    )
    tracemalloc.start()
    count = sum(1 for _ in read_records(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 4000 and peak < 12e6


@pytest.mark.parametrize(
    "name, content, message",
    [
        (
            "a.json",
            '[{"text": "a"},\n {"text" "b"}]',
            r"a.json, line 2: invalid JSON \(Expecting ':' delimiter, column 10\)",
        ),
        (
            "a.json",
            '[{"text": "a"} {"text": "b"}]',
            "line 1: invalid JSON .Expecting ',' delimiter, column 16",
        ),
        (
            "a.json",
            '{"text": "a"}\n{"text": "b"}',
            "one object per line must be named .jsonl",
        ),
        ("a.json", '[{"text": "a"}', "line 1: invalid JSON"),
        ("a.json", '[{"text": "a"}] x', "line 1: invalid JSON .Extra data, column 17"),
        ("a.json", "[" * 5000, "invalid JSON"),
        ("a.json", '[{"text": "a", "text": "b"}]', "the field 'text' is there twice"),
        ("a.json", "[]", "contains no examples"),
        ("a.json", "", "contains no examples"),
        ("a.jsonl", "\n\n", "contains no examples"),
        ("a.txt", "\n \n", "contains no examples"),
        ("a.json", '{"text": "a"}', "expected an array of examples, found an object"),
        ("a.docx", "a,b", r"cannot read .docx; use .json, .jsonl, .csv"),
        ("a", "a,b", "cannot read a file without a suffix"),
        ("a.csv", "a,a\n1,2", "two columns have the same name"),
        ("a.csv", 'a,b\n1,"2', "quotation mark"),
        ("a.jsonl.gz", "plain", "is not a complete .gz file"),
        ("a.jsonl.zst", "plain", "is not a complete .zst file|needs zstandard"),
        ("a.parquet", "plain", "is not a complete Parquet file|needs pyarrow"),
    ],
)
def test_errors_name_the_file_and_the_position(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        list(read_records(tmp_path / name))
    assert str(tmp_path / name) in str(error.value)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", '{"text": "a"}\n\n{"x": }\n{"text": "b"}', "line 3: invalid JSON"),
        (
            "a.jsonl",
            '{"text": "a"}\n3\n{"text": "b"}',
            "line 2: an example must be an object with fields, found a number",
        ),
        (
            "a.json",
            '[{"text": "a"}, null, {"text": "b"}]',
            "record 1: an example must be an object with fields, found null",
        ),
        (
            "a.jsonl",
            '{"text": "a"}\n{"text": "x", "text": "y"}\n{"text": "b"}',
            "line 2: invalid JSON (the field 'text' is there twice",
        ),
        ("a.csv", "text,b\na,1\nx\nb,1\n", "line 3: 1 cells for 2 columns"),
    ],
)
def test_records_after_a_bad_record_are_read(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    first, bad, last = (record for _, record in read_records(tmp_path / name))
    assert (first["text"], last["text"]) == ("a", "b")
    assert isinstance(bad, ValueError) and message in str(bad)


def test_errors_for_files_that_are_not_text_name_the_byte(tmp_path):
    (tmp_path / "a.json").write_bytes(b'[{"instruction": "\xff\xfe"}]')
    with pytest.raises(ValueError, match=r"a.json is not UTF-8 text \(at byte 18\)"):
        list(read_records(tmp_path / "a.json"))
    (tmp_path / "a.txt").write_bytes(b"x" * 1_500_000 + b"\xc3")
    with pytest.raises(ValueError, match=r"a.txt is not UTF-8 text \(at byte 1500000\)"):
        list(read_records(tmp_path / "a.txt"))


def test_a_truncated_compressed_file_is_reported(tmp_path):
    compressed = write(tmp_path / "a.jsonl.gz", RECORDS * 20).read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(compressed[: len(compressed) // 2])
    with pytest.raises(ValueError, match=r"is not a complete .gz file"):
        list(read_records(tmp_path / "a.jsonl.gz"))
    compressed = write(tmp_path / "a.jsonl.zst", RECORDS * 20).read_bytes()
    (tmp_path / "a.jsonl.zst").write_bytes(compressed[: len(compressed) // 2])
    with pytest.raises(ValueError, match=r"is not a complete .zst file"):
        list(read_records(tmp_path / "a.jsonl.zst"))


def test_two_columns_of_one_name_in_parquet_are_refused(tmp_path):
    import pyarrow
    import pyarrow.parquet

    columns = [pyarrow.array([text]) for text in ("q1", "q2", "a")]
    table = pyarrow.Table.from_arrays(columns, names=["question", "question", "answer"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="two columns have the same name"):
        list(read_records(tmp_path / "a.parquet"))


def test_a_zst_file_with_a_long_window_is_not_called_damaged(tmp_path):
    import zstandard

    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=28)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(compressor.compress(b'{"text": "a"}\n' * 10) + compressor.flush())
    with pytest.raises(
        ValueError,
        match=r"a window of more than 128 MiB, .*; compress it without --long or --ultra",
    ):
        list(read_records(path))


ODD_FILES = [
    ("a.csv", b"sep=;\nquestion;answer\nq;a;b\n", "line 3: 3 cells for 2 columns"),
    ("a.csv", b"question,answer\rq,a\r", "a lone carriage return ends a line here"),
    (
        "a.csv",
        "question,answer\nq,a\n".encode("utf-32"),
        "is UTF-32 text; save it as UTF-8",
    ),
]


@pytest.mark.parametrize(("name", "content", "message"), ODD_FILES)
def test_odd_text_files_are_named_as_what_they_are(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        for _, record in read_records(tmp_path / name):
            if isinstance(record, ValueError):
                raise record


def test_files_that_were_joined_have_several_byte_order_marks(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b'\xef\xbb\xbf{"text": "a"}\n\xef\xbb\xbf{"text": "b"}\n'
    )
    assert [record for _, record in read_records(tmp_path / "a.jsonl")] == [
        {"text": "a"},
        {"text": "b"},
    ]
