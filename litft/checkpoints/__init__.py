"""Files of weights: Hugging Face's and PEFT's formats, the conversion of names and layouts, the hub."""
