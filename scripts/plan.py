"""Say what training a model will need: memory by kind, FLOPs, hours:

python scripts/plan.py --checkpoint_dir DIR --method lora --chip H100
"""

from litft.cli import run

if __name__ == "__main__":
    run("plan")
