"""Optimizers, and what they keep in memory."""
