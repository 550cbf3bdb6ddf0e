"""Temporary memory of a training step, measured on fake tensors whose lifetimes are tracked.

Nothing is allocated.

The embedding, each distinct block, the loss and the optimizer run once each, so changes of the
network or of an optimizer are always accounted for. `memory_plan` adds up the results.
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
from litft.model.device_type import device_type
from litft.model.loss import CHUNK, summed_cross_entropy, token_cross_entropy
from litft.model.packed_sequences import PackedSequences
from litft.model.per_layer_input import BlockExtra, SharedKeys
from litft.model.transformer import GPT
from litft.training.memory_saving.activation_checkpointing import Recomputed, is_recomputed
from litft.training.memory_saving.compile import changes_scores, trains_first_block
from litft.training.memory_saving.cpu_offload import MIN_OFFLOAD_BYTES
from litft.training.optimizers.make import (
    BITSANDBYTES_OPTIMIZERS,
    OptimizerInBackward,
    is_hidden,
    make_optimizer,
)

# measured bytes: the plans that a run compares have the same head and the same trained parameters
LOSS_CACHE: dict[tuple, int] = {}
STEP_CACHE: dict[tuple, int] = {}


class Shape(NamedTuple):
    """The shape of a micro-batch."""

    rows: int
    tokens: int  # per row
    # gradients of earlier micro-batches of the step are already in memory
    accumulated: bool = False
    # maximum number of target tokens in a micro-batch; None: all tokens
    max_targets: int | None = None
    # the objective needs the loss of each token, not their sum
    per_token: bool = False

    def __str__(self) -> str:
        return f"{self.rows} x {self.tokens:,} tokens"


def trace_step(name: str, method: Method, trained: dict[str, nn.Parameter]) -> int:
    """Return the temporary bytes, beyond gradients and state, while the optimizer `name` steps the
    trained parameters.

    Most optimizers step one parameter at a time, so one parameter of each shape is enough;
    schedule_free steps all at once.
    """
    # the bytes depend on shape and dtype, and Muon steps hidden matrices differently
    at_once = name == "schedule_free"
    distinct = {
        (n if at_once else None, p.shape, p.dtype, is_hidden(n, p)): (n, p)
        for n, p in trained.items()
    }
    key = (name, tuple(distinct))

    # the same parameters recur in all plans that a run compares
    if key in STEP_CACHE:
        return STEP_CACHE[key]
    copies = {n: nn.Parameter(torch.empty_like(p)) for n, p in distinct.values()}
    optimizer = make_optimizer(TrainArgs(optimizer=_stand_in(name)), method, copies)
    for parameter in copies.values():
        parameter.grad = torch.empty_like(parameter)
    with AllocationTracker() as tracker:
        optimizer.step()  # the first step creates the state
        before = tracker.reset_peak()
        optimizer.step()
    STEP_CACHE[key] = tracker.peak - before
    return STEP_CACHE[key]


def backward_optimizer(model: GPT, method: Method, name: str) -> OptimizerInBackward:
    """Return an optimizer `name` that steps each of the model's parameters in the backward pass."""
    args = TrainArgs(optimizer=_stand_in(name), optimizer_in_backward=True)
    return make_optimizer(
        args, method, {n: p for n, p in model.named_parameters() if p.requires_grad}
    )


def _stand_in(name: str) -> str:
    """Return an optimizer with the same memory use that runs on fake tensors, as fused kernels do
    not."""
    missing = name == "schedule_free" and find_spec("schedulefree") is None
    if missing or name in (*BITSANDBYTES_OPTIMIZERS, "sgd"):
        return "adamw"
    return name


class AllocationTracker(TorchDispatchMode):
    """Counts the bytes of storages created in this context: the current bytes, and their peak since
    `reset_peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self.live_storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Adafactor reads its step, which fake tensors do not have
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        out = func(*args, **(kwargs or {}))
        # outputs may be views of these
        input_storages = set()
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor):
                input_storages.add(t.untyped_storage()._cdata)
        # views and in-place results share a storage that is counted already
        for tensor in tree_leaves(out):
            if (
                isinstance(tensor, Tensor)
                and (storage := tensor.untyped_storage())._cdata
                not in self.live_storages | input_storages
            ):
                self.live_storages.add(storage._cdata)
                self.current += storage.nbytes()
                weakref.finalize(storage, self.on_free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.current)
        return out

    def on_free(self, key: int, size: int) -> None:
        """Subtract a storage that has been freed."""
        self.live_storages.discard(key)
        self.current -= size

    def reset_peak(self) -> int:
        """Set the peak to the current bytes, and return them."""
        self.peak = self.current
        return self.current


class Trace(NamedTuple):
    """Bytes of one module's forward and backward pass."""

    # peak of the forward pass, with its input and output
    forward: int
    # saved for the backward pass, with the input if that is saved
    saved: int
    gradients: int  # of its parameters
    # peak of the backward pass beyond `saved`, with the parameters' gradients
    backward: int
    has_grad: bool  # whether the output requires a gradient


class _Upstream(torch.autograd.Function):
    """Stands for the modules before: autograd would keep a leaf tensor alive, even if no operation
    saves it."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, example: Tensor) -> Tensor:
        """Return a tensor with the shape and dtype of `example`."""
        return torch.empty_like(example)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return an unused gradient of `leaf`."""
        return torch.empty(()), None


class _Downstream(torch.autograd.Function):
    """Stands for the modules after: only the backward pass refers to its gradient, so it may be
    overwritten."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        """Return a scalar."""
        ctx.output_type = y.shape, y.dtype
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return a gradient of y."""
        shape, dtype = ctx.output_type
        return torch.empty(shape, dtype=dtype)


def _input(like: Tensor) -> Tensor:
    """Return a tensor like `like`, which requires a gradient if `like` does."""
    if like.requires_grad:
        return _Upstream.apply(torch.empty((), requires_grad=True), like)
    return torch.empty_like(like)


def _trace(
    run: Callable[[Tensor], Tensor],
    example: Tensor,
    parameters: list[nn.Parameter],
    accumulated: bool,
    optimizer: OptimizerInBackward | None,
) -> Trace:
    """Trace `run` forward and backward on an input like `example`.

    accumulated: the parameters already have gradients. optimizer: steps the parameters in the
    backward pass.
    """
    # preparation that must not be counted
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    # the first step creates the optimizer's state
    if optimizer and not optimizer.state.keys() >= set(trained):
        with AllocationTracker(), optimizer.stepping():
            _Downstream.apply(run(_input(example))).backward()
    for parameter in trained if accumulated else ():
        parameter.grad = torch.empty_like(parameter)
    with AllocationTracker() as tracker:
        x = _input(example)
        y = run(x)
        # otherwise it would count even if autograd does not save it
        del x
        has_grad = y.requires_grad
        # what the forward pass leaves, but for its output: that is the input of the next module
        saved = tracker.current - y.untyped_storage().nbytes()
        forward = tracker.peak
        before = tracker.reset_peak()
        if has_grad:
            # a scalar to call backward on
            end = _Downstream.apply(y)
            with optimizer.stepping() if optimizer else nullcontext():
                end.backward()
        backward = tracker.peak - before
    for parameter in trained:
        parameter.grad = None
    return Trace(
        forward,
        saved if has_grad else 0,
        sum(p.nbytes for p in trained),
        backward if has_grad else 0,
        has_grad,
    )


def _compiled_excess(model: GPT, shape: Shape, dtype: torch.dtype) -> int:
    """Return the bytes that compiled code takes beyond eager code in the backward pass of a block
    that is recomputed.

    It writes the gradients of gate and up next to the activation, where eager code overwrites it:
    one more tensor of the MLP's width. Measured with scripts/plan_accuracy.py.
    """
    config = model.config
    experts = [
        layer.experts.top_k * layer.experts.hidden_dim for layer in config.layers if layer.experts
    ]
    return shape.rows * shape.tokens * max([config.hidden_dim, *experts]) * dtype.itemsize


def trace_blocks(
    model: GPT,
    shape: Shape,
    dtype: torch.dtype,
    optimizer: OptimizerInBackward | None,
    shards: int,
    on_device: bool,
    compiled: bool,
) -> tuple[int, int, int]:
    """Return bytes of the embedding, the blocks and the final norm: saved activations, the excess
    of the peak over them, and activations in host memory.

    Identical blocks are run once. In a sharded network, a block's full gradient has an fp32 copy
    for the reduction.
    on_device: activations stay on the device; otherwise those of at most two blocks do, and the
    others are offloaded.
    """
    traces = _traces(model, shape, dtype, optimizer, shards, compiled)
    input_bytes = shape.rows * shape.tokens * model.config.stream_dim * dtype.itemsize
    on_device |= input_bytes < MIN_OFFLOAD_BYTES  # too small to offload
    total = sum(trace.saved for trace in traces)
    largest = max(trace.saved for trace in traces)
    activations = alive = total if on_device else min(total, 2 * largest)

    # the forward pass: what the blocks before have saved, and one block's temporary memory
    before = accumulate((trace.saved for trace in traces), initial=0)
    forward = max(
        min(saved, alive) + trace.forward for saved, trace in zip(before, traces, strict=False)
    )
    peak = max(alive, forward)

    # the head's gradient exists before the backward pass of the blocks begins
    head = model.lm_head.weight
    # whether the backward pass allocates gradients that remain
    allocates = not (shape.accumulated or optimizer)
    # autograd then holds the head's gradient until it can add the embedding's
    tied = model.config.tied
    gradients = head.nbytes * (head.requires_grad and (allocates or tied))

    # the backward pass: from the last block to the first, activations go and gradients come
    for trace in reversed(traces):
        reduced = trace.gradients if shards > 1 else 0
        # the sum of both gradients of a tied weight; an optimizer step in the backward pass takes
        # more than that. On a GPU, autograd was measured to add them in place
        # (scripts/plan_accuracy.py)
        if tied and head.requires_grad and not optimizer and trace is traces[0]:
            added = head.nbytes
        else:
            added = 0
        added *= device_type(head) == "cpu"
        peak = max(peak, alive + gradients + trace.backward + reduced + added)
        alive = alive - trace.saved * on_device
        gradients = gradients + trace.gradients * allocates // shards
    if compiled and is_recomputed(model):
        excess = _compiled_excess(model, shape, dtype)
    else:
        excess = 0
    return activations, peak - activations + excess, 0 if on_device else total


def _traces(
    model: GPT,
    shape: Shape,
    dtype: torch.dtype,
    optimizer: OptimizerInBackward | None,
    shards: int,
    compiled: bool,
) -> list[Trace]:
    """Return the traces of the embedding, each block, and the final norm."""
    # what all blocks get in addition to the residual stream
    positions = torch.arange(shape.tokens)[None]
    cos_sin = model.cos_sin(positions, None, dtype)
    documents = _documents(model, shape, positions, compiled)
    embedding_parameters = _parameters_under(model, ("embed", "streams.expansions."))
    tokens = torch.zeros(shape.rows, shape.tokens, dtype=torch.int64)

    def embed(ids: Tensor) -> Tensor:
        x = model.embed_tokens(ids, positions)
        if model.streams is None:
            return x
        return model.streams.expand(x)

    traces = [_trace(embed, tokens, embedding_parameters, shape.accumulated, optimizer)]
    embedding = torch.empty(
        *tokens.shape, model.config.dim, dtype=dtype, requires_grad=traces[0].has_grad
    )
    extras = model.block_extras(tokens, embedding)
    per_layer = model.per_layer
    if per_layer is not None:
        parameters = [*per_layer.parameters()]
        trace = _trace(
            lambda x: per_layer(tokens, x), embedding, parameters, shape.accumulated, optimizer
        )
        # all blocks' are alive until the first block is done
        vectors = extras[0][0].token_input.nbytes * len(model.blocks)
        traces.append(trace._replace(saved=trace.saved + vectors))

    # a compiled network gives the first block's input a gradient: see `Compiled.embed_tokens`
    has_grad = traces[0].has_grad or (compiled and trains_first_block(model))
    x = torch.empty(
        shape.rows, shape.tokens, model.config.stream_dim, dtype=dtype, requires_grad=has_grad
    )

    # blocks of the same kind are traced once; the key has all that their bytes depend on
    by_kind: dict[tuple, Trace] = {}
    recomputed_by_compiler = _recomputed_by_compiler(model, x, compiled)
    for index, (layer, block) in enumerate(zip(model.config.layers, model.blocks, strict=True)):
        rotary = model.rotary_indices[index]
        extra = _extra_alone(model, index, x, *extras[index])
        key = (
            layer,
            tuple((n, p.requires_grad) for n, p in block.named_parameters()),
            x.requires_grad,
        )
        key += (tuple(type(module) for module in block.modules()),)
        if key not in by_kind:
            other_inputs = (
                cos_sin[rotary] if rotary is not None else None,
                documents,
                None,
                *extra,
            )
            # a sharded network allocates a block's full
            # gradients in every micro-batch, and reduces them
            accumulated = shape.accumulated and shards == 1
            by_kind[key] = _trace(
                lambda x, block=block, other_inputs=other_inputs: block(x, *other_inputs),
                x,
                [*block.parameters()],
                accumulated,
                optimizer,
            )
        trace = by_kind[key]
        traces.append(trace._replace(saved=max(0, trace.saved - recomputed_by_compiler)))
        # each block's input needs a gradient if anything before the block is trained
        x = x.detach().requires_grad_(traces[-1].has_grad)
    parameters = _parameters_under(model, ("norm.", "streams.reductions."))
    return [*traces, _trace(model.final_norm, x, parameters, shape.accumulated, optimizer)]


def _recomputed_by_compiler(model: GPT, x: Tensor, compiled: bool) -> int:
    """Return the bytes that a compiled block does not save, where x (B, T, C) is its input.

    Blocks with norms before and after save two tensors less: the residual stream follows from the
    norms' inputs (measured with scripts/plan_accuracy.py).
    """
    if not compiled or model.config.norm_position != "both":
        return 0
    if isinstance(model.blocks[0], Recomputed):
        return 0
    return 2 * x.nbytes


def _documents(
    model: GPT, shape: Shape, positions: Tensor, compiled: bool
) -> PackedSequences | None:
    """Return the documents of packed rows; None on a CPU, where how they are attended to depends on
    their lengths."""
    if device_type(positions) != "cuda":
        return None
    documents = PackedSequences.rows(shape.rows, shape.tokens, positions.device)
    if compiled and changes_scores(model):
        masks = dict.fromkeys(layer.window for layer in model.config.layers)
        return documents._replace(masks=masks)
    return documents


def _parameters_under(model: GPT, prefixes: tuple[str, ...]) -> list[nn.Parameter]:
    """Return the parameters whose names begin with one of the prefixes."""
    found = []
    for name, parameter in model.named_parameters():
        if name.startswith(prefixes):
            found.append(parameter)
    return found


def _extra_alone(model: GPT, index: int, x: Tensor, *extra: BlockExtra) -> tuple[BlockExtra, ...]:
    """Return the further argument of a block that is traced without the others: tensors like those
    that it would get."""
    if not extra:
        return ()
    source = model.config.layers[model.config.kv_source(index)]
    shared = SharedKeys()
    if model.config.layers[index].kv_sharing == "reuse":
        heads, *sizes = model.config.cache_shape(source)
        tensors = (
            torch.empty(*x.shape[:1], heads, x.size(1), size, dtype=x.dtype) for size in sizes
        )
        shared.by_window[source.window] = tuple(
            tensor.requires_grad_(x.requires_grad) for tensor in tensors
        )
    # a tensor of its own: that of the real network would belong to another graph
    token_input = extra[0].token_input
    if token_input is not None:
        token_input = _input(token_input.detach().requires_grad_(token_input.requires_grad))
    return (BlockExtra(token_input, shared),)


def trace_loss(
    model: GPT,
    shape: Shape,
    dtype: torch.dtype,
    optimizer: OptimizerInBackward | None,
    compiled: bool,
) -> int:
    """Return the temporary bytes of one micro-batch's loss and its gradient."""
    num_tokens = shape.rows * shape.tokens
    head = model.lm_head
    count = min(shape.max_targets or num_tokens, num_tokens)
    rows = min(count, CHUNK)  # the loss is computed chunk by chunk
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    targets = torch.zeros(1, rows, dtype=torch.int64)
    target_indices = torch.arange(rows)

    def run() -> None:
        hidden = torch.empty(1, rows, model.config.dim, dtype=dtype, requires_grad=True)
        # a tied weight is stepped later, when the embedding's gradient is added
        with optimizer.stepping() if optimizer and not model.config.tied else nullcontext():
            softcap = model.config.logit_softcap
            options = {"target_indices": target_indices, "compiled": compiled}
            if shape.per_token:
                token_cross_entropy(hidden, head, targets, softcap, **options).sum().backward()
            else:
                summed_cross_entropy(hidden, head, targets, softcap, **options)[0].backward()

    if optimizer and trained:
        with AllocationTracker():
            # the first step creates the optimizer's state
            run()
    for parameter in trained if shape.accumulated else ():
        parameter.grad = torch.empty_like(parameter)

    # all that the traced bytes depend on, but for an optimizer: such peaks are not cached
    key = (
        rows,
        dtype,
        device_type(targets),
        compiled,
        shape.per_token,
        shape.accumulated,
        model.config.logit_softcap,
        tuple(map(type, head.modules())),
    )
    key += (
        getattr(head, "lora_dropout", 0) > 0,
        *((p.shape, p.dtype, p.requires_grad) for p in head.parameters()),
    )
    peak = LOSS_CACHE.get(key) if optimizer is None else None
    if peak is None:
        # without a cached value, the loss is traced once
        with AllocationTracker() as tracker:
            run()
        peak = tracker.peak
    if optimizer is None:
        LOSS_CACHE[key] = peak
    for parameter in trained:
        parameter.grad = None
    # hidden states outside the traced chunk: all of them,
    # those with a target, and the gradient of the latter
    other_rows = (num_tokens - rows) + 2 * (count - rows)
    return peak + other_rows * model.config.dim * dtype.itemsize
