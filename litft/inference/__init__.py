"""Inference: sampling, speculative and tensor-parallel decoding, streaming, and the commands
`generate` and `chat`."""
