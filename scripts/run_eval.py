"""Evaluate a model next to its base model, on lm-evaluation-harness tasks or on your own examples.

python scripts/run_eval.py --checkpoint_dir DIR --tasks hellaswag --data.path FILE
"""

from litft.cli import run

if __name__ == "__main__":
    run("run_eval")
