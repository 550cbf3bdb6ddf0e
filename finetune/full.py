"""Fine-tune all weights of a model.

python finetune/full.py                                        # the embedded demo
python finetune/full.py --checkpoint_dir DIR --data.path FILE
"""

from litft.cli import run

if __name__ == "__main__":
    run("finetune full")
