"""Download a model or an adapter from the Hugging Face hub. An interrupted download continues.

python scripts/download.py --repo_id HuggingFaceTB/SmolLM2-135M-Instruct --out_dir smollm2
"""

from litft.cli import run

if __name__ == "__main__":
    run("download")
