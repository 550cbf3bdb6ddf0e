"""Put a run's result on the Hugging Face hub, with a model card written from the run; --dry_run shows what would go:

python scripts/upload.py --checkpoint_dir out/lora --repo_id me/my-adapter --dry_run
"""

from litft.cli import run

if __name__ == "__main__":
    run("upload")
