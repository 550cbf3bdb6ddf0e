"""Examples in, steps out: `records` reads files, `samples` tokenizes and masks, `steps` orders and lays out batches."""
