"""Frozen Linears in 4 or 8 bits by bitsandbytes (arXiv 2305.14314, 2208.07339), on CPU and CUDA.

Only the weights are quantized: each product is made with the dequantized weight in the input's dtype, in training and in
inference alike, so that a model gives the same logits in both. (bitsandbytes' own int8 layer rounds activations too, where
the model is not being trained, and there alone.) The head, the embedding and routers stay as they are.
"""

import json
import logging
import math
import sys
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litft.model.mlp import CHOOSERS, ExpertLinear, Grouping, by_expert, grouped_product
from litft.model.placement import copy_into_local

KINDS = ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8")
# what folders of bitsandbytes' layers hold of a layer, beside `weight` and `bias`
STATISTICS = ("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", "SCB", "weight_format")
STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # numbers that share a scale

# E experts, N rows


@cache
def bitsandbytes(who: str = "quantized weights need") -> ModuleType:
    """The library; ValueError, which says who needs it, where it is not installed.

    On CPUs with AVX512-BF16 its import fetches compiled code from the hub where the package `kernels` is installed, and
    complains where it is not. We use neither, so it is kept from both.
    """
    kernels, logger = sys.modules.get("kernels", ...), logging.getLogger("bitsandbytes.backends.cpu.ops")
    sys.modules["kernels"], logger.disabled = None, True
    try:
        return import_module("bitsandbytes")
    except ImportError:
        reason = "which has no wheel for every platform and is not installed"
        raise ValueError(f"{who} bitsandbytes, {reason}; pip install bitsandbytes, or build it from source") from None
    finally:
        logger.disabled = False
        del sys.modules["kernels"]
        if kernels is not ...:
            sys.modules["kernels"] = kernels


@dataclass(frozen=True)
class QuantizedTensor:
    """One matrix (out, in) as bitsandbytes keeps it: `data` with a `QuantState`, or int8 with fp32 maxima of its rows."""

    data: Tensor
    state: Any

    @classmethod
    def quantize(cls, weight: Tensor, kind: str) -> "QuantizedTensor":
        """Quantize a matrix on its device."""
        functional, weight = bitsandbytes().functional, weight.contiguous()  # the CUDA kernels look at no strides
        if kind == "int8":
            data, maxima, _ = functional.int8_vectorwise_quant(weight.half())
            return cls(data, maxima)
        name, _, nested = kind.partition("-")
        return cls(*functional.quantize_4bit(weight, quant_type=name, compress_statistics=bool(nested)))

    @classmethod
    def from_state(cls, tensors: dict[str, Tensor]) -> "QuantizedTensor":
        """From what a folder holds of one layer, by the ends of the names (`weight`, `weight.absmax`, ... or `SCB`)."""
        if "SCB" in tensors:
            packed = cls(tensors["weight"], tensors["SCB"].float())
            if packed.data.dtype != torch.int8 or packed.data.dim() != 2 or packed.state.shape != packed.data.shape[:1]:
                raise ValueError(
                    f"{tuple(packed.data.shape)} bytes with {tuple(packed.state.shape)} maxima are no int8 matrix"
                )
            return packed
        statistics = {name.removeprefix("weight."): value for name, value in tensors.items() if name != "weight"}
        state = bitsandbytes().functional.QuantState.from_dict(statistics, device=torch.device("cpu"))
        _check_state(tensors["weight"], state)
        return cls(tensors["weight"], state)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix that the bits stand for, (out, in)."""
        functional = bitsandbytes().functional
        if isinstance(self.state, Tensor):
            return functional.int8_vectorwise_dequant(self.data, self.state).to(dtype)
        state = copy(self.state)
        state.dtype = dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32
        if state.shape[1] % state.blocksize:  # there its kernel for CPUs (0.50.2) takes the scales of other blocks
            count = math.prod(state.shape)
            width = count if count % state.blocksize else state.blocksize
            state.shape = torch.Size((count // width, width))
        return functional.dequantize_4bit(self.data, state).view(self.state.shape).to(dtype)

    def components(self) -> tuple[list[Tensor], list[int], str]:
        """All but `data`, as an operator can take it: tensors, numbers that begin with the matrix's shape, a name."""
        if isinstance(self.state, Tensor):
            return [self.state], [*self.data.shape], "int8"
        state, inner = self.state, self.state.state2
        nested = [inner.absmax, inner.code, state.offset] if state.nested else []
        numbers = [*state.shape, state.blocksize, *([inner.blocksize] if state.nested else [])]
        return [state.absmax, state.code, *nested], numbers, state.quant_type

    @classmethod
    def from_components(cls, data: Tensor, tensors: list[Tensor], numbers: list[int], kind: str) -> "QuantizedTensor":
        """The inverse of `pieces`."""
        if kind == "int8":
            return cls(data, tensors[0])
        make, (absmax, code, *nested), (height, width, size, *sizes) = bitsandbytes().functional.QuantState, tensors, numbers
        inner = make(nested[0], code=nested[1], blocksize=sizes[0], dtype=torch.float32) if nested else None
        shape = torch.Size((height, width))
        return cls(data, make(absmax, shape, code, size, kind, torch.float32, nested[2] if nested else None, inner))

    def to(self, device: torch.device | str) -> "QuantizedTensor":
        """The same on another device."""
        if isinstance(self.state, Tensor):
            return QuantizedTensor(self.data.to(device), self.state.to(device))
        self.state.to(device)  # in place
        return QuantizedTensor(self.data.to(device), self.state)


def _check_state(data: Tensor, state: Any) -> None:
    """ValueError where the statistics do not belong to the bits: compiled code would read beyond their ends."""
    size = math.prod(state.shape)
    fits = (
        len(state.shape) == 2 and data.nbytes * 2 == size + size % 2 and state.blocksize in BLOCKS and len(state.code) == 16
    )
    count = -(-size // state.blocksize) if fits else 0
    fits = fits and state.absmax.numel() == count
    if fits and state.nested:
        inner = state.state2
        fits = inner.blocksize in BLOCKS and len(inner.code) == 256 and inner.absmax.numel() == -(-count // inner.blocksize)
    if not fits:
        raise ValueError(f"{data.nbytes} bytes and their statistics are no matrix of shape {tuple(state.shape)}")


@torch.library.custom_op("litft::quantized_matmul", mutates_args=())
def quantized_matmul(
    x: Tensor, data: Tensor, statistics: list[Tensor], numbers: list[int], kind: str, ends: Tensor | None, transpose: bool
) -> Tensor:
    """x W^T of a packed W, or x W where it is turned: the backward, so that no dense copy is kept.

    The matrix is given by `Packed.pieces`. ends: of experts, whose matrices lie one below the other, as in `Grouping`. One
    operator to the compiler, which knows nothing of bits.
    """
    weight = QuantizedTensor.from_components(data, statistics, numbers, kind).dequantize(x.dtype)
    if ends is None:
        return x @ weight if transpose else F.linear(x, weight)
    weight = weight.unflatten(0, (len(ends), -1))
    return grouped_product(x, weight if transpose else weight.mT, ends)


@quantized_matmul.register_fake
def _(x, data, statistics, numbers, kind, ends, transpose):
    height, width = numbers[0] // (1 if ends is None else len(ends)), numbers[1]
    return x.new_empty(*x.shape[:-1], width if transpose else height)


def _keep(ctx, inputs, output) -> None:
    _, data, statistics, ctx.numbers, ctx.kind, ends, ctx.transpose = inputs
    ctx.save_for_backward(data, ends, *statistics)


def _backward(ctx, grad: Tensor):
    data, ends, *statistics = ctx.saved_tensors
    found = quantized_matmul(grad.contiguous(), data, statistics, ctx.numbers, ctx.kind, ends, not ctx.transpose)
    return found, None, [None] * len(statistics), None, None, None, None


quantized_matmul.register_autograd(_backward, setup_context=_keep)


class QuantizedModule(nn.Module):
    """A frozen module whose `weight` holds packed bits; of a sharded network a part of them, beside all statistics."""

    def __init__(self, module: nn.Linear | ExpertLinear, kind: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = module.in_features, module.out_features
        self.kind, self.state, self.bias = kind, None, module.bias
        self.weight = nn.Parameter(empty_storage(module.weight, kind), requires_grad=False)

    def fill(self, packed: QuantizedTensor) -> None:
        """Take the bits and their statistics."""
        copy_into_local(self.weight, packed.data.view(self.weight.dtype).view(self.weight.shape).__getitem__)
        self.state = packed.state

    def _apply(self, fn: Callable, recurse: bool = True) -> "QuantizedModule":
        """Statistics go where the bits go, and keep their dtypes."""
        super()._apply(fn, recurse)
        if self.state is not None:
            self.state = _moved(self.state, self.weight.device)
        return self

    def components(self, device: torch.device) -> tuple[list[Tensor], list[int], str]:
        """As `Packed.pieces`; the statistics of bits that wait in the host's memory are fetched once, and stay."""
        found = self.packed.components()
        if found[0][0].device != device:
            self.state = _moved(self.state, device)
            found = self.packed.components()
        return found

    @property
    def packed(self) -> QuantizedTensor:
        """Bits and statistics."""
        return QuantizedTensor(self.weight.data, self.state)


def _moved(state: Any, device: torch.device) -> Any:
    """A copy of the statistics on a device."""
    if isinstance(state, Tensor):
        return state.to(device)
    state = copy(state)
    for name, value in vars(state).items():
        if isinstance(value, Tensor):
            setattr(state, name, value.to(device))
    state.state2 = None if state.state2 is None else _moved(state.state2, device)
    return state


class QuantizedLinear(QuantizedModule, nn.Linear):
    """A frozen Linear in 4 or 8 bits."""

    def forward(self, x: Tensor) -> Tensor:
        y = quantized_matmul(x, self.weight, *self.components(x.device), None, False)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class QuantizedExpertLinear(QuantizedModule, ExpertLinear):
    """The same of an ExpertLinear: all experts' matrices, one below the other."""

    def __init__(self, module: ExpertLinear, kind: str) -> None:
        super().__init__(module, kind)
        self.count = module.count

    def forward(self, x: Tensor, grouping: Grouping) -> Tensor:
        """As ExpertLinear's."""
        y = quantized_matmul(x, self.weight, *self.components(x.device), grouping.ends, False)
        return y if self.bias is None else y + by_expert(self.bias.to(y.dtype), grouping)


def is_quantizable(name: str, model: nn.Module) -> bool:
    """Whether a parameter is quantized with the base: the weights of Linears and experts, but not of what chooses experts.

    Nor is the head's.
    """
    owner, _, leaf = name.rpartition(".")
    if leaf != "weight" or owner == "lm_head" or owner.endswith(CHOOSERS):
        return False
    return isinstance(model.get_submodule(owner), (nn.Linear, ExpertLinear))


def empty_storage(weight: Tensor, kind: str) -> Tensor:
    """Unfilled memory for the bits of a weight (out, in) or (E, out, in): its rows, or two numbers a byte."""
    if kind == "int8":
        return torch.empty_like(weight.flatten(0, -2), dtype=torch.int8)
    return weight.new_empty((-(-weight.numel() // 2), 1), dtype=torch.uint8)


def quantize_modules(model: nn.Module, names: Iterable[str], kind: str) -> None:
    """Make the modules of these names quantized ones, whose bits are still to be filled in."""
    for name in names:
        module = model.get_submodule(name)
        make = QuantizedExpertLinear if isinstance(module, ExpertLinear) else QuantizedLinear
        model.set_submodule(name, make(module, kind))


def quantize_dequantize(weight: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """What a weight (out, in) or (E, out, in), quantized from `dtype`, stands for in `dtype`; as fp32."""
    return QuantizedTensor.quantize(weight.to(dtype).flatten(0, -2), kind).dequantize(dtype).float().view_as(weight)


def stored_shape(state: Tensor) -> tuple[int, ...]:
    """The shape that a folder's `quant_state` states of its layer."""
    return tuple(json.loads(bytes(state.tolist()))["shape"])


def dense_weight(module: nn.Module) -> Tensor:
    """A module's weight (out, in), or (E, out, in) of experts, as numbers."""
    if isinstance(module, QuantizedLinear):
        return module.packed.dequantize()
    if isinstance(module, QuantizedExpertLinear):
        return module.packed.dequantize().unflatten(0, (module.count, -1))
    return module.weight.detach()
