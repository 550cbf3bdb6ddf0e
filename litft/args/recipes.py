"""Recipes: named settings for --config, one YAML file each in litft/recipes; and the flags of
`recipes`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

RECIPES = Path(__file__).parent.parent / "recipes"
# the entry of a recipe's file that describes it; all others are flags
KEY = "recipe"


@dataclass
class RecipesArgs:
    """List the recipes: settings for `--config NAME`, by size of the model and memory of the
    GPU."""

    show: str | None = None
    """Print the file of this recipe, to be copied and changed."""

    def problems(self) -> list[str]:
        """Return the problem of a name that no recipe has."""
        is_known = self.show is None or is_recipe(self.show)
        if is_known:
            return []
        return [f"--show {self.show}: no such recipe; there are {', '.join(names())}"]


class Recipe(NamedTuple):
    """What a recipe is for."""

    name: str
    title: str
    method: str  # the fine-tuning command
    model: str  # the hub id of a model of this size
    memory_of_gpu: str  # of each one
    # that model's memory according to the plan
    planned_peak: str
    flags: dict[str, Any]  # nested by group


def names() -> list[str]:
    """Return the names of the recipes: fewer GPUs first, then less memory, then smaller models."""
    return [recipe.name for recipe in recipes()]


def recipes() -> list[Recipe]:
    """Return all recipes, in the order of `names`."""
    return sorted(map(read_recipe, RECIPES.glob("*.yaml")), key=_size)


def is_recipe(name: str) -> bool:
    """Return whether a recipe has this name. Reads no file."""
    return any(path.stem == name for path in RECIPES.glob("*.yaml"))


def recipe_file(name: str) -> Path:
    """Return the file of a recipe."""
    return RECIPES / f"{name}.yaml"


def read_recipe(path: Path) -> Recipe:
    """Return the recipe in a file."""
    content = yaml.safe_load(path.read_text("utf-8"))
    # what is left after the description are flags
    return Recipe(path.stem, **content.pop(KEY), flags=content)


def _size(recipe: Recipe) -> tuple[int, int, float]:
    """Return the number of GPUs, the memory of each in GB, and the planned peak in GiB."""
    memory = recipe.memory_of_gpu.removesuffix("GB")
    peak = recipe.planned_peak.split()[0]
    return recipe.flags.get("devices", 1), int(memory), float(peak)
