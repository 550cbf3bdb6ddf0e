"""GGUF, llama.cpp's file format: GGUF files to Hugging Face folders, and models and LoRA adapters
to GGUF files."""
