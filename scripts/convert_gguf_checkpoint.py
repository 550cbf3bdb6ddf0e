"""Convert a GGUF file of llama.cpp, quantized or not, to a model folder for litft and transformers.

python scripts/convert_gguf_checkpoint.py --checkpoint_dir SmolLM2-135M-Instruct.Q4_1.gguf --out_dir
smollm2
"""

from litft.cli import run

if __name__ == "__main__":
    run("convert_gguf_checkpoint")
