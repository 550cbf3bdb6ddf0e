"""Results for others: merged folders, Hugging Face and GGUF exports, model cards, uploads."""
