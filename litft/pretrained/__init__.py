"""Model and adapter folders: what is in them, and networks built and loaded from them."""
