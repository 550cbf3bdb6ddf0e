"""The mutation table's code is found by its syntax, and where it has gone."""

import pytest
from mutate import Mutation, missing_cases, new_places, problems
from mutation_places import Source, parse_pattern

BEFORE = """
import math

LIMIT = 3


class Decoder:
    def step(self, x, y):
        if x > 1 and y:
            return self.scaled(x, scale=2) * 3
        elif x > 0:
            x = x + 1
            y = "ä" + f"{x + 1}"
        return x

    @property
    def name(self):
        return "a"


def step(x):
    def inner(x):
        return x

    return [inner(x) for x in range(LIMIT)]
"""
# the same syntax, written otherwise
AFTER = (
    BEFORE.replace(
        "x > 1 and y", "(\n            x > 1  # large\n            and y\n        )"
    )
    .replace('"ä"', "'ä'")
    .replace(
        "self.scaled(x, scale=2)",
        "self.scaled(\n                x,\n                scale=2,\n            )",
    )
)


@pytest.mark.parametrize("text", [BEFORE, AFTER], ids=["before", "after"])
@pytest.mark.parametrize(
    ("function", "code", "bug", "expected"),
    [
        ("Decoder.step", "if x > 1 and y:", "if False:", "if False:\n            return"),
        (
            "Decoder.step",
            "elif x > 0:",
            "elif x > 9:",
            "elif x > 9:\n            x = x + 1",
        ),
        (
            "Decoder.step",
            "self.scaled(x, scale=2)",
            "x if y else 0",
            "return (x if y else 0) * 3",
        ),
        (
            "Decoder.step",
            'x = x + 1\ny = "ä" + f"{x + 1}"',
            "x = 1\ny = 2",
            "            x = 1\n            y = 2\n",
        ),
        (
            "Decoder",
            "@property\ndef name(self):",
            "def name(self):",
            "return x\n\n    def name(self):",
        ),
        ("step.inner", "return x", "return 1", "        return 1\n"),
        ("step", "inner(x)", "x", "[(x) for x in range(LIMIT)]"),
        ("", "LIMIT = 3", "LIMIT = 4", "LIMIT = 4\n"),
    ],
)
def test_code_is_found_and_replaced(text, function, code, bug, expected):
    source = Source(text)
    (place,) = source.find(function, parse_pattern(code))
    replaced = source.replaced(place, bug)
    assert expected in replaced and expected not in text
    Source(replaced)


def test_code_in_other_functions_is_not_found():
    source = Source(BEFORE)
    for function, code in [
        ("step", "return x"),
        ("Decoder.step", "if x > 0:"),
        ("", "x + 1"),
        ("Decoder.step", "x + 2"),
    ]:
        assert not source.find(function, parse_pattern(code)), code


def entry(function: str, code: str, bug: str = "pass") -> Mutation:
    """Return an entry for litft/decoder.py."""
    return Mutation(
        "a bug", "litft/decoder.py", code, bug, ["tests/test_a.py::test_a"], function
    )


def test_problems_name_where_the_code_is_now(tmp_path):
    for path, text in [
        ("litft/decoder.py", BEFORE),
        ("tests/test_a.py", "def test_a():\n    pass\n"),
    ]:
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    assert problems([entry("Decoder.step", "x = x + 1")], tmp_path) == []
    assert new_places(entry("Decoder.run", "x = x + 1"), tmp_path) == [
        ("litft/decoder.py", "Decoder.step")
    ]
    (moved,) = problems([entry("Decoder.run", "x = x + 1")], tmp_path)
    assert (
        "is there 0 times" in moved
        and "it is now in litft/decoder.py, Decoder.step: run --move" in moved
    )
    (changed,) = problems([entry("Decoder.step", "x = x + 1 + self.bias")], tmp_path)
    assert "the nearest is in Decoder.step: 'x = x + 1'" in changed
    (invalid,) = problems([entry("Decoder.step", "x = x + 1", "x = (")], tmp_path)
    assert "it is no valid Python" in invalid
    assert (
        "no statement, expression or header"
        in problems([entry("Decoder.step", "x = ")], tmp_path)[0]
    )


def test_a_case_that_is_gone_is_reported():
    """Its entry would be killed by no test."""
    entry = Mutation(
        "a bug",
        "a.py",
        "x",
        "y",
        ["tests/a.py::test_a[one]", "tests/a.py::test_a", "tests/a.py::test_b"],
    )
    assert missing_cases([entry], ["tests/a.py::test_a[one]", "tests/a.py::test_b"]) == []
    assert missing_cases([entry], ["tests/a.py::test_a[two]", "tests/a.py::test_b"]) == [
        "tests/a.py::test_a[one]: no such case (a bug)"
    ]
