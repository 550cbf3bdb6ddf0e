"""Run a grid of settings with several seeds, and say which differences are real.

python scripts/sweep.py --config base.yaml --grid lora.r=8,32 --seeds 3
"""

from litft.cli import run

if __name__ == "__main__":
    run("sweep")
