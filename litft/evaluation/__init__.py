"""Scores of models: losses and answers on data of one's own, and the tasks of lm-evaluation-harness."""
