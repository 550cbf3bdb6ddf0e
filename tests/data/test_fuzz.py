"""Five thousand broken records and files: each is read, or explained with its place; none ends in a traceback or silence."""

import copy
import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from test_files import write

from litft.data.chat_template import STYLES
from litft.data.encoder import BLANK, CUT_AWAY, EMPTY, MASKED, Encoder
from litft.data.readers import read_records
from litft.data.tokenizer import Tokenizer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi?"}]},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
    {"role": "tool", "content": "3", "name": "f"},
    {"role": "assistant", "content": "Three.", "train": True, "loss_weight": 1.0},
]
SEEDS = [
    {"messages": TALK, "tools": [{"name": "f", "parameters": {}}]},
    {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Ho."}], "system": "Be brief."},
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


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Every place of a nested value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def mutated(draw: random.Random, record: Any) -> Any:
    """A record with one to three of its values replaced, removed, repeated, or put elsewhere."""
    record = copy.deepcopy(record)
    for _ in range(draw.randint(1, 3)):
        path = draw.choice(places(record))
        if not path:
            if draw.random() < 0.05:
                return draw.choice(JUNK)
            continue
        holder = record
        for key in path[:-1]:
            holder = holder[key]
        kind, key = draw.randrange(4), path[-1]
        if kind == 0:
            holder[key] = copy.deepcopy(draw.choice(JUNK))
        elif kind == 1:
            del holder[key]
        elif kind == 2 and isinstance(holder, list):
            holder.insert(draw.randint(0, len(holder)), copy.deepcopy(holder[key]))
        elif isinstance(holder, dict):
            holder[draw.choice(["content", "role", "value", "text", "from", "x"])] = holder.pop(key)
    return record


@pytest.fixture(scope="module", params=["own", "chatml", "QwQ"])
def encoder(request, tiny, shared):
    tokenizer = Tokenizer(tiny)
    if request.param == "chatml":
        tokenizer.use_template(STYLES["chatml"])
    elif request.param == "QwQ":
        tokenizer.use_template((shared / "chat_templates" / "Qwen-QwQ-32B.jinja").read_text("utf-8"))
    return Encoder(tokenizer, 256)


def check(encoded, where: str) -> str:
    """What became of a record: it is learned from, skipped for a reason, or explained with its place."""
    if encoded.error is not None:
        assert encoded.error.startswith(where) and len(encoded.error) > len(where) + 10 and not encoded.samples
        return "explained"
    assert encoded.form
    if not encoded.samples:
        assert SKIPPED & set(encoded.notes)
        return "skipped"
    return "learned"


def test_mutated_records(encoder):
    """Three thousand, a thousand a template."""
    draw = random.Random(0)
    found = [check(encoder(f"here, record {n}", mutated_json(draw)), f"here, record {n}") for n in range(1000)]
    print({kind: found.count(kind) for kind in set(found)})
    assert all(found.count(kind) > 5 for kind in ("learned", "skipped", "explained"))


def mutated_json(draw: random.Random) -> Any:
    """A mutated record as a file would give it."""
    record = mutated(draw, draw.choice(SEEDS))
    return record if isinstance(record, dict) else ValueError("an example must be an object with fields")


FLAT = [{"instruction": f"Say {n}.", "input": "", "output": f'{n}, "said"\n'} for n in range(4)]


def damaged(draw: random.Random, data: bytes) -> bytes:
    """Bytes with some of them changed, lost, doubled, or put in."""
    for _ in range(draw.randint(1, 4)):
        at = draw.randint(0, len(data))
        to = min(len(data), at + draw.choice([1, 1, 2, 8, 100]))
        kind = draw.randrange(5)
        if kind == 0:
            data = data[:at] + bytes(draw.randrange(256) for _ in range(to - at)) + data[to:]
        elif kind == 1:
            data = data[:at] + data[to:]
        elif kind == 2:
            data = data[:to] + data[at:]
        elif kind == 3:
            data = (
                data[:at]
                + draw.choice([b'"', b"\n", b"{", b"]", b",", b"\xff", b"\x00", b"\\", b"NaN", b"\xef\xbb\xbf"])
                + data[at:]
            )
        else:
            data = data[:at]
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
    """Two thousand: what comes out is accounted for record by record, or the file is named with what is wrong."""
    draw, encoder = random.Random(suffix), Encoder(Tokenizer(tiny), 256)
    path = tmp_path / f"a{suffix}"
    if suffix == ".txt":
        path.write_text("Once upon a time.\nThere was a girl.\n")
    else:
        write(path, FLAT)
    whole, kinds = path.read_bytes(), []
    for _ in range(count):
        path.write_bytes(damaged(draw, whole))
        try:
            for where, record in read_records(path):
                assert where.startswith(str(path))
                kinds.append(check(encoder(where, record), where))
        except ValueError as error:
            assert str(path) in str(error), error
            kinds.append("refused")
    print({kind: kinds.count(kind) for kind in set(kinds)})
    assert kinds.count("refused") + kinds.count("explained") > count / 10 or suffix == ".txt"


def test_a_packed_file_that_goes_on_forever_is_streamed(tmp_path):
    """40 MB of one line in 40 kB: it is read, and no line is given out by halves."""
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": "x" * 40_000_000}).encode()))
    ((_, record),) = read_records(Path(tmp_path / "a.jsonl.gz"))
    assert len(record["text"]) == 40_000_000
