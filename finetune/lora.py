"""Fine-tune a model with LoRA.

python finetune/lora.py                                        # the embedded demo
python finetune/lora.py --checkpoint_dir DIR --data.path FILE
"""

from litft.cli import run

if __name__ == "__main__":
    run("finetune lora")
