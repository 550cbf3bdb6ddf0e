"""Decoding: sampling, speculation, streaming, tensor-parallel decoding, and the commands that generate."""
