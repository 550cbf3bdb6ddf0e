"""GGUF, llama.cpp's format: models and their tokenizers to Hugging Face's folders, and runs of litft to GGUF."""
