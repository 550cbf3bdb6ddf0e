"""Adapter folders with random mistakes: they open, or end in one message."""

import json
import random
import time

import pytest
from conftest import adapted
from mistakes import failure, mutated

import litft
from litft.args import LoRAArgs
from litft.methods import LoRA

CONFIG = "adapter_config.json"


@pytest.fixture(scope="module")
def adapter(tiny, tmp_path_factory):
    """A LoRA adapter of a tiny model, with patterns."""
    method = LoRA(
        LoRAArgs(
            r=4,
            targets=["q_proj", "v_proj"],
            rank_pattern=["v_proj=2"],
            alpha_pattern=["v_proj=8"],
        )
    )
    return adapted(tiny, tmp_path_factory.mktemp("adapters") / "adapter", method)


def with_config(adapter, folder, content):
    """Return a folder with the adapter's weights and another config."""
    folder.mkdir()
    for path in adapter.iterdir():
        if path.name != CONFIG:
            (folder / path.name).symlink_to(path)
    (folder / CONFIG).write_text(json.dumps(content))
    return folder


def test_mistakes_in_adapter_configs(adapter, tiny, tmp_path, cases):
    content = json.loads((adapter / CONFIG).read_text())
    failures = []
    for number in range(cases(40)):
        changed = mutated(content, random.Random(number))
        folder = with_config(adapter, tmp_path / str(number), changed)
        problem = failure(lambda folder=folder: litft.load(folder, base_dir=tiny))
        if problem:
            failures.append(f"{number}: {problem}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(
    "pattern", [r"(\w+\.?)+\d", r"(a|\w|[a-z]|\.)*\d", r".*.*.*.*.*.*.*.*.*\d"]
)
def test_expressions_that_match_for_ever(adapter, tiny, tmp_path, pattern):
    content = json.loads((adapter / CONFIG).read_text())
    folder = with_config(
        adapter, tmp_path / "adapter", content | {"alpha_pattern": {pattern: 4}}
    )
    start = time.monotonic()
    message = failure(lambda: litft.load(folder, base_dir=tiny))
    assert message is None and time.monotonic() - start < 10
