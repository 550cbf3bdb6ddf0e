"""The memory and FLOPs that a run needs, and the fastest settings that fit.

No weight is read or allocated.

Weights, gradients and optimizer state follow from the shapes; temporary memory is measured by
`memory_trace`. `tests/training/test_plan.py` compares the sum with torch's MemTracker over complete
training steps.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from litft.args import Optimizers
from litft.distributed.devices import DTYPES
from litft.methods import Method
from litft.methods.new_tokens import TOKEN_ROW_PARAMETERS
from litft.model.config import Config
from litft.model.device_type import device_type, planned_for
from litft.model.mixers import kernels
from litft.model.quantization import is_quantizable
from litft.model.transformer import GPT, default_dtype
from litft.pretrained.folder import PretrainedFolder
from litft.training.memory.activations import (
    Shape,
    backward_optimizer,
    trace_blocks,
    trace_step,
    trained_parameters,
)
from litft.training.memory.flops import Flops
from litft.training.memory.loss import trace_loss
from litft.training.memory.residence import MemoryPlacement, residence
from litft.training.memory_saving.activation_checkpointing import recompute
from litft.training.memory_saving.compile import compiles
from litft.training.memory_saving.cpu_offload import is_offloadable
from litft.training.optimizers.make import state_bytes

# bytes that torch gives to cuBLAS on Hopper, less on older GPUs; before torch 2.15, the backward
# pass's thread has its own. A TorchVersion compares numbers, also with a text.
CUBLAS_WORKSPACE = 32 * 2**20 * (1 if torch.__version__ >= "2.15" else 2)
# of a device's memory that a plan may use; CUDA and fragmentation take the rest
USABLE_FRACTION = 0.9


@dataclass(frozen=True)
class Memory:
    """Bytes by kind on one device, in a training step whose micro-batches have `shape`."""

    shape: Shape
    weights: int
    gradients: int
    optimizer: int
    # saved by the blocks for their backward pass
    activations: int
    # temporary memory of the loss and its gradient
    loss: int
    # in a sharded network: gathered blocks, and the gathered weights outside the blocks
    gathered: int
    # excess of activations and gradients over `activations` at the peak of the backward pass
    backward: int
    stepping: int  # temporary memory of the optimizer step
    host: int = 0  # bytes in host memory
    workspace: int = 0  # of cuBLAS
    # between the steps: the KV cache of completions and their logits
    rollouts: int = 0
    reference: int = 0  # a copy of the weights before full fine-tuning
    teacher: int = 0  # the weights of a teacher that judges the student's own answers

    @property
    def peak(self) -> int:
        """Return the peak: at the loss, within the backward pass, at the optimizer step, or in
        rollouts."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """Return the bytes of each kind at the peak."""
        constant = {
            "weights": self.weights,
            "reference": self.reference,
            "teacher": self.teacher,
            "optimizer": self.optimizer,
            "cuBLAS": self.workspace,
        }
        # before the backward pass there are gradients only if an earlier micro-batch left them
        before = {
            "gradients": self.gradients * self.shape.accumulated,
            "activations": self.activations,
        }
        gathered = {"gathered": self.gathered}
        # the peak is at the loss, within the backward pass, at the optimizer step, or in rollouts
        moments = (
            before | {"loss": self.loss} | gathered,
            before | {"backward pass": self.backward} | gathered,
            {"gradients": self.gradients, "optimizer step": self.stepping},
            {"rollouts": self.rollouts},
        )
        return constant | max(moments, key=lambda moment: sum(moment.values()))

    def line(self) -> str:
        """Describe the peak and its parts, which add up to it, in GiB or MiB."""
        unit, unit_bytes = byte_unit(self.peak)
        parts = []
        for kind, size in self.parts.items():
            if size:
                parts.append(f"{kind} {size / unit_bytes:.2f}")
        if self.host:
            host = f"; {format_bytes(self.host)} in host memory"
        else:
            host = ""
        return (
            f"{self.peak / unit_bytes:.2f} {unit} at its peak, with micro-batches of {self.shape} "
            f"({', '.join(parts)}){host}"
        )


# Memory of a process on a CPU in addition to its tensors, from nine runs
# (tutorials/performance.md).
PYTHON_BYTES = int(0.65 * 2**30)  # Python, the libraries and their threads
# freed memory that glibc's malloc keeps, plus a part of what a step allocates
GLIBC_BYTES = int(0.3 * 2**30)
GLIBC_PART = 0.4
# the same for other allocators, which keep less
OTHER_PART = 0.15


def process_line(memory: Memory, malloc: str) -> str:
    """Describe what a process on a CPU takes in all, in GiB. malloc: the name of its allocator."""
    step = memory.peak - memory.weights - memory.optimizer
    least = memory.peak + PYTHON_BYTES
    if malloc == "glibc":
        kept = GLIBC_BYTES + GLIBC_PART * step
    else:
        kept = OTHER_PART * step
    line = (
        f"the process takes {least / 2**30:.1f} to {(least + kept) / 2**30:.1f} GiB, with Python "
        "and the libraries"
    )
    if malloc == "glibc":
        line += (
            ", and what glibc's malloc keeps; with tcmalloc it is less "
            "(tutorials/performance.md)"
        )
    return line


def byte_unit(size: int) -> tuple[str, int]:
    """Return the unit to print `size` bytes in, and the unit's bytes."""
    if size >= 2**30:
        return ("GiB", 2**30)
    return ("MiB", 2**20)


def format_bytes(size: int) -> str:
    """Return `size` bytes as text, in GiB or MiB."""
    unit, unit_bytes = byte_unit(size)
    return f"{size / unit_bytes:.1f} {unit}"


@dataclass(frozen=True)
class Plan:
    """The requirements of training a model with a method."""

    parameters: int
    trained: int
    flops: Flops
    memory: Memory
    # bytes of all weights as FSDP2 gathers them; 0 if they are not sharded
    gathered: int
    blocks: int

    def title_line(self, method: str) -> str:
        """Describe how much of the model is trained."""
        return (
            f"{self.parameters:,} parameters; {method} trains {self.trained:,} "
            f"({self.trained / self.parameters:.2%})"
        )


def predict(
    source: PretrainedFolder,
    method: Method,
    precision: str,
    quantize: str,
    shape: Shape,
    optimizer: Optimizers = "adamw",
    recomputed: str = "none",
    device: str = "cuda",
    in_backward: bool = False,
    cpu_offload: str = "none",
    shards: int = 1,
    compiled: bool | None = None,
) -> Plan:
    """Return the plan of training `source` with `method`, whose targets are already chosen.

    precision: of the computation (bf16, bf16-true, fp16, fp32). quantize: the quantization of the
    base, or none. optimizer: one of OPTIMIZERS. recomputed: one of RECOMPUTED. device: cpu or cuda.
    in_backward: the optimizer steps in the backward pass. cpu_offload: none, parameters (with
    shards > 1 also gradients and optimizer state), or activations (those of two blocks stay on the
    device). shards: the number of shards of weights, gradients and optimizer state under FSDP2.
    compiled: whether the blocks are compiled; default: as --train.compile decides.
    """
    on_host = cpu_offload == "parameters" and shards == 1
    compiled = compiles(compiled, device, offloads_blocks=on_host, recomputed=recomputed)
    num_row_values = _num_row_values(method, source.config)
    method = _without_new_tokens(method)
    compute = DTYPES[precision.removesuffix("-true")]
    with FakeTensorMode(), planned_for(device), kernels.without_launches():
        model, parameters = _network(source, method, precision)
        trained = trained_parameters(model)
        weights = _weights(model, method, quantize)
        # a packed weight is dequantized for its matrix product, and one at a time
        dequantized = compute.itemsize * _largest_packed(weights)
        placed = _placed_weights(model, weights, method, compute, shards, cpu_offload)
        place = residence(optimizer, cpu_offload, shards > 1, device)
        # temporary memory, by a trace of the network as it will run
        recompute(model.train(), recomputed)
        in_backward_optimizer = None
        if in_backward:
            in_backward_optimizer = backward_optimizer(model, method, optimizer)
        loss = trace_loss(model, shape, compute, in_backward_optimizer, compiled)
        blocks = trace_blocks(
            model,
            shape,
            compute,
            in_backward_optimizer,
            shards,
            place.activations,
            compiled,
        )
        update = _update_bytes(optimizer, method, trained, shards, in_backward, place)
        memory = Memory(
            shape,
            weights=placed.resident * place.weights,
            gradients=update.gradients * place.weights,
            optimizer=update.state * place.state,
            activations=blocks.activations,
            loss=max(loss, dequantized),
            gathered=placed.gathered,
            backward=blocks.backward + dequantized,
            stepping=update.stepping,
            host=placed.host + blocks.offloaded + _on_host(place, placed.resident, update),
            workspace=_workspace(device),
        )
    return Plan(
        parameters,
        num_row_values + _num_elements(trained.values()),
        Flops(model),
        memory,
        placed.all_gathered,
        len(model.blocks),
    )


def _num_elements(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _workspace(device: str) -> int:
    """Return the bytes that a matrix product may use beyond its inputs and its output."""
    if device == "cuda":
        return CUBLAS_WORKSPACE
    return 0


def _without_new_tokens(method: Method) -> Method:
    """Return a copy without new tokens: they need real ids, and their few rows do not matter."""
    method = copy.copy(method)
    method.tokens = {}
    method.frozen = method.frozen - set(TOKEN_ROW_PARAMETERS)
    return method


def _num_row_values(method: Method, config: Config) -> int:
    """Return the number of trained values in the rows of new tokens."""
    trained = [name for name in method.token_row_names(config) if name not in method.frozen]
    return len(method.tokens) * config.dim * len(trained)


def _network(source: PretrainedFolder, method: Method, precision: str) -> tuple[GPT, int]:
    """Return the network with the method attached, and its number of parameters without the
    method."""
    with default_dtype(DTYPES[method.storage(precision)]):
        model = GPT(source.config)
    parameters = _num_elements(model.parameters())
    method.attach(model, keep=False)
    method.set_compute_dtype(model, precision)
    for name in method.frozen:
        model.get_parameter(name).requires_grad_(False)
    return model, parameters


class _OffloadedWeights(NamedTuple):
    """Bytes of frozen weights that wait in host memory."""

    total: int
    on_device: int  # of a block and the next one
    pinned: int  # what they take in host memory


def _offloaded(model: GPT) -> _OffloadedWeights:
    """Return the bytes of the frozen weights of all blocks."""
    block_bytes = []
    pinned = 0
    for block in model.blocks:
        size = 0
        for parameter in block.parameters():
            if is_offloadable(parameter):
                size += parameter.nbytes
                pinned += _pinned_bytes(parameter)
        block_bytes.append(size)
    total = sum(block_bytes)
    return _OffloadedWeights(total, min(total, 2 * max(block_bytes)), pinned)


def _pinned_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor in pinned memory, which CUDA's host allocator rounds up to a
    power of two."""
    if device_type(tensor) != "cuda" or not tensor.nbytes:
        return tensor.nbytes
    return 1 << (tensor.nbytes - 1).bit_length()


class Weight(NamedTuple):
    """The size of a tensor as the network stores it."""

    numel: int
    nbytes: int
    packed: bool  # quantized


class PlacedWeights(NamedTuple):
    """Where the bytes of all weights are."""

    resident: int  # on the device, unless everything is offloaded
    host: int = 0  # those of frozen blocks
    gathered: int = 0  # at a time
    all_gathered: int = 0


def _placed_weights(
    model: GPT,
    weights: dict[str, Weight],
    method: Method,
    compute: torch.dtype,
    shards: int,
    cpu_offload: str,
) -> PlacedWeights:
    """Return where the weights are: sharded, offloaded, or all on the device."""
    if shards > 1:
        gather_dtype = None
        if method.saves_full_model:
            gather_dtype = compute
        return sharded_weights(model, weights, shards, gather_dtype)
    resident = sum(weight.nbytes for weight in weights.values())
    if cpu_offload == "parameters":
        offloaded = _offloaded(model)
        # the offloaded weights leave the device, but for those of two blocks
        on_device = resident + offloaded.on_device - offloaded.total
        return PlacedWeights(on_device, offloaded.pinned)
    return PlacedWeights(resident)


class _UpdateBytes(NamedTuple):
    """The bytes that updating the weights takes, wherever they are."""

    gradients: int
    state: int
    stepping: int  # temporary ones, on the device


def _update_bytes(
    optimizer: Optimizers,
    method: Method,
    trained: dict[str, nn.Parameter],
    shards: int,
    in_backward: bool,
    place: MemoryPlacement,
) -> _UpdateBytes:
    """Return the bytes of updating the trained parameters."""
    state = state_bytes(optimizer, trained) // shards
    # a step in the backward pass frees each gradient at once, and was traced there
    if in_backward:
        return _UpdateBytes(0, state, 0)
    gradients = sum(parameter.nbytes for parameter in trained.values()) // shards
    stepping = 0
    # offloaded weights are stepped on the host
    if place.weights:
        stepping = trace_step(optimizer, method, trained) // shards
    return _UpdateBytes(gradients, state, stepping)


def _on_host(place: MemoryPlacement, weights: int, update: _UpdateBytes) -> int:
    """Return the bytes that are offloaded, of the weights with their gradients and of the
    optimizer's state."""
    size = 0
    if not place.weights:
        size += weights + update.gradients
    if not place.state:
        size += update.state
    return size


def _largest_packed(weights: dict[str, Weight]) -> int:
    """Return the number of elements of the largest quantized weight."""
    sizes = [weight.numel for weight in weights.values() if weight.packed]
    return max(sizes, default=0)


def _weights(model: GPT, method: Method, quantize: str) -> dict[str, Weight]:
    """Return the sizes of all tensors by name; a shared tensor is counted once."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    sizes = {}
    unquantized = method.unquantized_modules()
    by_storage = {}
    # filled in reverse order, so that a shared storage keeps the first of its names
    for name, tensor in reversed(tensors):
        by_storage[tensor.untyped_storage()._cdata] = (name, tensor)
    for name, tensor in by_storage.values():
        module = name.rpartition(".")[0]
        packed = (
            quantize != "none"
            and is_quantizable(name, model)
            and module not in unquantized
            and not tensor.requires_grad
        )
        if packed:
            size = packed_bytes(tensor, quantize)
        else:
            size = tensor.untyped_storage().nbytes()
        sizes[name] = Weight(tensor.numel(), size, packed)
    return sizes


def sharded_weights(
    model: GPT, weights: dict[str, Weight], shards: int, gather_dtype: torch.dtype | None
) -> PlacedWeights:
    """Return the bytes on each device of weights that are sharded.

    At most two blocks are gathered at once, one of them in advance. The scales of packed weights
    are on every device.
    gather_dtype: the dtype of gathered weights in full fine-tuning; None: as they are stored.
    """
    units: dict[str, int] = {}
    resident = 0
    parameter_names = {name for name, _ in model.named_parameters()}
    for name, weight in weights.items():
        if name not in parameter_names:  # buffers, which are not sharded
            resident += weight.nbytes
            continue
        sharded = weight.nbytes
        # 4 or 8 bits per element; the remaining bytes are scales
        if weight.packed:
            if weight.nbytes < weight.numel:
                sharded = weight.numel // 2
            else:
                sharded = weight.numel
        resident += -(-sharded // shards) + weight.nbytes - sharded

        # what FSDP2 gathers at once: a block, an untied embedding, or the rest of the network
        if name.startswith("blocks."):
            unit = ".".join(name.split(".")[:2])
        else:
            unit = name.split(".")[0]
        is_unit = unit.startswith("blocks.") or (unit == "embed" and not model.config.tied)
        if not is_unit:
            unit = "network"
        if gather_dtype is None:
            unit_bytes = sharded
        else:
            unit_bytes = weight.numel * gather_dtype.itemsize
        units[unit] = units.get(unit, 0) + unit_bytes
    total = sum(units.values())
    network = units.pop("network", 0)
    # the rest is gathered throughout, of the blocks the two largest at most
    gathered = network + sum(sorted(units.values())[-2:])
    return PlacedWeights(resident, gathered=gathered, all_gathered=total)


def packed_bytes(weight: Tensor, kind: str) -> int:
    """Return the bytes of a weight (out, in) or (E, out, in) in bitsandbytes' format: codes and
    scales."""
    if kind == "int8":
        # an fp32 scale for each row
        return weight.numel() + 4 * weight.numel() // weight.size(-1)

    # a scale for each 64 elements: fp32, or one byte with an fp32 scale for each 256 of them
    scales = weight.numel() // 64
    return weight.numel() // 2 + (
        scales + 4 * scales // 256 if kind.endswith("-dq") else 4 * scales
    )


class Fit(NamedTuple):
    """Settings, and their plan."""

    rows: int
    recomputed: str
    quantize: str
    cpu_offload: str
    plan: Plan

    @property
    def tokens(self) -> int:
        """Return the number of tokens of a micro-batch."""
        return self.plan.memory.shape.rows * self.plan.memory.shape.tokens

    @property
    def slowdown(self) -> float:
        """Return the factor on the time of a token's FLOPs that recomputation and fetched weights
        cause."""
        flops = self.plan.flops
        if self.cpu_offload == "parameters":
            fetched = FETCH_FLOPS * self.plan.parameters / self.tokens
        else:
            fetched = 0.0
        return 1 + (flops.recompute_per_token[self.recomputed] + fetched) / flops.per_token

    @property
    def cost(self) -> float:
        """Return a token's relative time, including the costs of small micro-batches and of
        quantized weights."""
        if self.quantize == "none":
            dequantized = 1.0
        else:
            dequantized = QUANTIZED_COST
        return (
            self.plan.flops.per_token
            * self.slowdown
            * (1 + OVERHEAD_TOKENS / self.tokens)
            * dequantized
        )


OVERHEAD_TOKENS = 128  # fixed cost of a micro-batch, in tokens
# factor for dequantizing each weight before its matrix product
QUANTIZED_COST = 1.05
# FLOPs of a GPU in the time that one frozen element takes over PCIe, forward and backward
FETCH_FLOPS = 50_000


def fastest(
    make_plan: Callable[[int, str, str, str], Plan],
    rows: Sequence[int],
    recomputed: Sequence[str],
    weight_options: Sequence[tuple[str, str]],
    budget: int,
) -> tuple[Fit | None, Fit]:
    """Return (the fastest settings whose peak is within `budget` bytes, or None; those with the
    smallest peak).

    make_plan: returns the plan for rows, recomputed, quantize and cpu_offload. rows: in increasing
    order. recomputed: the fastest first. weight_options: pairs of (quantize, cpu_offload), the
    fastest first.
    """
    fits: list[Fit] = []
    tried: list[Fit] = []
    for quantize, offload in weight_options:
        kinds = recomputed
        # offloaded blocks must be recomputed, or autograd would keep their weights alive
        if offload == "parameters":
            kinds = ("full",)
        for kind in kinds:
            for count in rows:
                fit = Fit(
                    count,
                    kind,
                    quantize,
                    offload,
                    make_plan(count, kind, quantize, offload),
                )
                tried.append(fit)
                # more rows only need more
                if fit.plan.memory.peak > budget:
                    break
                fits.append(fit)
            else:
                # all row counts fit, and the remaining settings are slower
                return min(fits, key=_cost), min(tried, key=_peak)
    return min(fits, key=_cost, default=None), min(tried, key=_peak)


def _cost(fit: Fit) -> float:
    return fit.cost


def _peak(fit: Fit) -> int:
    return fit.plan.memory.peak
