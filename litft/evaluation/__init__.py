"""Evaluation: loss and answers on your own examples, and the tasks of lm-evaluation-harness."""
