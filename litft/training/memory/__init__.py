"""Memory, time and communication of a run: predicted, measured, and what they decide."""
