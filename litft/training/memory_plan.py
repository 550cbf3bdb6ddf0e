"""What a run will need: memory by kind, FLOPs, hours; and the fastest settings that fit. No weight is read or allocated.

Weights, gradients and moments are closed forms of the shapes; what passes through memory is seen in `memory_trace`.
`tests/test_plan.py` holds the sum against torch's MemTracker over whole training steps.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from litft.distributed.devices import DTYPES
from litft.methods import Method
from litft.model.quantization import is_quantizable
from litft.model.transformer import GPT, built_in
from litft.pretrained import PretrainedFolder
from litft.training.activation_checkpointing import recompute
from litft.training.cpu_offload import waits
from litft.training.flops import Flops
from litft.training.memory_trace import Shape, in_one_pass, trace_blocks, trace_loss, trace_step
from litft.training.optimizers import state_bytes
from litft.training.residence import residence

FILLED = 0.9  # of the memory there is that a plan may take: CUDA itself and the allocator's gaps take some


@dataclass(frozen=True)
class Memory:
    """Bytes of each kind on one device, in a training step whose micro-batches have `shape`."""

    shape: Shape
    weights: int
    gradients: int
    optimizer: int
    activations: int  # that the blocks keep for their backward
    loss: int  # that passes through memory while the loss and its gradient are made
    gathered: int  # of a sharded network: blocks that are whole for the moment, and the network's own
    backward: int  # that the activations and gradients exceed `activations` by, at the heaviest place of the backward pass
    stepping: int  # that passes through memory while the optimizer steps
    host: int = 0  # what waits in the host's memory

    @property
    def peak(self) -> int:
        """The most at once: when the loss is made, within the backward pass, or when the optimizer steps."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """What there is at that moment."""
        stays = {"weights": self.weights, "optimizer": self.optimizer}
        before = {"gradients": self.gradients * self.shape.accumulated, "activations": self.activations}
        gathered = {"gathered": self.gathered}
        moments = (
            before | {"loss": self.loss} | gathered,
            before | {"backward pass": self.backward} | gathered,
            {"gradients": self.gradients, "optimizer step": self.stepping},
        )
        return stays | max(moments, key=lambda moment: sum(moment.values()))

    def line(self) -> str:
        """In words, in GiB, or in MiB where it is little; the parts add up to the peak."""
        unit, size = unit_of(self.peak)
        parts = ", ".join(f"{kind} {part / size:.2f}" for kind, part in self.parts.items() if part)
        host = f"; {in_words(self.host)} wait in the host's memory" if self.host else ""
        return f"{self.peak / size:.2f} {unit} at its peak, with micro-batches of {self.shape} ({parts}){host}"


def unit_of(size: int) -> tuple[str, int]:
    """What so many bytes are counted in, and its bytes."""
    return ("GiB", 2**30) if size >= 2**30 else ("MiB", 2**20)


def in_words(size: int) -> str:
    """So many bytes."""
    unit, one = unit_of(size)
    return f"{size / one:.1f} {unit}"


@dataclass(frozen=True)
class Plan:
    """What training a model by a method needs."""

    parameters: int
    trained: int
    flops: Flops
    memory: Memory
    gathered: int  # bytes of all weights as FSDP2 gathers them; 0 where they are not sharded
    blocks: int

    def title_line(self, method: str) -> str:
        """How much of the model is trained."""
        return f"{self.parameters:,} parameters; {method} trains {self.trained:,} ({self.trained / self.parameters:.2%})"


def predict(
    source: PretrainedFolder,
    method: Method,
    precision: str,
    quantize: str,
    shape: Shape,
    optimizer: str = "adamw",
    recomputed: str = "none",
    device: str = "cuda",
    in_backward: bool = False,
    cpu_offload: str = "none",
    shards: int = 1,
) -> Plan:
    """The plan of training `source` by `method`, which has chosen its targets.

    precision: what the network computes in (bf16, bf16-true, fp32). quantize: the base's kind, or none. optimizer: one of
    OPTIMIZERS. recomputed: none, selective or full. device: cpu or cuda. in_backward: whether gradients are forgotten as
    soon as they are used. cpu_offload: none, parameters, or activations (two blocks' stay).
    shards: into how many parts FSDP2 cuts weights, gradients and moments; then `parameters` means all of these.
    """
    method = copy.copy(method)
    method.tokens = {}  # some rows, which are too few to matter and want real ids
    compute = DTYPES["fp32" if precision == "fp32" else "bf16"]
    with FakeTensorMode():
        model, parameters = _network(source, method, precision)
        flops = Flops(model)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        weights = _weights(model, method, quantize)
        dequantized = compute.itemsize * max((w.numbers for w in weights.values() if w.packed), default=0)
        every, gathered, resident, host = 0, 0, sum(w.bytes for w in weights.values()), 0
        if shards > 1:
            every, gathered, resident = _sharded(model, weights, shards, compute if method.saves_full_model else None)
        elif cpu_offload == "parameters":
            host, here = _waiting(model)
            resident += here - host
        recompute(model.train(), recomputed)
        place = residence(optimizer, cpu_offload, shards > 1, device)
        steps = in_one_pass(model, method, optimizer) if in_backward else None
        loss = trace_loss(model, shape, compute, device, steps)
        activations, backward, kept = trace_blocks(model, shape, compute, steps, shards, place.activations)
        gradients = 0 if in_backward else sum(p.nbytes for p in named.values()) // shards
        state = state_bytes(optimizer, named) // shards
        host += kept + (0 if place.weights else resident + gradients) + (0 if place.state else state)
        memory = Memory(
            shape,
            weights=resident * place.weights,
            gradients=gradients * place.weights,
            optimizer=state * place.state,
            activations=activations,
            loss=max(loss, dequantized),
            gathered=gathered,
            backward=backward + dequantized,
            stepping=0 if in_backward or not place.weights else trace_step(optimizer, method, named) // shards,
            host=host,
        )
    return Plan(parameters, sum(p.numel() for p in named.values()), flops, memory, every, len(model.blocks))


def _network(source: PretrainedFolder, method: Method, precision: str) -> tuple[GPT, int]:
    """The network with the method on it, and how many parameters it has without."""
    with built_in(DTYPES[method.storage(precision)]):
        model = GPT(source.config)
    parameters = sum(p.numel() for p in model.parameters())
    method.attach(model, keep=False)
    method.compute_in(model, precision)
    for name in method.frozen:
        model.get_parameter(name).requires_grad_(False)
    return model, parameters


def _waiting(model: GPT) -> tuple[int, int]:
    """Bytes of frozen weights that wait on the host, and of those that are fetched at once: a block's and the next one's."""
    waiting = [sum(p.nbytes for p in block.parameters() if waits(p)) for block in model.blocks]
    return sum(waiting), min(sum(waiting), 2 * max(waiting))


class Weight(NamedTuple):
    """What a network keeps of a tensor."""

    numbers: int
    bytes: int
    packed: bool


def _weights(model: GPT, method: Method, quantize: str) -> dict[str, Weight]:
    """Every tensor's, one that is shared once, by its name."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    found, plain = {}, method.unquantized_modules()
    for name, tensor in {t.untyped_storage()._cdata: (name, t) for name, t in reversed(tensors)}.values():
        owner = name.rpartition(".")[0]
        packs = quantize != "none" and is_quantizable(name, model) and owner not in plain and not tensor.requires_grad
        size = packed_bytes(tensor, quantize) if packs else tensor.untyped_storage().nbytes()
        found[name] = Weight(tensor.numel(), size, packs)
    return found


def _sharded(model: GPT, weights: dict[str, Weight], shards: int, rounded: torch.dtype | None) -> tuple[int, int, int]:
    """Bytes of all that is gathered, of that at once, and those that a device keeps: all scales of packed weights, too.

    rounded: what full fine-tuning gathers in. Two blocks at most are there, one of them on its way.
    """
    units: dict[str, int] = {}
    resident = 0
    known = {name for name, _ in model.named_parameters()}
    for name, weight in weights.items():
        if name not in known:  # tables, which each has
            resident += weight.bytes
            continue
        bits = weight.bytes
        if weight.packed:  # 4 or 8 bits a number: the rest are scales
            bits = weight.numbers // 2 if weight.bytes < weight.numbers else weight.numbers
        resident += -(-bits // shards) + weight.bytes - bits
        unit = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else name.split(".")[0]
        unit = unit if unit.startswith("blocks.") or (unit == "embed" and not model.config.tied) else "network"
        units[unit] = units.get(unit, 0) + (bits if rounded is None else weight.numbers * rounded.itemsize)
    every, network = sum(units.values()), units.pop("network", 0)
    return every, network + sum(sorted(units.values())[-2:]), resident


def packed_bytes(weight: Tensor, kind: str) -> int:
    """What bitsandbytes keeps of a weight (out, in) or (E, out, in): bits, and a scale for every row or 64 numbers."""
    if kind == "int8":
        return weight.numel() + 4 * weight.numel() // weight.size(-1)
    scales = weight.numel() // 64
    return weight.numel() // 2 + (scales + 4 * scales // 256 if kind.endswith("-dq") else 4 * scales)


class Fit(NamedTuple):
    """Settings, and what they need."""

    rows: int
    recomputed: str
    quantize: str
    cpu_offload: str
    plan: Plan

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.plan.memory.shape.rows * self.plan.memory.shape.tokens

    @property
    def slower(self) -> float:
        """The time of a token as a part of that of its FLOPs: some are made again, weights may be waited for."""
        flops = self.plan.flops
        fetched = FETCHED_COST * self.plan.parameters / self.tokens if self.cpu_offload == "parameters" else 0.0
        return 1 + (flops.forward[self.recomputed] + fetched) / flops.per_token

    @property
    def cost(self) -> float:
        """The time of a token, to compare with: also what small micro-batches and quantized weights cost."""
        dequantized = QUANTIZED_COST if self.quantize != "none" else 1.0
        return self.plan.flops.per_token * self.slower * (1 + FEW / self.tokens) * dequantized


FEW = 128  # tokens of a micro-batch that cost a GPU as much as twice as many
QUANTIZED_COST = 1.05  # of dequantizing each weight before its product
FETCHED_COST = 50_000  # FLOPs that a GPU could make while a frozen number comes over PCIe, forward and backward


def fastest(
    planned: Callable[[int, str, str, str], Plan],
    rows: Sequence[int],
    recomputed: Sequence[str],
    held: Sequence[tuple[str, str]],
    budget: int,
) -> tuple[Fit | None, Fit]:
    """The fastest of these settings whose peak is within `budget` bytes, None where there is none; and the smallest.

    planned: the plan for rows, recomputed, quantize and cpu_offload. rows and recomputed: from few to many, from the fastest
    to the smallest. held: how the weights may be, (quantize, cpu_offload), the fastest first.
    """
    found, smallest = [], None
    for quantize, offload in held:
        for kind in recomputed if offload != "parameters" else ("full",):
            for count in rows:
                fit = Fit(count, kind, quantize, offload, planned(count, kind, quantize, offload))
                smallest = min(smallest or fit, fit, key=lambda each: each.plan.memory.peak)
                if fit.plan.memory.peak > budget:
                    break
                found.append(fit)
            else:  # all fit: what comes now is slower
                return min(found, key=lambda fit: fit.cost), smallest
    return min(found, key=lambda fit: fit.cost, default=None), smallest
