"""Merge a LoRA adapter into its base model.

python scripts/merge_lora.py --checkpoint_dir out/lora/final --out_dir merged
"""

from litft.cli import run

if __name__ == "__main__":
    run("merge_lora")
