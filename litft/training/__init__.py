"""Training: the loop, its setup and schedule, checkpoints of runs, the memory plan, metrics and
reports."""
