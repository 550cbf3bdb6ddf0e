"""Scores on preferences: how often, and by how much, a model finds the chosen answer more probable than the rejected one."""

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from litft.data.encoder import Sample
from litft.data.packing import Layout
from litft.model.transformer import GPT
from litft.training.objectives.objective import sequence_log_probs
from litft.training.objectives.pairs import wins


@torch.no_grad()
def score_preferences(model: GPT, samples: list[Sample], rows: int, name: str) -> tuple[dict[str, float], np.ndarray]:
    """Return the scores of the pairs, and their answers' summed log-probabilities, (N, 2): chosen and rejected.

    Scores compare summed log-probabilities, and with `per token` their means over an answer's tokens. rows: pairs per
    forward pass. Raise ValueError for answers with labels, which have no pairs.
    """
    if not all(sample.documents for sample in samples):
        raise ValueError("only pairs of a chosen and a rejected answer can be scored; give a file of pairs with --data.path")
    log_probs, lengths = (torch.zeros(len(samples), 2, dtype=torch.float64) for _ in range(2))
    layout = Layout(rows)
    for batch_rows in tqdm(layout.plan([sample.tokens.numel() for sample in samples]), f"{name}: preferences", disable=None):
        order = [index for row in batch_rows for index in row]
        batch = layout.collate_rows([[samples[index] for index in row] for row in batch_rows]).to(model.device)
        log_probs[order], lengths[order] = (values.view(-1, 2).cpu() for values in sequence_log_probs(model, batch))
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
