"""Export a run or a model folder as a GGUF file for llama.cpp and Ollama: merged, or the LoRA
adapter only.

python scripts/convert_to_gguf.py --checkpoint_dir out/lora --out_dir gguf --outtype q8_0
"""

from litft.cli import run

if __name__ == "__main__":
    run("convert_to_gguf")
