"""The command `recipes`: the named settings for `--config`. Imports no torch."""

import sys

from rich.console import Console
from rich.table import Table

from litft.args import RecipesArgs
from litft.args.recipes import Recipe, recipe_file, recipes


def list_recipes(args: RecipesArgs) -> None:
    """Print a table of all recipes with the memory that the plan gives, or one recipe's file."""
    if args.show:
        print(recipe_file(args.show).read_text("utf-8"), end="")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("recipe", "what it does", "model", "planned memory"):
        table.add_column(title, overflow="fold")
    for recipe in recipes():
        table.add_row(recipe.name, recipe.title, recipe.model, memory(recipe))
    Console(
        width=None if sys.stdout and sys.stdout.isatty() else 10_000,
        highlight=False,
        markup=False,
    ).print(table)
    print(
        "\n"
        "planned memory: of each GPU, in bf16, for the model named here; another model of the size "
        "needs about the same"
    )
    print(
        "litft finetune lora --config RECIPE --checkpoint_dir MODEL --data.path FILE   (full-*: "
        "litft finetune full)"
    )


def memory(recipe: Recipe) -> str:
    """Return the planned peak and the memory of the GPUs in words."""
    devices = recipe.flags.get("devices", 1)
    return f"{recipe.planned_peak} of {recipe.memory_of_gpu}" + (
        f" on each of {devices} GPUs" if devices > 1 else ""
    )
