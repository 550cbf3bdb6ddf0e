"""Fine-tune a model with LLaMA-Adapter v2: prefixes, a scale and bias for every Linear, and the
norms.

python finetune/adapter_v2.py                                        # the embedded demo
python finetune/adapter_v2.py --checkpoint_dir DIR --data.path FILE
"""

from litft.cli import run

if __name__ == "__main__":
    run("finetune adapter_v2")
