"""FLOPs of a training step, and the peak FLOP/s of a chip."""

import re
import time
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from litft.data.sample import Sample
from litft.model.blocks import Block
from litft.model.config import Chunk
from litft.model.mlp import ExpertLinear, MoE
from litft.model.transformer import GPT

# of tokens: one number for each document, or for each sample
Counts = Sequence[int] | np.ndarray

# part of a step's time for computing norms and gates again, by the bytes that they move (Llama 3.1
# 8B, 8,192 tokens, the bandwidth and the step of an H200: 7 of 530 ms)
ELEMENTWISE_COST = 0.015

# Dense peak TFLOP/s in bf16 (and fp16) and in fp32 (TF32 is off), from the vendors' data sheets.
# The pattern matches a part of the name that torch reports. The first match wins: an L40S is not an
# L4, and "NVIDIA H100 PCIe" is not the faster SXM board.
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
    (r"\b(RTX )?5090\b", 209.5, 104.8),
    (r"\b(RTX )?4090\b", 165.2, 82.6),
    (r"\b(RTX )?4080\b", 97.5, 48.7),
    (r"\b(RTX )?4070\b", 58.3, 29.1),
    (r"\b(RTX )?4060\b", 30.2, 15.1),
    (r"\b(RTX )?3090\b", 71.0, 35.6),
    (r"\b(RTX )?3080\b", 59.5, 29.8),
    (r"\b(RTX )?3070\b", 40.6, 20.3),
    (r"\b(RTX )?3060\b", 25.5, 12.7),
    (r"\bMI300X\b", 1307.4, 163.4),
    (r"\bV100\b", 0.0, 15.7),
    (r"\bT4\b", 0.0, 8.1),
)
OTHER_CHIP = re.compile(r"[ _-]?(Ti|SUPER|Laptop|Max-Q|D)\b", re.IGNORECASE)
# of chips with fp16 but not bf16
FP16_PEAKS = {r"\bV100\b": 125.0, r"\bT4\b": 65.0}


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the peak FLOP/s of `device` in `precision`: from CHIPS, or measured on a CPU; None if
    unknown."""
    if device.type == "cpu":
        if precision.startswith("bf16"):
            return _measure_matmul(torch.bfloat16)
        if precision == "fp16":
            return _measure_matmul(torch.float16)
        return _measure_matmul(torch.float32)
    return chip_peak_flops(torch.cuda.get_device_name(device), precision)


def chip_peak_flops(chip: str, precision: str) -> float | None:
    """Return the peak FLOP/s of the chip with this name, from CHIPS; None if it is not listed.

    RTX4090 is RTX 4090.

    A chip without bf16 computes in fp32.
    """
    for pattern, bf16, fp32 in CHIPS:
        found = re.search(pattern.replace(" ", "[ _-]?"), chip, re.IGNORECASE)
        if found:
            # another chip, of nearly the same name
            if OTHER_CHIP.match(chip[found.end() :]):
                return None
            if bf16 and precision != "fp32":
                return bf16 * 1e12
            # without bf16, which such a chip would compute in fp32
            if precision == "fp16":
                return FP16_PEAKS.get(pattern, fp32) * 1e12
            return fp32 * 1e12
    return None


def chip_names() -> list[str]:
    """Return the names of the chips in CHIPS."""
    names = []
    for pattern, _, _ in CHIPS:
        name = pattern.replace("(100|800)", "100").replace("(RTX )?", "RTX ")
        names.append(name.replace("\\b", ""))
    return names


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
    torch.matmul(a, a)
    seconds: list[float] = []
    while len(seconds) < repeats and sum(seconds) < limit:
        start = time.perf_counter()
        torch.matmul(a, a)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


class Flops:
    """FLOPs of training on a sample: forward, input gradients, and weight gradients of trained
    weights.

    Attention counts only the keys that a query attends to, the head only the target tokens.
    Recomputation is not counted.
    """

    def __init__(self, model: GPT) -> None:
        # of each matrix, for a token
        forward = []
        forward_of_mlps = []
        forward_and_backward = []
        for matrix in _matrices(model):
            # 2 FLOPs for each weight
            flops = 2 * matrix.size
            forward.append(flops)
            if matrix.in_mlp:
                forward_of_mlps.append(flops)
            forward_and_backward.append(flops * _num_products(matrix.trained))
        # sequence mixers other than attention count their own FLOPs
        mixers = 0
        for block in model.blocks:
            assert isinstance(block, Block)  # a ModuleList does not say so
            if block.mixer is not None:
                mixers += block.mixer.flops_per_token
        self.per_token = sum(forward_and_backward) + 3 * mixers
        # extra forward FLOPs per token for each kind of recomputation
        self.recompute_per_token = {
            "none": 0.0,
            "elementwise": ELEMENTWISE_COST * self.per_token,
            "selective": sum(forward_of_mlps),
            "full": sum(forward) + mixers,
            "tiled": sum(forward) + mixers + sum(forward_of_mlps),
        }
        head = model.lm_head.weight
        self.forward_per_target = 2 * head.numel()
        self.per_target = self.forward_per_target * _num_products(head.requires_grad)
        config = model.config
        # QK and PV of each pair of a query and a key; backward costs twice the forward
        self.windows = [
            (layer.window, 2 * config.pair_dims(layer) * 3) for layer in config.layers
        ]

    def __call__(self, samples: Sequence[Sample]) -> float:
        """Return the FLOPs of one step over `samples`, and of a forward pass over their
        mismatches."""
        mismatches = []
        for sample in samples:
            if sample.mismatch is not None:
                mismatches.append(sample.mismatch)
        if mismatches:
            forward = self.forward(*_counts(mismatches))
        else:
            forward = 0.0
        return self.for_lengths(*_counts(samples)) + forward

    def for_lengths(self, lengths: Counts, supervised: Counts) -> float:
        """Return the FLOPs over documents with these lengths, and counts of target tokens."""
        return float(
            self.per_token * np.sum(lengths)
            + self.per_target * np.sum(supervised)
            + self._attention(lengths)
        )

    def forward(self, lengths: Counts, supervised: Counts) -> float:
        """Return the FLOPs of a forward pass without a backward pass."""
        head = self.forward_per_target * np.sum(supervised)
        per_token = self.recompute_per_token["full"]
        # the forward pass is a third of what `_attention` returns
        return float(per_token * np.sum(lengths) + head + self._attention(lengths) / 3)

    def _attention(self, lengths: Counts) -> float:
        """Return the FLOPs of attention, forward and backward."""
        tokens = np.asarray(lengths, np.float64)
        by_layer = []
        for window, per_pair in self.windows:
            by_layer.append(_attention_pairs(tokens, window).sum() * per_pair)
        return sum(by_layer)


class _Matrix(NamedTuple):
    """A matrix that activations are multiplied with."""

    size: float  # the elements that a token is multiplied with
    trained: bool
    in_mlp: bool


def _matrices(model: GPT) -> list[_Matrix]:
    """Return the matrices of a network, without the head, which is counted by targets."""
    # selective recomputation runs the matrices of these modules again
    mlp_modules = set()
    for block in model.blocks:
        assert isinstance(block, Block)
        if block.mlp is not None:
            mlp_modules.update(map(id, block.mlp.modules()))
    matrices = []
    for linear, fraction in _linears(model):
        for name, parameter in linear.named_parameters():
            # a bias multiplies nothing
            if name == "bias" or parameter is model.lm_head.weight:
                continue
            size = _num_weights(linear, name, parameter) * fraction
            matrices.append(
                _Matrix(size, parameter.requires_grad, id(linear) in mlp_modules)
            )
    return matrices


def _num_products(trained: bool) -> int:
    """Return how many products a matrix has part in: the forward pass, the gradient of its input,
    and its own gradient if it is trained."""
    if trained:
        return 3
    return 2


def _counts(samples: Sequence[Sample]) -> tuple[list[int], list[int]]:
    """Return the lengths of the samples' documents, and each sample's number of target tokens."""
    lengths = []
    for sample in samples:
        lengths.extend(sample.document_lengths)
    return lengths, [sample.supervised for sample in samples]


def _num_weights(
    linear: nn.Linear | ExpertLinear, name: str, parameter: nn.Parameter
) -> int:
    """Return the number of elements of a parameter, before quantization packed it."""
    if name != "weight":
        return parameter.numel()
    return linear.in_features * linear.out_features * getattr(linear, "count", 1)


def _linears(model: GPT) -> Iterable[tuple[nn.Linear | ExpertLinear, float]]:
    """Yield every Linear with the fraction of it that a token is multiplied with: top_k / count for
    experts, else 1."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            yield module, 1.0
        elif isinstance(module, MoE):
            active = module.top_k / module.count
            for linear in module.experts.children():
                if isinstance(linear, ExpertLinear):
                    yield linear, active


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
