"""Turn a GGUF file of llama.cpp's, quantized or not, into a model folder that litft and transformers open:

python scripts/convert_gguf_checkpoint.py --checkpoint_dir SmolLM2-135M-Instruct.Q4_1.gguf --out_dir smollm2
"""

from litft.cli import run

if __name__ == "__main__":
    run("convert_gguf_checkpoint")
