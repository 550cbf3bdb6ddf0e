"""Estimate the memory, FLOPs and hours that training a model will take. Nothing is trained.

python scripts/plan.py --checkpoint_dir DIR --method lora --chip H100
"""

from litft.cli import run

if __name__ == "__main__":
    run("plan")
