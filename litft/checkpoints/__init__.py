"""Weight files in Hugging Face and PEFT format, conversion of tensor names and layouts, and the
Hugging Face hub."""
