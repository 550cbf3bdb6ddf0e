"""Fine-tune a model with LLaMA-Adapter.

python finetune/adapter.py                                        # the embedded demo
python finetune/adapter.py --checkpoint_dir DIR --data.path FILE
"""

from litft.cli import run

if __name__ == "__main__":
    run("finetune adapter")
