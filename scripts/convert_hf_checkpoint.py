"""Rewrite a model folder (.bin, odd shards, mixed dtypes, MXFP4, a multimodal one) as clean safetensors in one dtype:

python scripts/convert_hf_checkpoint.py --checkpoint_dir model --out_dir clean --precision bf16
"""

from litft.cli import run

if __name__ == "__main__":
    run("convert_hf_checkpoint")
