"""List the recipes: settings for --config, by size of the model and memory of the GPU.

python scripts/recipes.py
"""

from litft.cli import run

if __name__ == "__main__":
    run("recipes")
