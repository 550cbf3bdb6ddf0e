"""Recipes: `--config NAME`, `litft recipes`, and the plan of every recipe."""

from itertools import pairwise

import pytest
import yaml
from conftest import ROOT, script

from litft.args import FINETUNE, PlanArgs, parse_size
from litft.args.parser import parse
from litft.args.recipes import RECIPES, Recipe, names, recipes
from litft.commands.plan import plan_on_paper
from litft.training.memory.plan import USABLE_FRACTION

CONFIGS = ROOT / "scripts" / "configs"
USES = ["--checkpoint_dir", "model", "--data.path", "data.jsonl"]


def plan_args(recipe: Recipe) -> PlanArgs:
    """Return the flags of `plan` for a recipe and its model."""
    args = parse(FINETUNE[recipe.method], ["--config", recipe.name, *USES])
    return PlanArgs(
        checkpoint_dir=str(
            CONFIGS / recipe.model.split("/")[1].lower().removesuffix("-instruct")
        ),
        method=recipe.method,
        precision="bf16-true" if args.precision == "bf16-true" else "bf16",
        quantize=args.quantize,
        optimizer=args.train.optimizer,
        activation_checkpointing=args.train.activation_checkpointing,
        micro_batch_size=args.train.micro_batch_size,
        max_seq_length=args.data.max_seq_length,
        devices=args.devices,
        strategy=args.strategy.replace("auto", "ddp"),
        budget=recipe.memory_of_gpu,
    )


@pytest.mark.parametrize("recipe", recipes(), ids=names())
@pytest.mark.halved
def test_a_recipe_fits_into_its_memory_and_states_it(recipe):
    """`plan --budget` keeps the recipe's settings, and its peak is the one that `litft recipes`
    prints."""
    args = plan_args(recipe)
    fit = plan_on_paper(args).fit
    assert (fit.rows, fit.recomputed) == (
        args.micro_batch_size,
        args.activation_checkpointing,
    )
    assert (fit.quantize, fit.cpu_offload) == (args.quantize, "none")
    assert fit.plan.memory.peak <= USABLE_FRACTION * parse_size(recipe.memory_of_gpu)
    stated = float(recipe.planned_peak.removesuffix(" GiB")) * 2**30
    # cuBLAS's workspace depends on torch's version
    assert abs(stated - fit.plan.memory.peak) <= 0.09 * 2**30


def test_recipes_cover_the_common_gpus():
    single = {
        recipe.memory_of_gpu for recipe in recipes() if recipe.flags.get("devices", 1) == 1
    }
    assert single == {"8GB", "12GB", "16GB", "24GB", "48GB", "80GB"}
    assert {"lora", "full"} == {
        recipe.method for recipe in recipes() if recipe.flags.get("devices") == 8
    }


def test_a_recipe_is_read_like_a_file_and_later_flags_win(tmp_path):
    args = parse(
        FINETUNE["lora"],
        ["--config", "qlora-8b-24gb", *USES, "--train.micro_batch_size", "1"],
    )
    assert (args.quantize, args.data.max_seq_length, args.train.micro_batch_size) == (
        "nf4",
        8192,
        1,
    )
    copy = tmp_path / "mine.yaml"
    copy.write_text((RECIPES / "qlora-8b-24gb.yaml").read_text())
    assert (
        parse(FINETUNE["lora"], ["--config", str(copy), *USES]).data.max_seq_length == 8192
    )
    for description in ("recipe: mine\n", "recipe:\n  title: mine\n"):
        copy.write_text(f"{description}quantize: nf4\n")
        assert parse(FINETUNE["lora"], ["--config", str(copy), *USES]).quantize == "nf4"


@pytest.mark.parametrize(
    ("method", "words", "message"),
    [
        (
            "full",
            ["qlora-8b-24gb", *USES],
            "--config qlora-8b-24gb is a recipe of finetune/lora.py; use that command",
        ),
        (
            "lora",
            ["qlora-8b-24", *USES],
            "no such file or recipe; did you mean qlora-8b-24gb?",
        ),
        (
            "lora",
            ["qlora-8b-24gb", "--resume", "false"],
            "is a recipe; add the model and the data",
        ),
        (
            "lora",
            ["qlora-8b-24gb"],
            "is a recipe; add the model and the data: --checkpoint_dir and --data.path",
        ),
    ],
)
def test_a_wrong_recipe_is_explained(method, words, message):
    with pytest.raises(ValueError, match="--config") as error:
        parse(FINETUNE[method], ["--config", *words])
    assert message in str(error.value)


def test_the_list_names_every_recipe_with_its_memory(tmp_path):
    lines = script("scripts/recipes.py", cwd=tmp_path).stdout.splitlines()
    for recipe, line in zip(recipes(), lines[1:], strict=False):
        assert (
            line.split()[0] == recipe.name
            and f"{recipe.planned_peak} of {recipe.memory_of_gpu}" in line
        )
    smaller_first = [
        (recipe.flags.get("devices", 1), int(recipe.memory_of_gpu[:-2]))
        for recipe in recipes()
    ]
    assert all(first <= second for first, second in pairwise(smaller_first))
    shown = script("scripts/recipes.py", "--show", "full-8b-8x80gb", cwd=tmp_path).stdout
    assert yaml.safe_load(shown)["devices"] == 8
