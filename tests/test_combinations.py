"""tutorials/combinations.md says what is refused, in the words of the messages."""

import re

import pytest
from conftest import ROOT, load_script

PAGE = ROOT / "tutorials" / "combinations.md"
QUOTED = re.compile(r"`([^`]*)`")


@pytest.fixture(scope="module")
def script():
    """The module scripts/combinations.py."""
    return load_script("combinations")


@pytest.fixture(scope="module")
def inputs(script, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    script.make_inputs(folder)
    return folder


def table(name):
    """Return the rows of a table of the page, each as a list of cells."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    text = PAGE.read_text("utf-8").partition(begin)[2].partition(end)[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [
        re.split(r" ?\| ?", line)[1:-1] for line in lines if not line.startswith("|---")
    ]


def test_every_value_has_a_row_and_every_method_a_column(script):
    header, *rows = table("methods")
    assert header[1:] == list(script.METHODS)
    assert [row[0] for row in rows] == [
        v.name for v in script.values() if v.kind != "method"
    ]


def test_what_the_page_says_is_refused_is_refused_in_these_words(script, inputs):
    values = {value.name: value for value in script.values()}
    _, *rows = table("refusals")
    assert len(rows) >= 15
    for this, others, message in rows:
        first_of_others = others.split(", ")[0]
        pair = sorted(
            (values[this], values[first_of_others]),
            key=lambda value: list(values).index(value.name),
        )
        assert script.refusal(inputs, *pair) == message.strip("`"), (this, first_of_others)
    for name, *cells in table("methods")[1:]:
        for method, cell in zip(script.METHODS, cells, strict=True):
            if cell != "yes":
                assert script.refusal(inputs, values[method], values[name]), (method, name)


@pytest.mark.slow
@pytest.mark.weekly
def test_the_tables_are_those_of_the_script(script):
    page = PAGE.read_text("utf-8")
    for name, text in script.tables().items():
        assert f"<!-- {name}: begin -->\n{text}<!-- {name}: end -->" in page
