"""What a run will need: memory by kind, FLOPs, hours. No weight is read and none allocated.

Weights, gradients, moments and logits are closed forms of the shapes. What the blocks keep for their backward is counted
where autograd keeps it: each distinct block runs once on fake tensors, so that no change of the network goes unnoticed.
`tests/test_plan.py` holds the sum against torch's MemTracker over whole training steps.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from litft.config import Config
from litft.flops import Flops
from litft.folder import Source
from litft.loss import CHUNK, is_plain
from litft.mlp import MoE
from litft.model import GPT
from litft.optim import state_bytes
from litft.parallel import DTYPES
from litft.peft import Method
from litft.peft.parts import Part, Trained
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
    logits: int  # of the loss's chunks, with the gradients that it makes at once
    dequantized: int  # the largest weight of a quantized base, for its product
    rounding: int  # all that `optim.Rounded` makes of the largest weight to step it

    @property
    def peak(self) -> int:
        """The most at once: when the loss is made, or when the optimizer steps."""
        at_loss = self.activations + max(self.logits, self.dequantized) + self.gradients * self.shape.accumulated
        return self.weights + self.optimizer + max(at_loss, self.gradients + self.rounding)

    def line(self) -> str:
        """In words, in GiB, or in MiB where it is little."""
        unit, size = ("GiB", 2**30) if self.peak >= 2**30 else ("MiB", 2**20)
        kinds = ("weights", "gradients", "optimizer", "activations", "logits")
        parts = ", ".join(f"{kind} {getattr(self, kind) / size:.2f}" for kind in kinds)
        return f"{self.peak / size:.2f} {unit} at its peak, with micro-batches of {self.shape} ({parts})"


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


def predict(source: Source, method: Method, precision: str, quantize: str, shape: Shape, optimizer: str = "adamw") -> Plan:
    """The plan of training `source` by `method`, which has chosen its targets.

    precision: what the network computes in (bf16, bf16-true, fp32). quantize: the base's kind, or none. optimizer: one of
    OPTIMIZERS. CUDA itself and the caching of torch's allocator take half a GiB to one besides.
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
        for module in [module for module in model.modules() if isinstance(module, MoE)]:
            Evenly.mix_over(module)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        trained = list(named.values())
        weights, dequantized = _weights(model, method, quantize, compute)
        memory = Memory(
            shape,
            weights,
            gradients=sum(p.numel() * p.element_size() for p in trained),
            optimizer=state_bytes(optimizer, named),
            activations=_activations(model.train(), shape, compute),
            logits=_logits(source.config, model.lm_head, shape, compute),
            dequantized=dequantized,
            rounding=max((20 * p.numel() for p in trained if p.dtype == torch.bfloat16), default=0),
        )
    return Plan(parameters, sum(p.numel() for p in trained), flops, memory)


@contextmanager
def _built_in(dtype: torch.dtype) -> Iterator[None]:
    """Inside, modules are made in this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Evenly(Part):
    """Experts that share the tokens evenly: a fake tensor has no values to choose by."""

    def counts(self, chosen: Tensor) -> list[int]:
        each, rest = divmod(chosen.numel(), self.count)
        return [each + (number < rest) for number in range(self.count)]


def _weights(model: GPT, method: Method, quantize: str, compute: torch.dtype) -> tuple[int, int]:
    """Bytes of all weights, and of the largest that is dequantized for a product."""
    others = [p for m in model.modules() if isinstance(m, Trained) and "others" in m.__dict__ for p in m.others.values()]
    tensors = [*((name, p) for name, p in model.named_parameters()), *(("", p) for p in others), *model.named_buffers()]
    total, largest, plain = 0, 0, method.plain()
    for name, tensor in {t.untyped_storage()._cdata: (name, t) for name, t in reversed(tensors)}.values():
        owner = name.rpartition(".")[0]
        if quantize != "none" and name and is_quantizable(name, model) and owner not in plain and not tensor.requires_grad:
            total += packed_bytes(tensor, quantize)
            largest = max(largest, tensor[0].numel() if tensor.dim() == 3 else tensor.numel())
        else:
            total += tensor.untyped_storage().nbytes()
    return total, largest * compute.itemsize


def packed_bytes(weight: Tensor, kind: str) -> int:
    """What bitsandbytes keeps of a weight (out, in) or (E, out, in): bits, and a scale for every row or 64 numbers."""
    if kind == "int8":
        return weight.numel() + 4 * weight.numel() // weight.size(-1)
    scales = weight.numel() // 64
    return weight.numel() // 2 + (scales + 4 * scales // 256 if kind.endswith("-dq") else 4 * scales)


def _activations(model: GPT, shape: Shape, dtype: torch.dtype) -> int:
    """Bytes that a forward of fake tensors keeps. Blocks that are alike are run once."""
    known = {p.untyped_storage()._cdata for p in model.parameters()}
    positions = torch.arange(shape.tokens)[None]
    angles = model.angles(positions, None, dtype)
    known |= {t.untyped_storage()._cdata for each in angles for t in each if t is not None}
    x = torch.empty(shape.rows, shape.tokens, model.config.dim, dtype=dtype, requires_grad=model.embed.weight.requires_grad)
    total, alike = 0, {}
    for layer, block, rotary in zip(model.config.layers, model.blocks, model.rotary_of, strict=True):
        parameters = tuple((name, p.requires_grad) for name, p in block.named_parameters())
        key = (layer, parameters, tuple(type(module) for module in block.modules()), x.requires_grad)
        if key not in alike:
            angle = angles[rotary] if rotary is not None else None
            alike[key] = _kept(partial(block, x, angle, None, None), known)
        kept, grows = alike[key]
        total += kept
        x = x.detach().requires_grad_(grows)
    return total + _kept(partial(model.norm, x), known)[0]


def _kept(run: Callable[[], Tensor], known: set[int]) -> tuple[int, bool]:
    """Bytes that autograd keeps of what `run` computes, in storages not `known`; and whether there is anything to keep."""
    storages = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        y = run()
    return sum(storage.nbytes() for key, storage in storages.items() if key not in known), y.requires_grad


def _logits(config: Config, head: nn.Linear, shape: Shape, dtype: torch.dtype) -> int:
    """Bytes of one chunk of `loss.py` at its widest, and of the gradients that the loss makes; all tokens supervised."""
    count, width, size = shape.rows * shape.tokens, config.dim, dtype.itemsize
    chunk = min(CHUNK, count) * config.vocab_size
    hidden = 2 * count * width * size  # what is supervised, and its gradient
    if not is_plain(head):
        return 16 * chunk + hidden  # autograd's own: logits, their softmax and both gradients
    own = chunk * (12 if config.logit_softcap else 4 + size % 4)  # capped: the cap's slope, and a step on the way to it
    # of a trained head the gradient so far, and a chunk's part of it
    return own + hidden + (4 + size) * config.vocab_size * width * head.weight.requires_grad
