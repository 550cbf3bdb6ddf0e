"""The JSON Schema of the flags: it accepts what the commands read, and refuses what they refuse."""

import json

import pytest
import yaml
from conftest import ROOT
from jsonschema import Draft202012Validator

from litft.args import ARGS
from litft.args.finetune_commands import FINETUNE
from litft.args.flag_types import types_of_flags
from litft.cli import run
from litft.pretrained.folder import DEMO

RECIPES = sorted((ROOT / "litft" / "recipes").glob("*.yaml"))


def schema(capsys, *words):
    run("schema", list(words))
    return json.loads(capsys.readouterr().out)


def test_every_command_has_a_schema_of_its_flags(capsys):
    schemas = schema(capsys, "--command", "all")
    assert schemas.keys() == ARGS.keys()
    for command, document in schemas.items():
        Draft202012Validator.check_schema(document)
        for flag in types_of_flags(ARGS[command]):
            found = document
            for part in flag.split("."):
                found = found["properties"][part]
            assert found["description"]
            assert Draft202012Validator(found).is_valid(found["default"]), flag


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_schema_accepts_recipes(path, capsys):
    recipe = yaml.safe_load(path.read_text("utf-8"))
    document = schema(capsys, "--command", f"finetune {recipe['recipe']['method']}")
    Draft202012Validator(document).validate(recipe)


@pytest.mark.parametrize("method", FINETUNE)
def test_the_schema_accepts_the_flags_that_a_run_writes(method, capsys):
    document = schema(capsys, "--command", f"finetune {method}")
    Draft202012Validator(document).validate(
        yaml.safe_load((DEMO / f"{method}.yaml").read_text())
    )
    with pytest.raises(SystemExit):
        run(f"finetune {method}", ["--print_config"])
    Draft202012Validator(document).validate(yaml.safe_load(capsys.readouterr().out))


@pytest.mark.parametrize(
    "flags",
    [
        {"lora": {"targets": "q_proj,v_proj"}},
        {"lora": {"targets": ["q_proj", "v_proj"]}},
        {"data": {"path": [{"path": "a.jsonl", "weight": 2}, "b.jsonl"]}},
        {"train": {"micro_batch_size": "auto", "epochs": 2, "betas": [0.9, 0.99]}},
    ],
    ids=str,
)
def test_the_schema_accepts_lists_and_words(flags, capsys):
    Draft202012Validator(schema(capsys)).validate(flags)


@pytest.mark.parametrize(
    "flags",
    [
        {"quantise": "nf4"},
        {"quantize": "nf5"},
        {"train": {"epochs": "three"}},
        {"train": {"learning_rates": 1}},
        {"lora": {"r": 2.5}},
        {"resume": "perhaps"},
    ],
    ids=str,
)
def test_the_schema_refuses_what_the_command_refuses(flags, capsys, tmp_path):
    assert not Draft202012Validator(schema(capsys)).is_valid(flags)
    path = tmp_path / "flags.yaml"
    path.write_text(yaml.safe_dump(flags))
    with pytest.raises(SystemExit) as stopped:
        run("finetune lora", ["--config", str(path)])
    assert stopped.value.code == 2


def test_a_command_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        run("schema", ["--command", "train"])
    assert (
        "--command train: no such command; there are all, finetune lora"
        in capsys.readouterr().err
    )
