"""tutorials/gallery.md has the plans of published models, as `plan` makes them now."""

import re

import pytest
from conftest import ROOT, load_script

from litft.pretrained.folder import resolve

PAGE = (ROOT / "tutorials" / "gallery.md").read_text("utf-8")
# rows that are planned again: small models whose plans take seconds, of each kind of network
PLANNED_AGAIN = [
    ("llama-3.2-1b", "12 GB"),
    ("lfm2.5-vl-1.6b", "24 GB"),
    ("gemma-2-2b", "48 GB"),
    ("gpt-oss-20b", "12 GB"),
]


@pytest.fixture(scope="module")
def gallery():
    """The module scripts/gallery.py."""
    return load_script("gallery")


def rows(memory):
    """Return the rows of the table of a GPU."""
    name = memory.replace(" ", "")
    text = PAGE.partition(f"<!-- {name}: begin -->")[2].partition(f"<!-- {name}: end -->")[
        0
    ]
    return text.strip().splitlines()[2:]


def test_every_table_has_every_model(gallery):
    for memory in gallery.GPUS:
        names = [re.match(r"\| \[(\S+)\]", row)[1] for row in rows(memory)]
        assert names == list(gallery.MODELS.values())
    readme = (ROOT / "README.md").read_text("utf-8")
    assert f"[{len(gallery.MODELS)} models on {len(gallery.GPUS)} GPUs]" in readme


def test_every_configuration_is_of_a_family(gallery):
    for model in gallery.MODELS:
        folder = resolve(str(gallery.CONFIGS / model))
        assert f"| {gallery.size(folder.outline)} |" in PAGE, model


@pytest.mark.slow
@pytest.mark.parametrize("model, memory", PLANNED_AGAIN)
def test_a_row_is_what_the_plan_says(gallery, model, memory):
    cell = gallery.planned(model, memory, gallery.GPUS[memory])
    assert gallery.row(model, memory, cell) in rows(memory)


@pytest.mark.slow
@pytest.mark.weekly
def test_all_rows_are_what_the_plan_says(gallery):
    for memory in gallery.GPUS:
        expected = gallery.table(memory, list(gallery.MODELS)).splitlines()[2:]
        assert rows(memory) == expected
