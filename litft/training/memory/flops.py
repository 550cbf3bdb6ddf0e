"""FLOPs of a training step, and the peak FLOP/s of a chip."""

import re
import time
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import torch
from torch import nn

from litft.data.sample import Sample
from litft.model.config import Chunk
from litft.model.mlp import ExpertLinear, MoE
from litft.model.transformer import GPT

# Dense peak TFLOP/s in bf16 and fp32 (TF32 is off), from the vendors' data sheets. The pattern
# matches a part of the name that torch reports. The first match wins: an L40S is not an L4, and
# "NVIDIA H100 PCIe" is not the faster SXM board.
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
    (r"\b(RTX )?A6000\b", 154.8, 38.7),
    (r"\bRTX 6000 Ada\b", 364.2, 91.1),
    (r"\bL40S\b", 362.05, 91.6),
    (r"\bL40\b", 181.05, 90.5),
    (r"\bL4\b", 121.0, 30.3),
    (r"\bRTX 5090\b", 209.5, 104.8),
    (r"\bRTX 4090\b", 165.2, 82.6),
    (r"\bRTX 4080\b", 97.5, 48.7),
    (r"\bRTX 4070\b", 58.3, 29.1),
    (r"\bRTX 4060\b", 30.2, 15.1),
    (r"\bRTX 3090\b", 71.0, 35.6),
    (r"\bRTX 3080\b", 59.5, 29.8),
    (r"\bRTX 3070\b", 40.6, 20.3),
    (r"\bRTX 3060\b", 25.5, 12.7),
    (r"\bMI300X\b", 1307.4, 163.4),
    (r"\bV100\b", 0.0, 15.7),
    (r"\bT4\b", 0.0, 8.1),
)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the peak FLOP/s of `device` in `precision`: from CHIPS, or measured on a CPU; None if
    unknown."""
    if device.type == "cpu":
        return _measure_matmul(torch.bfloat16 if precision.startswith("bf16") else torch.float32)
    return chip_peak_flops(torch.cuda.get_device_name(device), precision)


def chip_peak_flops(chip: str, precision: str) -> float | None:
    """Return the peak FLOP/s of the chip with this name, from CHIPS; None if it is not listed.

    RTX4090 is RTX 4090.

    A chip without bf16 computes in fp32.
    """
    for pattern, bf16, fp32 in CHIPS:
        if re.search(pattern.replace(" ", "[ _-]?"), chip, re.IGNORECASE):
            return (bf16 if bf16 and precision.startswith("bf16") else fp32) * 1e12
    return None


def chip_names() -> list[str]:
    """Return the names of the chips in CHIPS."""
    plain = [
        pattern.replace("(100|800)", "100").replace("(RTX )?", "RTX ") for pattern, _, _ in CHIPS
    ]
    return [pattern.replace("\\b", "") for pattern in plain]


def check_chip(chip: str | None) -> None:
    """Raise ValueError for a chip whose peak is not known."""
    if chip is not None and chip_peak_flops(chip, "bf16") is None:
        raise ValueError(
            f"--chip {chip}: its peak is not known; known chips: {', '.join(chip_names())}"
        )


@cache
def _measure_matmul(
    dtype: torch.dtype, size: int = 1024, repeats: int = 30, limit: float = 0.3
) -> float:
    """Return the FLOP/s of the fastest of up to `repeats` products within `limit` seconds: other
    programs interfere."""
    a = torch.randn(size, size).to(dtype)
    # warm-up, whose time is not counted
    a @ a
    seconds: list[float] = []
    while len(seconds) < repeats and sum(seconds) < limit:
        start = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


class Flops:
    """FLOPs of training on a sample: forward, input gradients, and weight gradients of trained
    weights.

    Attention counts only the keys that a query attends to, the head only the target tokens.
    Recomputation is not counted.
    """

    def __init__(self, model: GPT) -> None:
        head = model.lm_head.weight
        mlps = []
        for block in model.blocks:
            if block.mlp is not None:
                mlps.append(block.mlp)
        # selective recomputation runs these matrices again
        mlp_modules = set()
        for mlp in mlps:
            for module in mlp.modules():
                mlp_modules.add(id(module))
        matrices = []
        for linear, fraction in _linears(model):
            for name, parameter in linear.named_parameters():
                # the head is counted by targets, and a bias multiplies nothing
                if name != "bias" and parameter is not head:
                    matrices.append(
                        (
                            _num_weights(linear, name, parameter) * fraction,
                            parameter.requires_grad,
                            id(linear) in mlp_modules,
                        )
                    )

        # sequence mixers other than attention count their own FLOPs
        mixers = sum(
            block.mixer.flops_per_token for block in model.blocks if block.mixer is not None
        )
        # 2 FLOPs for each weight: forward, input gradient,
        # and the weight's gradient if it is trained
        self.per_token = (
            sum(2 * size * (3 if trained else 2) for size, trained, _ in matrices) + 3 * mixers
        )
        # extra forward FLOPs per token for each kind of recomputation
        self.recompute_per_token = {
            "none": 0.0,
            "selective": sum(2 * size for size, _, in_mlp in matrices if in_mlp),
            "full": sum(2 * size for size, _, _ in matrices) + mixers,
        }
        self.per_target = 2 * head.numel() * (3 if head.requires_grad else 2)
        self.forward_per_target = 2 * head.numel()
        config = model.config
        # QK and PV of each pair of a query and a key; backward costs twice the forward
        self.windows = [(layer.window, 2 * config.pair_dims(layer) * 3) for layer in config.layers]

    def __call__(self, samples: Sequence[Sample]) -> float:
        """Return the FLOPs of one step over `samples`, and of a forward pass over their
        mismatches."""
        mismatches = []
        for sample in samples:
            if sample.mismatch is not None:
                mismatches.append(sample.mismatch)
        forward = self.forward(*_counts(mismatches)) if mismatches else 0.0
        return self.for_lengths(*_counts(samples)) + forward

    def for_lengths(self, lengths: Sequence[int], supervised: Sequence[int]) -> float:
        """Return the FLOPs over documents with these lengths, and counts of target tokens."""
        return float(
            self.per_token * np.sum(lengths)
            + self.per_target * np.sum(supervised)
            + self._attention(lengths)
        )

    def forward(self, lengths: Sequence[int], supervised: Sequence[int]) -> float:
        """Return the FLOPs of a forward pass without a backward pass."""
        head = self.forward_per_target * np.sum(supervised)
        per_token = self.recompute_per_token["full"]
        # the forward pass is a third of what `_attention` returns
        return float(per_token * np.sum(lengths) + head + self._attention(lengths) / 3)

    def _attention(self, lengths: Sequence[int]) -> float:
        """Return the FLOPs of attention, forward and backward."""
        lengths = np.asarray(lengths, np.float64)
        return sum(
            _attention_pairs(lengths, window).sum() * per_pair for window, per_pair in self.windows
        )


def _counts(samples: Sequence[Sample]) -> tuple[list[int], list[int]]:
    """Return the lengths of the samples' documents, and each sample's number of target tokens."""
    lengths = []
    for sample in samples:
        lengths.extend(sample.document_lengths)
    return lengths, [sample.supervised for sample in samples]


def _num_weights(linear: nn.Linear | ExpertLinear, name: str, parameter: nn.Parameter) -> int:
    """Return the number of elements of a parameter, before quantization packed it."""
    if name != "weight":
        return parameter.numel()
    return linear.in_features * linear.out_features * getattr(linear, "count", 1)


def _linears(model: GPT) -> Iterable[tuple[nn.Module, float]]:
    """Yield every Linear with the fraction of it that a token is multiplied with: top_k / count for
    experts, else 1."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            yield module, 1.0
        elif isinstance(module, MoE):
            active = module.top_k / module.count
            yield from ((linear, active) for linear in module.experts.children())


def _attention_pairs(tokens: np.ndarray, window: int | Chunk | None) -> np.ndarray:
    """Return the number of (query, key) pairs of causal attention over sequences of `tokens`
    tokens."""
    # each chunk attends to itself alone, and the last one may be shorter
    if isinstance(window, Chunk):
        count, last = np.divmod(tokens, window.size)
        return (count * window.size * (window.size + 1) + last * (last + 1)) / 2

    # the first `span` queries have 1 to `span` keys, and each later one has `span`
    span = np.minimum(window, tokens) if window else tokens
    return span * (span + 1) / 2 + (tokens - span) * span
