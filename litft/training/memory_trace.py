"""What passes through memory in a training step: seen on fake tensors whose lives are watched. Nothing is allocated.

The embedding, each distinct block, the loss and the optimizer run once each, so that no change of the network or of an
optimizer goes unnoticed. `plan` adds up what is found here.
"""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from litft.args import TrainArgs
from litft.methods import Method
from litft.model.loss import AT_ONCE, CHUNK, summed_cross_entropy
from litft.model.transformer import GPT
from litft.training.cpu_offload import SMALLEST
from litft.training.optimizers import BY_KERNELS, InBackward, is_hidden, make_optimizer

# bytes that were found: the plans that are compared for a run share a head and what is trained
LOSSES: dict[tuple, int] = {}
STEPS: dict[tuple, int] = {}


class Shape(NamedTuple):
    """A micro-batch, and whether a step has several: then it begins beside the gradients of those before."""

    rows: int
    tokens: int  # of a row
    accumulated: bool = False
    learned: int | None = None  # the most tokens of a micro-batch that the loss counts; None: all

    def __str__(self) -> str:
        return f"{self.rows} x {self.tokens:,} tokens"


def trace_step(name: str, method: Method, trained: dict[str, nn.Parameter]) -> int:
    """Bytes that pass through memory, beyond gradients and state, while an optimizer steps what is trained.

    Optimizers step parameter by parameter, so one of each size is enough; schedule_free's steps all at once.
    """
    every = name == "schedule_free"
    distinct = {(n if every else None, p.shape, p.dtype, is_hidden(n, p)): (n, p) for n, p in trained.items()}
    key = (name, tuple(distinct))
    if key in STEPS:
        return STEPS[key]
    copies = {n: nn.Parameter(torch.empty_like(p)) for n, p in distinct.values()}
    optimizer = make_optimizer(TrainArgs(optimizer=_stand_in(name)), method, copies)
    for parameter in copies.values():
        parameter.grad = torch.empty_like(parameter)
    with Alive() as alive:
        optimizer.step()  # the first makes the state
        before = alive.mark()
        optimizer.step()
    STEPS[key] = alive.most - before
    return STEPS[key]


def in_one_pass(model: GPT, method: Method, name: str) -> InBackward:
    """The optimizer that steps each of the model's parameters as soon as its gradient is there."""
    args = TrainArgs(optimizer=_stand_in(name), optimizer_in_backward=True)
    return make_optimizer(args, method, {n: p for n, p in model.named_parameters() if p.requires_grad})


def _stand_in(name: str) -> str:
    """An optimizer that steps in place as this one does, and runs on fake tensors: the fused kernels of others do not."""
    missing = name == "schedule_free" and find_spec("schedulefree") is None
    return "adamw" if missing or name in (*BY_KERNELS, "sgd") else name


class Alive(TorchDispatchMode):
    """Counts the bytes of what is made within it: those alive now, and the most there were at once since `mark`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:  # Adafactor asks for a number, and fake tensors have none
            return 1.0
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

    forward: int  # at most, while its forward runs, with its input and output
    kept: int  # of its forward, until its backward has run, with its input where that is kept
    gradients: int  # of its parameters
    passing: int  # beyond what was kept, at most, while its backward runs; its parameters' gradients with it
    grows: bool  # whether what comes after it has a gradient


class _Begin(torch.autograd.Function):
    """Stands for all that comes before: a leaf would be held by autograd itself, whether it is needed or not."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, like: Tensor) -> Tensor:
        """A tensor such as `like`."""
        return torch.empty_like(like)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Nothing of interest."""
        return torch.empty(()), None


class _End(torch.autograd.Function):
    """Stands for all that follows: its gradient belongs to the backward pass alone, which may write into it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        """A number."""
        ctx.like = y.shape, y.dtype
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """A gradient of y."""
        shape, dtype = ctx.like
        return torch.empty(shape, dtype=dtype)


def _input(like: Tensor) -> Tensor:
    """A tensor such as this one, with a gradient where it has one."""
    return _Begin.apply(torch.empty((), requires_grad=True), like) if like.requires_grad else torch.empty_like(like)


def _passage(
    run: Callable[[Tensor], Tensor], like: Tensor, own: list[nn.Parameter], accumulated: bool, steps: InBackward | None
) -> Passage:
    """Run it forward and backward on an input such as `like`.

    accumulated: its parameters have a gradient before. steps: what steps them in the backward pass.
    """
    trained = [parameter for parameter in own if parameter.requires_grad]
    if steps and not steps.state.keys() >= set(trained):  # the first step makes the optimizer's state
        with Alive(), steps.stepping():
            _End.apply(run(_input(like))).backward()
    for parameter in trained if accumulated else ():
        parameter.grad = torch.empty_like(parameter)
    with Alive() as alive:
        x = _input(like)
        y = run(x)
        del x  # or what is kept by nobody would count
        grows, kept, forward = y.requires_grad, alive.now - y.untyped_storage().nbytes(), alive.most
        before = alive.mark()
        if grows:
            end = _End.apply(y)
            with steps.stepping() if steps else nullcontext():
                end.backward()
        passing = alive.most - before
    for parameter in trained:
        parameter.grad = None
    return Passage(forward, kept if grows else 0, sum(p.nbytes for p in trained), passing if grows else 0, grows)


def trace_blocks(
    model: GPT, shape: Shape, dtype: torch.dtype, steps: InBackward | None, shards: int, stay_here: bool
) -> tuple[int, int, int]:
    """Bytes that the embedding, the blocks and the last norm keep; those beyond at the heaviest place of the backward pass;
    and those that wait on the host.

    Blocks that are alike are run once. Of a sharded network, a block's gradient is there whole, and in fp32 to be reduced.
    stay_here: else what blocks keep is on its way to the host when the next one runs, or fetched before its turn.
    """
    passages = _passages(model, shape, dtype, steps, shards)
    stay_here |= shape.rows * shape.tokens * model.config.dim * dtype.itemsize < SMALLEST  # what is worth no copy
    every, largest = sum(passage.kept for passage in passages), max(passage.kept for passage in passages)
    activations = alive = every if stay_here else min(every, 2 * largest)
    before = accumulate((passage.kept for passage in passages), initial=0)
    forward = max(min(kept, alive) + passage.forward for kept, passage in zip(before, passages, strict=False))
    most, head = max(alive, forward), model.lm_head.weight
    stay = not (shape.accumulated or steps)  # gradients that are made now
    tied = model.config.tied  # then autograd holds the head's until the embedding's is there, and adds them up
    done = head.nbytes * (head.requires_grad and (stay or tied))
    for passage in reversed(passages):
        reduced = passage.gradients if shards > 1 else 0
        # the sum of both gradients of a tied weight; where it is stepped at once, what that takes is more than the sum
        added = head.nbytes if tied and head.requires_grad and not steps and passage is passages[0] else 0
        most = max(most, alive + done + passage.passing + reduced + added)
        alive, done = alive - passage.kept * stay_here, done + passage.gradients * stay // shards
    return activations, most - activations, 0 if stay_here else every


def _passages(model: GPT, shape: Shape, dtype: torch.dtype, steps: InBackward | None, shards: int) -> list[Passage]:
    """Of the embedding, each block, and the last norm."""
    positions = torch.arange(shape.tokens)[None]
    cos_sin = model.cos_sin(positions, None, dtype)
    ends = [parameter for name, parameter in model.named_parameters() if name.startswith("embed")]
    tokens = torch.zeros(shape.rows, shape.tokens, dtype=torch.int64)
    passages = [_passage(lambda ids: model.embedded(ids, positions), tokens, ends, shape.accumulated, steps)]
    x = torch.empty(shape.rows, shape.tokens, model.config.dim, dtype=dtype, requires_grad=passages[0].grows)
    alike: dict[tuple, Passage] = {}
    for layer, block, rotary in zip(model.config.layers, model.blocks, model.rotary_of, strict=True):
        key = (layer, tuple((n, p.requires_grad) for n, p in block.named_parameters()), x.requires_grad)
        key += (tuple(type(module) for module in block.modules()),)
        if key not in alike:
            rest = (cos_sin[rotary] if rotary is not None else None, None, None)
            accumulated = shape.accumulated and shards == 1
            alike[key] = _passage(lambda x, b=block, r=rest: b(x, *r), x, [*block.parameters()], accumulated, steps)
        passages.append(alike[key])
        x = x.detach().requires_grad_(passages[-1].grows)
    return [*passages, _passage(model.norm, x, [*model.norm.parameters()], shape.accumulated, steps)]


def trace_loss(model: GPT, shape: Shape, dtype: torch.dtype, device: str, steps: InBackward | None) -> int:
    """Bytes that pass through memory while the loss of one micro-batch is made."""
    every, head = shape.rows * shape.tokens, model.lm_head
    count = min(shape.learned or every, every)
    rows = min(count, CHUNK)  # what follows is chunk after chunk
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    targets, target_indices = torch.zeros(1, rows, dtype=torch.int64), torch.arange(rows)

    def run() -> None:
        hidden = torch.empty(1, rows, model.config.dim, dtype=dtype, requires_grad=True)
        # a tied weight's gradient is complete when the embedding's part is there
        with steps.stepping() if steps and not model.config.tied else nullcontext():
            summed_cross_entropy(hidden, head, targets, model.config.logit_softcap, target_indices=target_indices)[
                0
            ].backward()

    if steps and trained:
        with Alive():
            run()  # the first step makes the optimizer's state
    for parameter in trained if shape.accumulated else ():
        parameter.grad = torch.empty_like(parameter)
    key = (rows, dtype, shape.accumulated, model.config.logit_softcap, tuple(map(type, head.modules())))
    key += (getattr(head, "lora_dropout", 0) > 0, *((p.shape, p.dtype, p.requires_grad) for p in head.parameters()))
    most = LOSSES.get(key) if steps is None else None
    if most is None:
        with Alive() as alive:
            run()
        most = alive.most
    if steps is None:
        LOSSES[key] = most
    for parameter in trained:
        parameter.grad = None
    size = model.config.vocab_size * rows
    softmax = 4 * (min(AT_ONCE[device], size) - min(AT_ONCE["cpu"], size))
    # the hidden states, those that are learned from, and the gradient of these
    beyond = (every - rows) + 2 * (count - rows)
    return most + softmax + beyond * model.config.dim * dtype.itemsize
