"""Reward functions: built in or from a file, called in processes of their own. No torch."""
