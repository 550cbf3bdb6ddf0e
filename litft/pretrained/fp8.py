"""Linear weights in FP8, as compressed-tensors writes them and vLLM runs them: one scale a row, and
activations that are scaled token by token while the model runs."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from litft.checkpoints.conversion import rule_of
from litft.checkpoints.rules import Rename, Rule, Split
from litft.checkpoints.weight_writer import LazyTensor
from litft.methods.lora import is_inner_linear
from litft.model.transformer import GPT

# Dimensions: O output features, I input features

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max


def quantizable_linears(model: GPT, rules: list[Rule]) -> set[str]:
    """Return the names, in a model folder, of the Linears that are written in FP8: all but head,
    routers and experts.

    rules: those that the folder is written with.
    """
    names = set()
    for site, module in model.named_modules():
        if not isinstance(module, nn.Linear) or not is_inner_linear(model, site):
            continue
        rule, numbers = rule_of(rules, f"{site}.weight")
        # transformers' Conv1D is no Linear for compressed-tensors
        if isinstance(rule, Rename | Split) and rule.transposed:
            continue
        for name in rule.hf_names(numbers):
            names.add(name.removesuffix(".weight"))
    return names


def fp8_entries(entries: list[LazyTensor], linears: set[str]) -> list[LazyTensor]:
    """Return the tensors of a folder with the weights of `linears` in FP8, each followed by its
    scales (O, 1) in the dtype of the weight."""
    written = []
    for entry in entries:
        if entry.name.removesuffix(".weight") not in linears or not entry.name.endswith(
            ".weight"
        ):
            written.append(entry)
            continue
        rows = entry.like.size(0)
        like = entry.like.to(DTYPE)
        written.append(LazyTensor(entry.name, like, partial(_quantized_part, entry, 0)))
        scale = entry.like.new_empty((rows, 1))
        make_scale = partial(_quantized_part, entry, 1)
        written.append(LazyTensor(f"{entry.name}_scale", scale, make_scale))
    return written


def _quantized_part(entry: LazyTensor, index: int) -> Tensor:
    """Return the weight (index 0) or the scales (1) of a Linear, when its file is written."""
    return quantize_rows(entry.make())[index]


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight (O, I) in FP8, and its scales (O, 1) in the dtype of the weight."""
    largest = weight.float().abs().amax(dim=1, keepdim=True)
    scale = (largest / LARGEST).to(weight.dtype)
    # a row of zeros has no scale, nor one of numbers that are too small for it
    scale = scale.masked_fill(scale == 0, 1.0)
    quantized = (weight.float() / scale.float()).clamp(-LARGEST, LARGEST)
    return quantized.to(DTYPE), scale


def quantization_config(linears: set[str], entries: list[LazyTensor]) -> dict[str, Any]:
    """Return what config.json says of these weights."""
    ignored = []
    for entry in entries:
        module = entry.name.removesuffix(".weight")
        is_matrix = entry.like.dim() == 2 and entry.name.endswith(".weight")
        if is_matrix and module not in linears and "embed" not in module:
            ignored.append(module)
    eight_bits = dict(num_bits=8, type="float", symmetric=True)
    group = {
        "targets": ["Linear"],
        "weights": eight_bits | dict(strategy="channel", dynamic=False),
        "input_activations": eight_bits | dict(strategy="token", dynamic=True),
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(dict.fromkeys([*ignored, "lm_head"])),
        "kv_cache_scheme": None,
    }
