"""Convert a model folder (.bin files, mixed dtypes, MXFP4, multimodal) to safetensors of one dtype.

python scripts/convert_hf_checkpoint.py --checkpoint_dir model --out_dir clean --precision bf16
"""

from litft.cli import run

if __name__ == "__main__":
    run("convert_hf_checkpoint")
