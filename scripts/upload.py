"""Upload the result of a run to the Hugging Face hub with a generated model card. --dry_run only
lists the files.

python scripts/upload.py --checkpoint_dir out/lora --repo_id me/my-adapter --dry_run
"""

from litft.cli import run

if __name__ == "__main__":
    run("upload")
