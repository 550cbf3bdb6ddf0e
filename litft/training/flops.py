"""What a step computes: the FLOPs a method needs, and what a chip can do."""

import re
import time
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import torch
from torch import nn

from litft.data.encoder import Sample
from litft.model.mlp import ExpertLinear, MoE
from litft.model.transformer import GPT

# Dense peak TFLOP/s in bf16 and fp32 (TF32 is off) by a part of the name that torch reports: the makers' data sheets.
# The first match wins, so that an L40S is not taken for an L4, nor "NVIDIA H100 PCIe" for the faster SXM board.
CHIPS: tuple[tuple[str, float, float], ...] = (
    (r"\bB300\b", 2250.0, 75.0),
    (r"\bGB200\b", 2500.0, 80.0),
    (r"\bB200\b", 2250.0, 75.0),
    (r"\bGH200\b", 989.4, 66.9),
    (r"\bH200\b", 989.4, 66.9),
    (r"\bH100 NVL\b", 835.0, 60.0),
    (r"\bH100 PCIe\b", 756.0, 51.2),
    (r"\bH(100|800)\b", 989.4, 66.9),
    (r"\bH20\b", 148.0, 44.0),
    (r"\bA(100|800)\b", 312.0, 19.5),
    (r"\bA10G\b", 70.0, 31.5),
    (r"\bA10\b", 125.0, 31.2),
    (r"\bA40\b", 149.7, 37.4),
    (r"\bRTX A6000\b", 154.8, 38.7),
    (r"\bRTX 6000 Ada\b", 364.2, 91.1),
    (r"\bL40S\b", 362.05, 91.6),
    (r"\bL40\b", 181.05, 90.5),
    (r"\bL4\b", 121.0, 30.3),
    (r"\bRTX 5090\b", 209.5, 104.8),
    (r"\bRTX 4090\b", 165.2, 82.6),
    (r"\bRTX 4080\b", 97.5, 48.7),
    (r"\bRTX 3090\b", 71.0, 35.6),
    (r"\bV100\b", 0.0, 15.7),
    (r"\bT4\b", 0.0, 8.1),
)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """FLOP/s that `device` can do at most in `precision`: from CHIPS, or on a CPU measured; None where not known."""
    if device.type == "cpu":
        return _measure_matmul(torch.bfloat16 if precision.startswith("bf16") else torch.float32)
    return peak_of(torch.cuda.get_device_name(device), precision)


def peak_of(chip: str, precision: str) -> float | None:
    """FLOP/s that a chip of this name can do at most, by the table; None where it is not there."""
    for pattern, bf16, fp32 in CHIPS:
        if re.search(pattern, chip, re.IGNORECASE):
            return (bf16 if precision.startswith("bf16") else fp32) * 1e12 or None
    return None


@cache
def _measure_matmul(dtype: torch.dtype, size: int = 1024, repeats: int = 30, limit: float = 0.3) -> float:
    """FLOP/s of the fastest of some matrix products, at most `limit` seconds of them: other programs come and go."""
    a = torch.randn(size, size).to(dtype)
    a @ a
    seconds: list[float] = []
    while len(seconds) < repeats and sum(seconds) < limit:
        start = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


class Flops:
    """FLOPs that training a sample needs: forward, input gradients, and weight gradients where weights are trained.

    Attention counts the keys that a query really sees, the head only the supervised tokens; recomputation counts nothing.
    """

    def __init__(self, model: GPT) -> None:
        head = model.lm_head.weight
        inner = {id(module) for block in model.blocks for module in block.mlp.modules()}
        matrices = [
            (_size(m, n, p) * part, p.requires_grad, id(m) in inner)
            for m, part in _linears(model)
            for n, p in m.named_parameters()
            if n != "bias" and p is not head
        ]
        self.per_token = sum(2 * size * (3 if trained else 2) for size, trained, _ in matrices)
        # of a token's forward, which recomputation makes again
        self.forward = {
            "none": 0.0,
            "selective": sum(2 * size for size, _, in_mlp in matrices if in_mlp),
            "full": sum(2 * size for size, _, _ in matrices),
        }
        self.per_target = 2 * head.numel() * (3 if head.requires_grad else 2)
        config = model.config
        self.windows = [layer.window for layer in config.layers]
        self.per_pair = 2 * 2 * config.n_heads * config.head_dim * 3  # QK and PV; their backward is twice the forward

    def __call__(self, samples: Sequence[Sample]) -> float:
        """FLOPs of one step over `samples`."""
        return self.of([sample.tokens.numel() for sample in samples], [sample.supervised for sample in samples])

    def of(self, lengths: Sequence[int], supervised: Sequence[int]) -> float:
        """FLOPs over samples of these lengths, with so many tokens that the loss counts."""
        lengths = np.asarray(lengths, np.float64)
        pairs = sum(_pairs(lengths, window).sum() for window in self.windows)
        return float(self.per_token * lengths.sum() + self.per_target * np.sum(supervised) + self.per_pair * pairs)


def _size(linear: nn.Linear | ExpertLinear, name: str, parameter: nn.Parameter) -> int:
    """How many numbers a parameter stands for; a weight may be packed."""
    if name != "weight":
        return parameter.numel()
    return linear.in_features * linear.out_features * getattr(linear, "count", 1)


def _linears(model: GPT) -> Iterable[tuple[nn.Module, float]]:
    """Every Linear, and the part of its rows that a token is multiplied with: of experts, the chosen ones."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            yield module, 1.0
        elif isinstance(module, MoE):
            chosen = module.top_k / module.count
            yield from ((linear, chosen) for linear in module.experts.children())


def _pairs(tokens: np.ndarray, window: int | None) -> np.ndarray:
    """How many (query, key) pairs causal attention over so many tokens has."""
    w = np.minimum(window, tokens) if window else tokens
    return w * (w + 1) / 2 + (tokens - w) * w
