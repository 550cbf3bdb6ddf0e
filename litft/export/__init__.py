"""Export of results: merged folders, Hugging Face and GGUF formats, model cards and uploads."""
