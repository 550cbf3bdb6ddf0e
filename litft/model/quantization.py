"""Frozen Linears in 4 or 8 bits with bitsandbytes (arXiv 2305.14314, 2208.07339), on CPU and CUDA.

Only weights are quantized. Each matrix product uses the dequantized weight in the input's dtype,
both in training and in inference, so a model gives the same logits in both. (The int8 layer of
bitsandbytes also rounds activations, but only in inference.) The head, the embedding and the
routers are not quantized.
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

from litft.model.mlp import ROUTERS, ExpertLinear, Grouping, by_expert, grouped_product
from litft.model.placement import copy_into_local

KINDS = ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8")
# names of a layer's other tensors, next to `weight` and `bias`, in folders saved with bitsandbytes
STATISTICS = (
    "weight.absmax",
    "weight.quant_map",
    "weight.nested_absmax",
    "weight.nested_quant_map",
    "SCB",
    "weight_format",
)
STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
# name suffixes of Linears that stay in full precision: routers, and the coefficients of Gemma 3n's
# streams, a few rows each
UNQUANTIZED = (*ROUTERS, ".altup.modality", ".altup.prediction", ".altup.correction")
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # weights per scale
WEIGHTS_PER_SCALE = 64  # of what is quantized here, in 4 bits

# E experts, N rows, S scales, one for each block of weights, Z scales of scales


@cache
def bitsandbytes(needed_by: str = "quantized weights need") -> ModuleType:
    """Import bitsandbytes; raise ValueError, which begins with `needed_by`, if it is not installed.

    On CPUs with AVX512-BF16 its import downloads compiled code from the hub if the package
    `kernels` is installed, and otherwise logs a warning. litft does not use that code, so the
    import runs without `kernels` and without the warning.
    """
    # an entry of None lets `import kernels` fail; `...` stands for no entry before
    kernels = sys.modules.get("kernels", ...)
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    # the stubs of `sys` lack the None that the import system allows
    sys.modules["kernels"] = None  # pyright: ignore[reportArgumentType]
    logger.disabled = True
    try:
        return import_module("bitsandbytes")
    except ImportError:
        remedy = "pip install bitsandbytes, or build it from source if your platform has no wheel"
        raise ValueError(
            f"{needed_by} bitsandbytes, which is not installed; {remedy}"
        ) from None
    finally:
        logger.disabled = False
        del sys.modules["kernels"]
        if kernels is not ...:
            sys.modules["kernels"] = kernels


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix (out, in) in bitsandbytes' format: `data` with a `QuantState`, or int8 data with the
    fp32 row maxima."""

    data: Tensor
    state: Any

    @classmethod
    def quantize(cls, weight: Tensor, kind: str) -> "QuantizedTensor":
        """Quantize a matrix (out, in) on its device."""
        functional = bitsandbytes().functional
        weight = weight.contiguous()  # the CUDA kernels ignore strides
        if kind == "int8":
            data, maxima, _ = functional.int8_vectorwise_quant(weight.half())
            return cls(data, maxima)
        # "dq": double quantization, the scales are quantized, too
        name, _, nested = kind.partition("-")
        return cls(
            *functional.quantize_4bit(
                weight,
                quant_type=name,
                compress_statistics=bool(nested),
                blocksize=WEIGHTS_PER_SCALE,
            )
        )

    @classmethod
    def from_state(cls, tensors: dict[str, Tensor]) -> "QuantizedTensor":
        """Build from one layer's tensors in a folder, by name suffix (`weight`, `weight.absmax`,
        ... or `SCB`).

        int8: a weight (out, in) and SCB (out,). 4 bits: a weight of any shape with two values a
        byte, and the tensors of bitsandbytes' `QuantState`. Raises ValueError if their shapes do
        not match.
        """
        if "SCB" in tensors:
            quantized = cls(tensors["weight"], tensors["SCB"].float())
            # older versions of bitsandbytes saved the order of a GPU's kernels
            order = tensors.get("weight_format")
            if order is not None and int(order) != 0:
                raise ValueError(
                    f"weight_format {int(order)}: only rows (0) are supported; save the folder "
                    "with bitsandbytes 0.45 or newer"
                )
            if (
                quantized.data.dtype != torch.int8
                or quantized.data.dim() != 2
                or quantized.state.shape != quantized.data.shape[:1]
            ):
                raise ValueError(
                    f"weight of shape {tuple(quantized.data.shape)} and SCB of shape "
                    f"{tuple(quantized.state.shape)} do not form an int8 matrix"
                )
            return quantized
        statistics = {}
        for name, value in tensors.items():
            if name != "weight":
                statistics[name.removeprefix("weight.")] = value
        state = bitsandbytes().functional.QuantState.from_dict(
            statistics, device=torch.device("cpu")
        )
        _check_state(tensors["weight"], state)
        return cls(tensors["weight"], state)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the matrix (out, in) in `dtype`."""
        return dequantized(self.data, *self.components(), dtype)

    def part(
        self, dim: int, index: int, count: int, matrices: int = 1
    ) -> "QuantizedTensor | None":
        """Return part `index` of `count` equal ones, with the values that it has in the whole; None
        if a block of weights is not in one part alone.

        dim: -2 divides the outputs, -1 the inputs. matrices: how many this matrix consists of, one
        below the other; each of them is divided. Double quantization is undone.
        """
        statistics, numbers, kind = self.components()
        height, width = numbers[:2]
        if kind == "int8":
            data = self.data.view(matrices, -1, width).chunk(count, dim)[index]
            maxima = self.state
            if dim == -2:
                maxima = maxima.view(matrices, -1).chunk(count, -1)[index].flatten()
            return QuantizedTensor(data.flatten(0, 1).contiguous(), maxima.contiguous())

        shape = (height // matrices, width)
        if cuts_blocks(shape, dim, count):
            return None
        run = _run_length(shape, dim, count)
        if dim == -2:
            height //= count
        else:
            width //= count
        scales = _block_scales(statistics, numbers)
        runs = height * width // run
        state = copy(self.state)
        # contiguous: the kernels ignore strides
        state.absmax = scales.view(runs, count, -1)[:, index].flatten().contiguous()
        state.shape = torch.Size((height, width))
        state.nested = False
        state.offset = None
        state.state2 = None
        # two weights a byte
        data = self.data.view(runs, count, -1)[:, index].reshape(-1, 1)
        return QuantizedTensor(data.contiguous(), state)

    def components(self) -> tuple[list[Tensor], list[int], str]:
        """Return `state` as operator arguments: tensors, integers that begin with the matrix's
        (out, in), and the kind.

        The tensors of int8 are the row maxima (out,). Those of 4 bits are the scales (S,) and a
        table (16,), and with double quantization also the scales of the scales (Z,), their table
        (256,) and their offset, a scalar.
        """
        if isinstance(self.state, Tensor):
            return [self.state], [*self.data.shape], "int8"
        state, inner = self.state, self.state.state2
        if state.nested:
            nested = [inner.absmax, inner.code, state.offset]
        else:
            nested = []
        # height, width, weights per scale; with double quantization also scales per nested scale
        numbers = [
            *state.shape,
            state.blocksize,
            *([inner.blocksize] if state.nested else []),
        ]
        return [state.absmax, state.code, *nested], numbers, state.quant_type

    def to(self, device: torch.device | str) -> "QuantizedTensor":
        """Return a copy on another device."""
        if isinstance(self.state, Tensor):
            return QuantizedTensor(self.data.to(device), self.state.to(device))
        self.state.to(device)  # in place
        return QuantizedTensor(self.data.to(device), self.state)


def _check_state(data: Tensor, state: Any) -> None:
    """Raise ValueError if data and statistics do not match, since compiled code would read out of
    bounds."""
    size = math.prod(state.shape)
    # two weights a byte, the last one padded; a table of 16 values for 4 bits
    is_valid = (
        len(state.shape) == 2
        and data.nbytes * 2 == size + size % 2
        and state.blocksize in BLOCK_SIZES
        and len(state.code) == 16
    )
    # one scale for each block of weights
    count = -(-size // state.blocksize) if is_valid else 0
    is_valid = is_valid and state.absmax.numel() == count
    if is_valid and state.nested:
        inner = state.state2
        # the scales are quantized in 8 bits, with a table of 256 values
        is_valid = (
            inner.blocksize in BLOCK_SIZES
            and len(inner.code) == 256
            and inner.absmax.numel() == -(-count // inner.blocksize)
        )
    if not is_valid:
        raise ValueError(
            f"{data.nbytes} bytes and their statistics do not form a matrix of shape "
            f"{tuple(state.shape)}"
        )


def dequantized(
    data: Tensor, tensors: list[Tensor], numbers: list[int], kind: str, dtype: torch.dtype
) -> Tensor:
    """Return the matrix (out, in) of a QuantizedTensor's data and its `components` in `dtype`.

    The operators of bitsandbytes are called directly: its functions around them take as long on the
    host as they do.
    """
    package = bitsandbytes()
    if kind == "int8":
        return package.functional.int8_vectorwise_dequant(data, tensors[0]).to(dtype)
    scales = _block_scales(tensors, numbers)
    height, width, block_size = numbers[:3]
    shape = [height, width]
    # the CPU kernel (0.50.2) would use the scales of wrong blocks
    if width % block_size:
        count = height * width
        # Seen as one row, or as rows of one block each, no block crosses the end of a row.
        row = count if count % block_size else block_size
        shape = [count // row, row]
    # the kernels write these dtypes
    written = dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32
    dequantize = torch.ops.bitsandbytes.dequantize_4bit.default
    weight = dequantize(data, scales, block_size, kind, shape, written)
    return weight.view(height, width).to(dtype)


def _block_scales(tensors: list[Tensor], numbers: list[int]) -> Tensor:
    """Return the scales (S,) of 4-bit data in fp32, given the `components` of its state."""
    scales, _, *nested = tensors
    if not nested:
        return scales
    # they are quantized themselves, after an offset was subtracted
    inner_scales, inner_code, offset = nested
    dequantize = torch.ops.bitsandbytes.dequantize_blockwise.default
    return dequantize(scales, inner_scales, inner_code, numbers[3], torch.float32) + offset


# The compiler cannot trace dequantization, so the product is one operator. It has no gradient of
# its own, see `QuantizedProduct`: torch calls the gradient of an operator through Python code
# that takes longer than the rest of the call.
torch.library.define(
    "litft::quantized_matmul",
    "(Tensor x, Tensor data, Tensor[] statistics, SymInt[] numbers, str kind, Tensor? ends, "
    "bool transpose) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


@torch.library.impl("litft::quantized_matmul", "CompositeExplicitAutograd")
def _quantized_matmul(
    x: Tensor,
    data: Tensor,
    statistics: list[Tensor],
    numbers: list[int],
    kind: str,
    ends: Tensor | None,
    transpose: bool,
) -> Tensor:
    """Return what `quantized_matmul` does; with `transpose`, x W, (..., in), for x (..., out)."""
    weight = dequantized(data, statistics, numbers, kind, x.dtype)
    if ends is None:
        if transpose:
            return x @ weight
        return F.linear(x, weight)
    # (E out, in) -> (E, out, in)
    weight = weight.unflatten(0, (len(ends), -1))
    if not transpose:
        weight = weight.mT
    return grouped_product(x, weight, ends)


@torch.library.register_fake("litft::quantized_matmul")
def _(x, data, statistics, numbers, kind, ends, transpose):
    height, width = numbers[:2]
    if ends is not None:
        height //= len(ends)
    features = width if transpose else height
    return x.new_empty(*x.shape[:-1], features)


class QuantizedProduct(torch.autograd.Function):
    """`quantized_matmul` and its gradient for x: the weight is frozen, and dequantized again in the
    backward, so that no dense copy of it is saved."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, data: Tensor, ends: Tensor | None, *rest: Any
    ) -> Tensor:
        """Return x W^T; rest: the numbers, the kind, and each of the statistics."""
        numbers, kind, *statistics = rest
        ctx.numbers = numbers
        ctx.kind = kind
        ctx.save_for_backward(data, ends, *statistics)
        return torch.ops.litft.quantized_matmul.default(
            x, data, statistics, numbers, kind, ends, False
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x, (..., in)."""
        data, ends, *statistics = ctx.saved_tensors
        d_x = torch.ops.litft.quantized_matmul.default(
            grads[0].contiguous(), data, statistics, ctx.numbers, ctx.kind, ends, True
        )
        return d_x, *[None] * (4 + len(statistics))


def quantized_matmul(
    x: Tensor,
    data: Tensor,
    statistics: list[Tensor],
    numbers: list[int],
    kind: str,
    ends: Tensor | None = None,
) -> Tensor:
    """Return x W^T, (..., out), for x (..., in) and a quantized W (out, in).

    data, statistics, numbers, kind: of a QuantizedTensor and its `components`. ends: for experts,
    (E,), as in `Grouping`; their matrices are concatenated by rows to W (E out, in), and x is
    (N, in).
    """
    return QuantizedProduct.apply(x, data, ends, numbers, kind, *statistics)


class QuantizedModule(nn.Module):
    """A frozen module whose `weight` holds quantized data; sharding applies to it, but not to the
    statistics."""

    def __init__(self, module: nn.Linear | ExpertLinear, kind: str) -> None:
        nn.Module.__init__(self)
        self.in_features = module.in_features
        self.out_features = module.out_features
        self.kind = kind
        self.state = None
        self.bias = module.bias
        self.weight = nn.Parameter(empty_storage(module.weight, kind), requires_grad=False)

    def fill(self, quantized: QuantizedTensor) -> None:
        """Copy the quantized data into the weight, and keep its statistics."""
        # the same bytes, in the dtype and shape of the storage
        copy_into_local(
            self.weight,
            quantized.data.view(self.weight.dtype).view(self.weight.shape).__getitem__,
        )
        self.state = quantized.state

    def _apply(self, fn: Callable, recurse: bool = True) -> "QuantizedModule":
        """Move the statistics with the data, without changing their dtypes."""
        super()._apply(fn, recurse)
        if self.state is not None:
            self.state = _state_to(self.state, self.weight.device)
        return self

    def components(self, device: torch.device) -> tuple[list[Tensor], list[int], str]:
        """Return `QuantizedTensor.components`, with its shapes, on a device.

        Offloaded statistics are moved there once and stay there. For experts the matrix is
        (E out, in).
        """
        components = self.quantized.components()
        if components[0][0].device != device:
            self.state = _state_to(self.state, device)
            components = self.quantized.components()
        return components

    @property
    def quantized(self) -> QuantizedTensor:
        """The quantized data and its statistics."""
        return QuantizedTensor(self.weight.data, self.state)


def _state_to(state: Any, device: torch.device) -> Any:
    """Return a copy of the statistics on a device."""
    if isinstance(state, Tensor):
        return state.to(device)
    state = copy(state)
    for name, value in vars(state).items():
        if isinstance(value, Tensor):
            setattr(state, name, value.to(device))
    if state.state2 is None:
        state.state2 = None
    else:
        state.state2 = _state_to(state.state2, device)
    return state


class QuantizedLinear(QuantizedModule, nn.Linear):
    """A frozen Linear in 4 or 8 bits."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b, (..., out), for x (..., in)."""
        y = quantized_matmul(x, self.weight, *self.components(x.device))
        if self.bias is None:
            return y
        return y + self.bias.to(y.dtype)


class QuantizedExpertLinear(QuantizedModule, ExpertLinear):
    """A frozen ExpertLinear in 4 or 8 bits: the matrices of all experts, concatenated by rows."""

    def __init__(self, module: ExpertLinear, kind: str) -> None:
        super().__init__(module, kind)
        self.count = module.count

    def forward(self, x: Tensor, grouping: Grouping) -> Tensor:
        """Apply to x (N, in), sorted by expert; return (N, out)."""
        y = quantized_matmul(x, self.weight, *self.components(x.device), grouping.ends)
        if self.bias is None:
            return y
        return y + by_expert(self.bias.to(y.dtype), grouping)


def is_quantizable(name: str, model: nn.Module) -> bool:
    """Return whether a parameter of the base model is quantized.

    True for weights of Linears and experts, but not for those of the routers and the head.
    """
    owner, _, leaf = name.rpartition(".")
    if leaf != "weight" or owner == "lm_head" or owner.endswith(UNQUANTIZED):
        return False
    return isinstance(model.get_submodule(owner), (nn.Linear, ExpertLinear))


def cuts_blocks(shape: tuple[int, ...], dim: int, count: int) -> bool:
    """Return whether blocks of weights in 4 bits cross the boundaries of `count` parts of a weight
    (out, in) or (E, out, in) along `dim`, -2 or -1; see `QuantizedTensor.part`."""
    return _run_length(shape, dim, count) % WEIGHTS_PER_SCALE != 0


def _run_length(shape: tuple[int, ...], dim: int, count: int) -> int:
    """Return how many weights of a part are stored one after the other; see `cuts_blocks`."""
    if dim == -2:
        return shape[-2] // count * shape[-1]
    return shape[-1] // count


def empty_storage(weight: Tensor, kind: str) -> Tensor:
    """Allocate quantized storage for a weight (out, in) or (E, out, in): int8 rows, or two 4-bit
    values per byte."""
    if kind == "int8":
        return torch.empty_like(weight.flatten(0, -2), dtype=torch.int8)
    # bitsandbytes stores 4-bit data as one column of bytes
    return weight.new_empty((-(-weight.numel() // 2), 1), dtype=torch.uint8)


def quantize_modules(model: nn.Module, names: Iterable[str], kind: str) -> None:
    """Replace the named modules by quantized ones, whose weights are not filled yet."""
    for name in names:
        module = model.get_submodule(name)
        if isinstance(module, ExpertLinear):
            quantized = QuantizedExpertLinear(module, kind)
        else:
            assert isinstance(module, nn.Linear)  # see `is_quantizable`
            quantized = QuantizedLinear(module, kind)
        model.set_submodule(name, quantized)


def quantize_dequantize(weight: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Cast a weight (out, in) or (E, out, in) to `dtype`, quantize and dequantize it in `dtype`;
    return fp32."""
    return (
        QuantizedTensor.quantize(weight.to(dtype).flatten(0, -2), kind)
        .dequantize(dtype)
        .float()
        .view_as(weight)
    )


def stored_shape(state: Tensor) -> tuple[int, ...]:
    """Return a layer's shape from its `quant_state` tensor in a folder, the bytes (N,) of a JSON
    text."""
    return tuple(json.loads(bytes(state.tolist()))["shape"])


def dense_weight(module: nn.Module) -> Tensor:
    """Return a module's dequantized weight, (out, in), or (E, out, in) for experts."""
    if isinstance(module, QuantizedLinear):
        return module.quantized.dequantize()
    if isinstance(module, QuantizedExpertLinear):
        return module.quantized.dequantize().unflatten(0, (module.count, -1))
    weight = module.weight
    assert isinstance(weight, Tensor)  # of a Linear, of experts or of an embedding
    return weight.detach()
