"""Export a run or one of its checkpoints for Hugging Face libraries: merged, or the adapter only.

python scripts/convert_to_hf.py --checkpoint_dir out/lora/checkpoints/step-000200 --out_dir model
--shard_gb 2
"""

from litft.cli import run

if __name__ == "__main__":
    run("convert_to_hf")
