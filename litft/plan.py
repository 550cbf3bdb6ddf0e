"""What a run will need: memory by kind, FLOPs, hours; and the fastest settings that fit. No weight is read or allocated.

Weights, gradients and moments are closed forms of the shapes. What a block keeps for its backward, and what passes through
memory meanwhile, is seen: each distinct block, and the loss, run once forward and backward on fake tensors whose lives are
watched, so that no change of the network goes unnoticed. `tests/test_plan.py` holds the sum against torch's MemTracker over
whole training steps.
"""

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from litft.blockwise import recompute
from litft.flops import Flops
from litft.folder import Source
from litft.loss import AT_ONCE, CHUNK, summed_cross_entropy
from litft.model import GPT
from litft.offload import waits
from litft.optim import state_bytes
from litft.parallel import DTYPES
from litft.peft import Method
from litft.peft.parts import Trained
from litft.quantize import is_quantizable


class Shape(NamedTuple):
    """A micro-batch, and whether a step has several: then it begins beside the gradients of those before."""

    rows: int
    tokens: int  # of a row
    accumulated: bool = False

    def __str__(self) -> str:
        return f"{self.rows} x {self.tokens:,} tokens"


@dataclass(frozen=True)
class Memory:
    """Bytes of each kind on one device, in a training step whose micro-batches have `shape`."""

    shape: Shape
    weights: int
    gradients: int
    optimizer: int
    activations: int  # that the blocks keep for their backward
    loss: int  # that passes through memory while the loss and its gradient are made
    backward: int  # that the activations and gradients exceed `activations` by, at the heaviest place of the backward pass
    rounding: int  # all that `optim.Rounded` makes of the largest weight to step it

    @property
    def peak(self) -> int:
        """The most at once: when the loss is made, within the backward pass, or when the optimizer steps."""
        before = self.gradients * self.shape.accumulated
        passing = max(before + self.activations + self.loss, before + self.activations + self.backward)
        return self.weights + self.optimizer + max(passing, self.gradients + self.rounding)

    def line(self) -> str:
        """In words, in GiB, or in MiB where it is little."""
        unit, size = unit_of(self.peak)
        kinds = ("weights", "gradients", "optimizer", "activations", "loss")
        parts = ", ".join(f"{kind} {getattr(self, kind) / size:.2f}" for kind in kinds)
        return f"{self.peak / size:.2f} {unit} at its peak, with micro-batches of {self.shape} ({parts})"


def unit_of(size: int) -> tuple[str, int]:
    """What so many bytes are counted in, and its bytes."""
    return ("GiB", 2**30) if size >= 2**30 else ("MiB", 2**20)


@dataclass(frozen=True)
class Plan:
    """What training a model by a method needs."""

    parameters: int
    trained: int
    flops: Flops
    memory: Memory

    def title_line(self, method: str) -> str:
        """How much of the model is trained."""
        return f"{self.parameters:,} parameters; {method} trains {self.trained:,} ({self.trained / self.parameters:.2%})"


def predict(
    source: Source,
    method: Method,
    precision: str,
    quantize: str,
    shape: Shape,
    optimizer: str = "adamw",
    recomputed: str = "none",
    device: str = "cuda",
    in_backward: bool = False,
    cpu_offload: str = "none",
) -> Plan:
    """The plan of training `source` by `method`, which has chosen its targets.

    precision: what the network computes in (bf16, bf16-true, fp32). quantize: the base's kind, or none. optimizer: one of
    OPTIMIZERS. recomputed: none, selective or full. device: cpu or cuda. in_backward: whether gradients are forgotten as
    soon as they are used. cpu_offload: none, parameters, or activations, of which the plan counts all as if they stayed.
    CUDA itself and the caching of torch's allocator take half a GiB to one besides.
    """
    method = copy.copy(method)
    method.tokens = {}  # some rows, which are too few to matter and want real ids
    compute = DTYPES["fp32" if precision == "fp32" else "bf16"]
    with FakeTensorMode():
        with _built_in(DTYPES[method.storage(precision)]):
            model = GPT(source.config)
        parameters = sum(p.numel() for p in model.parameters())
        method.attach(model)
        method.compute_in(model, precision)
        for name in method.frozen:
            model.get_parameter(name).requires_grad_(False)
        flops = Flops(model)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        weights, dequantized = _weights(model, method, quantize, compute)
        if cpu_offload == "parameters":
            waiting = [sum(p.nbytes for p in block.parameters() if waits(p)) for block in model.blocks]
            weights += min(sum(waiting), 2 * max(waiting)) - sum(waiting)
        recompute(model.train(), recomputed)
        activations, backward = _blocks(model, shape, compute, in_backward)
        memory = Memory(
            shape,
            weights,
            gradients=0 if in_backward else sum(p.nbytes for p in named.values()),
            optimizer=state_bytes(optimizer, named),
            activations=activations,
            loss=max(_loss(model, shape, compute, device), dequantized),
            backward=backward + dequantized,
            rounding=max((20 * p.numel() for p in named.values() if p.dtype == torch.bfloat16), default=0),
        )
    return Plan(parameters, sum(p.numel() for p in named.values()), flops, memory)


@contextmanager
def _built_in(dtype: torch.dtype) -> Iterator[None]:
    """Inside, modules are made in this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _weights(model: GPT, method: Method, quantize: str, compute: torch.dtype) -> tuple[int, int]:
    """Bytes of all weights, and of the largest that is dequantized for a product."""
    others = [p for m in model.modules() if isinstance(m, Trained) and "others" in m.__dict__ for p in m.others.values()]
    tensors = [*((name, p) for name, p in model.named_parameters()), *(("", p) for p in others), *model.named_buffers()]
    total, largest, plain = 0, 0, method.plain()
    for name, tensor in {t.untyped_storage()._cdata: (name, t) for name, t in reversed(tensors)}.values():
        owner = name.rpartition(".")[0]
        if quantize != "none" and name and is_quantizable(name, model) and owner not in plain and not tensor.requires_grad:
            total += packed_bytes(tensor, quantize)
            largest = max(largest, tensor.numel())
        else:
            total += tensor.untyped_storage().nbytes()
    return total, largest * compute.itemsize


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


class Alive(TorchDispatchMode):
    """Counts the bytes of what is made within it: those alive now, and the most there were at once since `mark`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}  # views of these
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self.known | before:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def gone(self, key: int, size: int) -> None:
        """A storage has been freed."""
        self.known.discard(key)
        self.now -= size

    def mark(self) -> int:
        """Count the most from here; what is alive now."""
        self.most = self.now
        return self.now


class Passage(NamedTuple):
    """What one block does to memory."""

    kept: int  # of its forward, until its backward has run, with its input where that is kept
    gradients: int  # of its parameters
    passing: int  # beyond what was kept, at most, while its backward runs; its parameters' gradients with it
    grows: bool  # whether what comes after it has a gradient


def _passage(run: Callable[[Tensor], Tensor], like: Tensor, own: list[nn.Parameter], accumulated: bool) -> Passage:
    """Run it forward and backward on an input such as `like`; accumulated: its parameters have a gradient before."""
    trained = [parameter for parameter in own if parameter.requires_grad]
    for parameter in trained if accumulated else ():
        parameter.grad = torch.empty_like(parameter)
    with Alive() as alive:
        x = torch.empty_like(like, requires_grad=like.requires_grad)
        y = run(x)
        del x  # or what is kept by nobody would count
        grows, kept = y.requires_grad, alive.now - y.untyped_storage().nbytes()
        gradient = torch.empty_like(y)
        before = alive.mark() - gradient.nbytes  # which is alive in the whole backward pass, too
        if grows:
            y.backward(gradient)
        passing = alive.most - before
    for parameter in trained:
        parameter.grad = None
    return Passage(kept if grows else 0, sum(p.nbytes for p in trained), passing if grows else 0, grows)


def _blocks(model: GPT, shape: Shape, dtype: torch.dtype, in_backward: bool) -> tuple[int, int]:
    """Bytes that the blocks and the last norm keep, and those beyond at the heaviest place of the backward pass.

    Blocks that are alike are run once.
    """
    angles = model.angles(torch.arange(shape.tokens)[None], None, dtype)
    embedding = model.embed.weight
    grows = any(parameter.requires_grad for parameter in model.embed.parameters())
    x = torch.empty(shape.rows, shape.tokens, model.config.dim, dtype=dtype, requires_grad=grows)
    passages, alike = [], {}
    for layer, block, rotary in zip(model.config.layers, model.blocks, model.rotary_of, strict=True):
        key = (layer, tuple((n, p.requires_grad) for n, p in block.named_parameters()), x.requires_grad)
        key += (tuple(type(module) for module in block.modules()),)
        if key not in alike:
            angle = angles[rotary] if rotary is not None else None
            alike[key] = _passage(
                lambda x, b=block, a=angle: b(x, a, None, None), x, [*block.parameters()], shape.accumulated
            )
        passages.append(alike[key])
        x = x.detach().requires_grad_(passages[-1].grows)
    passages.append(_passage(model.norm, x, [*model.norm.parameters()], shape.accumulated))
    activations = alive = sum(passage.kept for passage in passages)
    most, head = alive, model.lm_head.weight
    stay = not (shape.accumulated or in_backward)  # gradients that are made now
    tied = model.config.tied  # then autograd holds the head's until the embedding's is there, and adds them up
    done = head.nbytes * (head.requires_grad and (stay or tied))
    for passage in reversed(passages):
        most = max(most, alive + done + passage.passing)
        alive, done = alive - passage.kept, done + passage.gradients * stay
    if embedding.requires_grad:  # its gradient is made whole
        most = max(most, done + embedding.nbytes * (1 + tied))
    return activations, most - activations


def _loss(model: GPT, shape: Shape, dtype: torch.dtype, device: str) -> int:
    """Bytes that pass through memory while the loss of one micro-batch is made, all its tokens supervised."""
    count, head = shape.rows * shape.tokens, model.lm_head
    rows = min(count, CHUNK)  # what follows is chunk after chunk
    accumulated = [p for p in head.parameters() if p.requires_grad and shape.accumulated]
    for parameter in accumulated:
        parameter.grad = torch.empty_like(parameter)
    targets = torch.zeros(1, rows, dtype=torch.int64)
    with Alive() as alive:
        hidden = torch.empty(1, rows, model.config.dim, dtype=dtype, requires_grad=True)
        summed_cross_entropy(hidden, head, targets, model.config.logit_softcap, kept=torch.arange(rows))[0].backward()
    for parameter in accumulated:
        parameter.grad = None
    size = model.config.vocab_size * min(count, CHUNK)
    softmax = 4 * (min(AT_ONCE[device], size) - min(AT_ONCE["cpu"], size))
    return alive.most + softmax + 3 * (count - rows) * model.config.dim * dtype.itemsize
