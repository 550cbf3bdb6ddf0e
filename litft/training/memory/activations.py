"""Temporary memory of a training step, measured on fake tensors whose lifetimes are tracked.

Nothing is allocated.

The embedding, each distinct block, the loss and the optimizer run once each, so changes of the
network or of an optimizer are always accounted for. `memory_plan` adds up the results.
"""

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor, nn

from litft.args import Optimizers, TrainArgs
from litft.methods import Method
from litft.model.device_type import device_type
from litft.model.packed_sequences import PackedSequences
from litft.model.per_layer_input import BlockExtra, SharedKeys
from litft.model.rope import CosSin
from litft.model.transformer import GPT
from litft.training.memory.allocations import (
    AllocationTracker,
    Trace,
    input_like,
    trace_module,
)
from litft.training.memory.long_rows import of_long_row
from litft.training.memory_saving.activation_checkpointing import Recomputed, is_recomputed
from litft.training.memory_saving.compile import changes_scores, trains_first_block
from litft.training.memory_saving.cpu_offload import MIN_OFFLOAD_BYTES
from litft.training.optimizers.make import (
    BITSANDBYTES_OPTIMIZERS,
    is_hidden,
    make_optimizer,
)
from litft.training.optimizers.rounded import OptimizerInBackward

# measured bytes: the plans that a run compares have the same trained parameters
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
    # tokens of a teacher at each target, whose probabilities the loss compares; 0: no teacher
    teacher_tokens: int = 0
    # maximum number of documents in a micro-batch; None: one a row
    max_documents: int | None = None

    def __str__(self) -> str:
        return f"{self.rows} x {self.tokens:,} tokens"


def trace_step(name: Optimizers, method: Method, trained: dict[str, nn.Parameter]) -> int:
    """Return the temporary bytes, beyond gradients and state, while the optimizer `name` steps the
    trained parameters.

    Most optimizers step one parameter at a time, so one parameter of each shape is enough;
    schedule_free steps all at once.
    """
    # the bytes depend on shape and dtype, and Muon steps hidden matrices differently
    at_once = name == "schedule_free"
    distinct = {}
    for parameter_name, parameter in trained.items():
        kind = (parameter.shape, parameter.dtype, is_hidden(parameter_name, parameter))
        if at_once:
            kind = (parameter_name, *kind)
        distinct[kind] = (parameter_name, parameter)
    key = (name, tuple(distinct))

    # the same parameters recur in all plans that a run compares
    if key in STEP_CACHE:
        return STEP_CACHE[key]
    copies = {}
    for parameter_name, parameter in distinct.values():
        copies[parameter_name] = nn.Parameter(torch.empty_like(parameter))
    optimizer = make_optimizer(TrainArgs(optimizer=_stand_in(name)), method, copies)
    for parameter in copies.values():
        parameter.grad = torch.empty_like(parameter)
    with AllocationTracker() as tracker:
        optimizer.step()  # the first step creates the state
        before = tracker.reset_peak()
        optimizer.step()
    STEP_CACHE[key] = tracker.peak - before
    return STEP_CACHE[key]


def backward_optimizer(model: GPT, method: Method, name: Optimizers) -> OptimizerInBackward:
    """Return an optimizer `name` that steps each of the model's parameters in the backward pass."""
    args = TrainArgs(optimizer=_stand_in(name), optimizer_in_backward=True)
    optimizer = make_optimizer(args, method, trained_parameters(model))
    assert isinstance(optimizer, OptimizerInBackward)  # as the flag says
    return optimizer


def trained_parameters(model: GPT) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name."""
    trained = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            trained[name] = parameter
    return trained


def _stand_in(name: Optimizers) -> Optimizers:
    """Return an optimizer with the same memory use that runs on fake tensors, as fused kernels do
    not."""
    missing = name == "schedule_free" and find_spec("schedulefree") is None
    if missing or name in (*BITSANDBYTES_OPTIMIZERS, "sgd"):
        return "adamw"
    return name


def _compiled_excess(model: GPT, shape: Shape, dtype: torch.dtype) -> int:
    """Return the bytes that compiled code takes beyond eager code in the backward pass of a block
    that is recomputed.

    It writes the gradients of gate and up next to the activation, where eager code overwrites it:
    one more tensor of the MLP's width. Measured with scripts/plan_accuracy.py.
    """
    config = model.config
    width = config.hidden_dim
    for layer in config.layers:
        if layer.experts:
            width = max(width, layer.experts.top_k * layer.experts.hidden_dim)
    return shape.rows * shape.tokens * width * dtype.itemsize


class BlocksMemory(NamedTuple):
    """Bytes of the embedding, the blocks and the final norm."""

    activations: int  # saved, on the device
    backward: int  # the excess of the peak over them
    offloaded: int  # activations in host memory


def trace_blocks(
    model: GPT,
    shape: Shape,
    dtype: torch.dtype,
    optimizer: OptimizerInBackward | None,
    shards: int,
    on_device: bool,
    compiled: bool,
) -> BlocksMemory:
    """Return the memory of the embedding, the blocks and the final norm.

    Identical blocks are run once. In a sharded network, a block's full gradient has an fp32 copy
    for the reduction. optimizer: None if gradients stay until the end of the step.
    on_device: activations stay on the device; otherwise those of at most two blocks do, and the
    others are offloaded.
    """
    traces = _traces(model, shape, dtype, optimizer, shards, compiled)
    input_bytes = shape.rows * shape.tokens * model.config.stream_dim * dtype.itemsize
    on_device |= input_bytes < MIN_OFFLOAD_BYTES  # too small to offload
    total = sum(trace.saved for trace in traces)
    if on_device:
        activations = total
        offloaded = 0
    else:
        activations = min(total, 2 * max(trace.saved for trace in traces))
        offloaded = total
    # whether the backward pass allocates gradients that remain
    allocates = not (shape.accumulated or optimizer)
    peak = max(
        activations,
        _forward_peak(traces, activations),
        _backward_peak(model, traces, activations, on_device, allocates, optimizer, shards),
    )
    # measured: compiled code needs more than eager code only where blocks are recomputed
    if compiled and is_recomputed(model):
        excess = _compiled_excess(model, shape, dtype)
    else:
        excess = 0
    return BlocksMemory(activations, peak - activations + excess, offloaded)


def _forward_peak(traces: list[Trace], most_alive: int) -> int:
    """Return the most bytes of the forward pass: what the blocks before have saved, at most
    `most_alive` on the device, and one block's temporary memory."""
    peak = 0
    before = 0
    for trace in traces:
        peak = max(peak, min(before, most_alive) + trace.forward)
        before += trace.saved
    return peak


def _backward_peak(
    model: GPT,
    traces: list[Trace],
    activations: int,
    on_device: bool,
    allocates: bool,
    optimizer: OptimizerInBackward | None,
    shards: int,
) -> int:
    """Return the most bytes of the backward pass: from the last block to the first, activations go
    and gradients come.

    allocates: gradients remain.
    """
    peak = 0
    alive = activations
    head = model.lm_head.weight
    tied = model.config.tied
    gradients = 0
    # the head's gradient exists before the backward pass of the blocks begins; of a tied weight,
    # autograd holds it until it can add the embedding's
    if head.requires_grad and (allocates or tied):
        gradients = head.nbytes
    for trace in reversed(traces):
        needed = alive + gradients + trace.backward
        if shards > 1:
            needed += trace.gradients
        # the sum of both gradients of a tied weight; an optimizer step in the backward pass takes
        # more than that. On a GPU, autograd was measured to add them in place
        # (scripts/plan_accuracy.py)
        adds = tied and head.requires_grad and not optimizer and device_type(head) == "cpu"
        if adds and trace is traces[0]:
            needed += head.nbytes
        peak = max(peak, needed)
        if on_device:
            alive -= trace.saved
        if allocates:
            gradients += trace.gradients // shards
    return peak


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
    tokens = torch.zeros(shape.rows, shape.tokens, dtype=torch.int64)
    traces = [_trace_embedding(model, tokens, positions, shape.accumulated, optimizer)]
    embedding = torch.empty(
        *tokens.shape, model.config.dim, dtype=dtype, requires_grad=traces[0].has_grad
    )
    extras = model.block_extras(tokens, embedding)
    if model.per_layer is not None:
        trace = _trace_per_layer(
            model.per_layer, tokens, embedding, shape.accumulated, optimizer
        )
        # those of all blocks are alive until the first block is done; a block has one extra input
        token_input = extras[0][0].token_input
        assert token_input is not None  # `per_layer` makes one for each block
        vectors = token_input.nbytes * len(model.blocks)
        traces.append(trace._replace(saved=trace.saved + vectors))

    # a compiled network gives the first block's input a gradient: see `Compiled.embed_tokens`
    has_grad = traces[0].has_grad or (compiled and trains_first_block(model))
    x = torch.empty(
        shape.rows,
        shape.tokens,
        model.config.stream_dim,
        dtype=dtype,
        requires_grad=has_grad,
    )

    # a sharded network allocates a block's full gradients in every micro-batch, and reduces them
    accumulated = shape.accumulated and shards == 1
    not_saved = _recomputed_by_compiler(model, x, compiled)
    for trace in _block_traces(
        model, x, cos_sin, documents, extras, accumulated, optimizer
    ):
        traces.append(trace._replace(saved=max(0, trace.saved - not_saved)))
    x = x.detach().requires_grad_(traces[-1].has_grad)
    parameters = _parameters_under(model, ("norm.", "streams.reductions."))
    return [
        *traces,
        trace_module(model.final_norm, x, parameters, shape.accumulated, optimizer),
    ]


def _trace_embedding(
    model: GPT,
    tokens: Tensor,
    positions: Tensor,
    accumulated: bool,
    optimizer: OptimizerInBackward | None,
) -> Trace:
    """Trace the embedding of tokens (B, T)."""
    parameters = _parameters_under(model, ("embed", "streams.expansions."))

    def embed(ids: Tensor) -> Tensor:
        x = model.embed_tokens(ids, positions)
        if model.streams is None:
            return x
        return model.streams.expand(x)

    return trace_module(embed, tokens, parameters, accumulated, optimizer)


def _trace_per_layer(
    per_layer: nn.Module,
    tokens: Tensor,
    embedding: Tensor,
    accumulated: bool,
    optimizer: OptimizerInBackward | None,
) -> Trace:
    """Trace the vectors that each block gets for its tokens, from the tokens (B, T) and their
    embedding (B, T, C)."""

    def run(x: Tensor) -> Tensor:
        return per_layer(tokens, x)

    return trace_module(run, embedding, [*per_layer.parameters()], accumulated, optimizer)


def _trace_block(
    block: nn.Module,
    x: Tensor,
    other_inputs: tuple,
    accumulated: bool,
    optimizer: OptimizerInBackward | None,
) -> Trace:
    """Trace a block with an input like x (B, T, C)."""

    def run(x: Tensor) -> Tensor:
        return block(x, *other_inputs)

    return trace_module(run, x, [*block.parameters()], accumulated, optimizer)


def _block_traces(
    model: GPT,
    x: Tensor,
    cos_sin: Sequence[CosSin],
    documents: PackedSequences | None,
    extras: Sequence[tuple[BlockExtra, ...]],
    accumulated: bool,
    optimizer: OptimizerInBackward | None,
) -> list[Trace]:
    """Return the traces of all blocks, where the first one's input is like x (B, T, C); blocks of
    the same kind are traced once."""
    traces = []
    by_kind: dict[tuple, Trace] = {}
    for index, block in enumerate(model.blocks):
        kind = _kind(model, index, x)
        if kind not in by_kind and is_only_recurrent(model, index):
            trace_of = partial(
                _trace_recurrent, block, x, documents, accumulated, optimizer
            )
            by_kind[kind] = of_long_row(trace_of, x.size(1))
        elif kind not in by_kind:
            inputs = _block_inputs(model, index, x, cos_sin, documents, extras[index])
            by_kind[kind] = _trace_block(block, x, inputs, accumulated, optimizer)
        traces.append(by_kind[kind])
        # each block's input needs a gradient if anything before the block is trained
        x = x.detach().requires_grad_(traces[-1].has_grad)
    return traces


def is_only_recurrent(model: GPT, index: int) -> bool:
    """Return whether a block mixes tokens by a recurrence alone, without per-layer inputs."""
    layer = model.config.layers[index]
    return layer.mixer is not None and not layer.attention and model.per_layer is None


def _trace_recurrent(
    block: nn.Module,
    x: Tensor,
    documents: PackedSequences | None,
    accumulated: bool,
    optimizer: OptimizerInBackward | None,
    tokens: int,
) -> Trace:
    """Trace a recurrent block with rows of so many tokens, in place of those of x (B, T, C)."""
    row = torch.empty(
        x.size(0), tokens, x.size(2), dtype=x.dtype, requires_grad=x.requires_grad
    )
    if documents is not None:
        rows = PackedSequences.rows(x.size(0), tokens, documents.ids.device)
        documents = rows._replace(masks=documents.masks)
    return _trace_block(block, row, (None, documents, None), accumulated, optimizer)


def _kind(model: GPT, index: int, x: Tensor) -> tuple:
    """Return all that the bytes of a block with the input x depend on."""
    block = model.blocks[index]
    trained = []
    for name, parameter in block.named_parameters():
        trained.append((name, parameter.requires_grad))
    classes = tuple(map(type, block.modules()))
    return model.config.layers[index], tuple(trained), x.requires_grad, classes


def _block_inputs(
    model: GPT,
    index: int,
    x: Tensor,
    cos_sin: Sequence[CosSin],
    documents: PackedSequences | None,
    extra: tuple[BlockExtra, ...],
) -> tuple:
    """Return what a block gets in addition to x: its rotation, the documents, no cache, and the
    further argument of some networks."""
    rotary = model.rotary_indices[index]
    if rotary is None:
        rotation = None
    else:
        rotation = cos_sin[rotary]
    return rotation, documents, None, *_extra_alone(model, index, x, extra)


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
    if shape.max_documents is not None:
        # attention's backward pass has a buffer with rows of each document
        starts = documents.cu_seqlens.new_empty(shape.max_documents + 1)
        documents = documents._replace(cu_seqlens=starts)
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


def _extra_alone(
    model: GPT, index: int, x: Tensor, extra: tuple[BlockExtra, ...]
) -> tuple[BlockExtra, ...]:
    """Return placeholders for the extra inputs of block `index` (per-layer input, shared keys and
    values), to trace it alone. extra: one, or none where the network has no such inputs."""
    if not extra:
        return ()
    source = model.config.layers[model.config.kv_source(index)]
    shared = SharedKeys()
    if model.config.layers[index].kv_sharing == "reuse":
        heads, *sizes = model.config.cache_shape(source)
        tensors = []
        for size in sizes:
            # (B, H, T, D)
            tensor = torch.empty(x.size(0), heads, x.size(1), size, dtype=x.dtype)
            tensors.append(tensor.requires_grad_(x.requires_grad))
        keys, values = tensors
        shared.by_window[source.window] = (keys, values)
    # a tensor of its own: that of the real network would belong to another graph
    token_input = extra[0].token_input
    if token_input is not None:
        token_input = input_like(
            token_input.detach().requires_grad_(token_input.requires_grad)
        )
    return (BlockExtra(token_input, shared),)
