"""Every variation of every family with a method: a plan from its config alone, a dry run, and two
steps."""

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import STORIES, copy_tokenizer
from parity import ROWS, build

import litft
from litft.args import (
    AdapterArgs,
    AdapterFinetuneArgs,
    AdapterV2FinetuneArgs,
    DataArgs,
    EvalArgs,
    FullFinetuneArgs,
    LoRAFinetuneArgs,
    PlanArgs,
    TrainArgs,
)
from litft.commands.plan import plan_on_paper
from litft.pretrained.folder import resolve

METHODS = {
    "lora": LoRAFinetuneArgs(),
    "full": FullFinetuneArgs(),
    "adapter": AdapterFinetuneArgs(adapter=AdapterArgs(start_layer=1)),
    "adapter_v2": AdapterV2FinetuneArgs(),
}
VARIATIONS = [
    (family, variation) for family, (_, rows) in ROWS.items() for variation in rows
]
# in turn, so that every kind of network meets every method, and LoRA is tried most often
TURN = ("lora", "full", "lora", "adapter", "lora", "adapter_v2")
CASES = [(row, TURN[number % len(TURN)]) for number, row in enumerate(VARIATIONS)]
# its files name the model `backbone`, transformers' class `model`, which shows in the names of an
# adapter
CASES += [
    (row, "lora")
    for row in VARIATIONS
    if row[0] == "nemotron_h" and (row, "lora") not in CASES
]


def marks_of(number: int) -> list[pytest.MarkDecorator]:
    """Return the marks of a case: none for the fast tests; every second of the others is slow, and
    the rest runs once a week."""
    (family, _), method = CASES[number]
    if number % 13 == 0 or (family == "nemotron_h" and method == "lora"):
        return []
    return [pytest.mark.slow if number % 2 else pytest.mark.weekly]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    """Return a function that builds a variation's model folder on first use, with the tokenizer of
    tests/stories."""
    built = {}

    def folder(family: str, variation: str) -> Path:
        if (family, variation) not in built:
            kind, variations = ROWS[family]
            built[family, variation] = path = tmp_path_factory.mktemp("model")
            build(kind, path, **{**variations[variation], "vocab_size": 512})
            copy_tokenizer(STORIES, path)
        return built[family, variation]

    return folder


@pytest.mark.parametrize(
    ("family", "variation", "method"),
    [
        pytest.param(
            *row,
            method,
            id=f"{', '.join(row)}: {method}",
            marks=marks_of(number),
        )
        for number, (row, method) in enumerate(CASES)
    ],
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.halved
def test_every_family_with_every_method(
    folders, tmp_path, capsys, family, variation, method
):
    folder = folders(family, variation)
    attends = [layer.attention for layer in resolve(folder).config.layers]
    if method != "adapter" or any(attends[2:]):  # the layers that have a prefix by default
        assert (
            plan_on_paper(
                PlanArgs(str(folder), method, max_seq_length=16)
            ).fit.plan.memory.peak
            > 0
        )
    if method == "adapter" and not any(attends):
        pytest.skip("there is no attention to add a prefix to")
    (tmp_path / "story.txt").write_text("once upon a time there was a girl " * 20)
    args = replace(
        METHODS[method],
        checkpoint_dir=str(folder),
        out_dir=str(tmp_path / "run"),
        accelerator="cpu",
        data=DataArgs(path=[str(tmp_path / "story.txt")], max_seq_length=16),
        train=TrainArgs(max_steps=2, global_batch_size=2, learning_rate=1e-3),
        eval=EvalArgs(max_new_tokens=0),
    )
    if method == "lora":  # the dry run of a family does not depend on the method
        litft.finetune(replace(args, dry_run=True))
        assert "at its peak" in capsys.readouterr().out and not (tmp_path / "run").exists()
    assert litft.finetune(args).metrics["step"] == 2
