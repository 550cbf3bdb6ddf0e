"""Scores on preferences: how often, and by how much, a model finds the chosen answer more probable than the rejected one."""

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from litft.data.encoder import Sample
from litft.data.packing import Layout
from litft.model.transformer import GPT
from litft.training.objectives.objective import document_log_probs
from litft.training.objectives.pairs import wins


def score_preferences(model: GPT, samples: list[Sample], rows: int, name: str) -> tuple[dict[str, float], np.ndarray]:
    """Return the scores of the pairs, and their answers' summed log-probabilities, (N, 2): chosen and rejected.

    Scores compare summed log-probabilities, and with `per token` their means over an answer's tokens. rows: pairs per
    forward pass. Raise ValueError for answers with labels, which have no pairs.
    """
    if not all(sample.documents for sample in samples):
        raise ValueError("only pairs of a chosen and a rejected answer can be scored; give a file of pairs with --data.path")
    with tqdm(total=-(-len(samples) // rows), desc=f"{name}: preferences", disable=None) as bar:
        log_probs, lengths = document_log_probs(model, samples, Layout(rows), model.device, before_batch=bar.update)
    log_probs, lengths = log_probs.cpu(), lengths.cpu()
    means = _margins(log_probs / lengths)
    scores = {"pairs": len(samples)} | _margins(log_probs) | {f"{key} per token": value for key, value in means.items()}
    return scores, log_probs.numpy()


def relative_scores(base: np.ndarray, tuned: np.ndarray) -> dict[str, float]:
    """Return the scores of log-probabilities (N, 2) relative to the base's: those that DPO optimizes, with a beta of 1."""
    return {f"{key} over the base": value for key, value in _margins(torch.from_numpy(tuned - base)).items()}


def _margins(values: Tensor) -> dict[str, float]:
    """Return how often, and by how much, the first column (N, 2) exceeds the second."""
    margins = values[:, 0] - values[:, 1]
    return {"accuracy": float(wins(margins).mean()), "margin": float(margins.mean())}
