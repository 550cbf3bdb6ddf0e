"""Five thousand broken records and files: each is read, or rejected with an error that names its
position."""

import copy
import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from quirks import QUIRKS
from test_files import write

from litft.data.chat_template import STYLES
from litft.data.encoder import Encoder
from litft.data.notes import BLANK, CUT_AWAY, EMPTY, MASKED
from litft.data.readers import read_records
from litft.data.tokenizer import Tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi?"}]},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "content": "3", "name": "f"},
    {"role": "assistant", "content": "Three.", "train": True, "loss_weight": 1.0},
]
SEEDS = [
    {"messages": CHAT, "tools": [{"name": "f", "parameters": {}}]},
    {
        "conversations": [
            {"from": "human", "value": "Hi?"},
            {"from": "gpt", "value": "Ho."},
        ],
        "system": "Be brief.",
    },
    {"conversations": ["Hi?", "Ho."]},
    {"instruction": "Add.", "input": "1, 2", "output": "3"},
    {"instruction": "Add.", "context": "1, 2", "response": "3"},
    {"prompt": "Hi?", "completion": "Ho.<|endoftext|>"},
    {"question": "Hi?", "answer": "Ho."},
    {"dialogue": "A: hi", "summary": "They greet."},
    {"text": "### Human: Hi?### Assistant: Ho."},
    {"text": "Once upon a time there was a girl."},
]
JUNK: list[Any] = [
    *(
        None,
        True,
        0,
        -1,
        1e308,
        float("nan"),
        "",
        " ",
        "\n",
        "x" * 5000,
        "\ud800",
        "\x00",
        "</s>",
        "<s>",
        "### Human:",
        "{",
        "[]",
    ),
    *(
        [],
        {},
        [[]],
        [None],
        {"role": "user"},
        {"type": "image"},
        ["a", 1],
        "assistant",
        "user",
        "gpt",
        {"a": {"b": [{}]}},
        "{{ x }}",
    ),
]
SKIPPED = {CUT_AWAY, MASKED, EMPTY, BLANK}


def paths_in(value: Any, path: tuple = ()) -> list[tuple]:
    """Return the paths of all values in a nested value."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [
        path,
        *(inner_path for key, item in items for inner_path in paths_in(item, (*path, key))),
    ]


def mutate(rng: random.Random, record: Any) -> Any:
    """Return a copy of a record with one to three values replaced, removed, repeated or moved."""
    record = copy.deepcopy(record)
    for _ in range(rng.randint(1, 3)):
        path = rng.choice(paths_in(record))
        if not path:
            if rng.random() < 0.05:
                return rng.choice(JUNK)
            continue
        container = record
        for key in path[:-1]:
            container = container[key]
        kind, key = rng.randrange(4), path[-1]
        if kind == 0:
            container[key] = copy.deepcopy(rng.choice(JUNK))
        elif kind == 1:
            del container[key]
        elif kind == 2 and isinstance(container, list):
            container.insert(rng.randint(0, len(container)), copy.deepcopy(container[key]))
        elif isinstance(container, dict):
            container[rng.choice(["content", "role", "value", "text", "from", "x"])] = (
                container.pop(key)
            )
    return record


@pytest.fixture(scope="module", params=["own", "chatml", "thoughts are dropped"])
def encoder(request, tiny):
    tokenizer = Tokenizer(tiny)
    if request.param == "chatml":
        tokenizer.use_template(STYLES["chatml"])
    elif request.param == "thoughts are dropped":
        tokenizer.use_template(QUIRKS["thoughts of earlier answers are dropped"])
    return Encoder(tokenizer, 256)


def check(encoded, where: str) -> str:
    """Return the outcome of a record: "learned", "skipped" for a reason, or "explained" by an error
    with its position."""
    if encoded.error is not None:
        assert (
            encoded.error.startswith(where)
            and len(encoded.error) > len(where) + 10
            and not encoded.samples
        )
        return "explained"
    assert encoded.form
    if not encoded.samples:
        assert SKIPPED & set(encoded.notes)
        return "skipped"
    return "learned"


def test_mutated_records(encoder):
    """One thousand records per template, three thousand in total."""
    rng = random.Random(0)
    outcomes = [
        check(encoder(f"here, record {n}", random_record(rng)), f"here, record {n}")
        for n in range(1000)
    ]
    print({outcome: outcomes.count(outcome) for outcome in set(outcomes)})
    assert all(
        outcomes.count(outcome) > 5 for outcome in ("learned", "skipped", "explained")
    )


def random_record(rng: random.Random) -> Any:
    """Return a mutated record as read from a file."""
    record = mutate(rng, rng.choice(SEEDS))
    return (
        record
        if isinstance(record, dict)
        else ValueError("an example must be an object with fields")
    )


FLAT = [
    {"instruction": f"Say {n}.", "input": "", "output": f'{n}, "said"\n'} for n in range(4)
]


def damage(rng: random.Random, data: bytes) -> bytes:
    """Return the bytes with some of them changed, removed, repeated or inserted."""
    for _ in range(rng.randint(1, 4)):
        start = rng.randint(0, len(data))
        end = min(len(data), start + rng.choice([1, 1, 2, 8, 100]))
        kind = rng.randrange(5)
        if kind == 0:
            data = (
                data[:start]
                + bytes(rng.randrange(256) for _ in range(end - start))
                + data[end:]
            )
        elif kind == 1:
            data = data[:start] + data[end:]
        elif kind == 2:
            data = data[:end] + data[start:]
        elif kind == 3:
            data = (
                data[:start]
                + rng.choice(
                    [
                        b'"',
                        b"\n",
                        b"{",
                        b"]",
                        b",",
                        b"\xff",
                        b"\x00",
                        b"\\",
                        b"NaN",
                        b"\xef\xbb\xbf",
                    ]
                )
                + data[start:]
            )
        else:
            data = data[:start]
    return data


@pytest.mark.parametrize(
    "suffix, count",
    [
        (".json", 600),
        (".jsonl", 400),
        (".csv", 300),
        (".tsv", 200),
        (".txt", 200),
        (".json.gz", 150),
        (".jsonl.zst", 100),
        (".parquet", 50),
    ],
)
def test_damaged_files(tmp_path, tiny, suffix, count):
    """Two thousand files: every record is accounted for, or an error names the file and the
    reason."""
    rng, encoder = random.Random(suffix), Encoder(Tokenizer(tiny), 256)
    path = tmp_path / f"a{suffix}"
    if suffix == ".txt":
        path.write_text("Once upon a time.\nThere was a girl.\n")
    else:
        write(path, FLAT)
    original, outcomes = path.read_bytes(), []
    for _ in range(count):
        path.write_bytes(damage(rng, original))
        try:
            for where, record in read_records(path):
                assert where.startswith(str(path))
                outcomes.append(check(encoder(where, record), where))
        except ValueError as error:
            assert str(path) in str(error), error
            outcomes.append("refused")
    print({outcome: outcomes.count(outcome) for outcome in set(outcomes)})
    assert (
        outcomes.count("refused") + outcomes.count("explained") > count / 10
        or suffix == ".txt"
    )


def test_a_compressed_file_with_one_huge_line_is_read(tmp_path):
    """One line of 40 MB, compressed to 40 kB, is read as one record."""
    (tmp_path / "a.jsonl.gz").write_bytes(
        gzip.compress(json.dumps({"text": "x" * 40_000_000}).encode())
    )
    ((_, record),) = read_records(Path(tmp_path / "a.jsonl.gz"))
    assert len(record["text"]) == 40_000_000
