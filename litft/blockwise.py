"""What is done block by block: compiled, recomputed in the backward pass, kept in the host's memory meanwhile.

None of it changes what is computed, or any parameter's name.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from litft.attention import Documents
from litft.model import GPT
from litft.peft.parts import mixed

SMALLEST = 2**20  # bytes of a tensor that is worth a copy to the host
NEARBY = 4  # tensors behind that stay fetched, since what several products keep is asked for again
RECOMPUTED = ("none", "selective", "full")  # from the fastest to the smallest


class Recomputed(nn.Module):
    """A module that keeps its inputs alone, and runs again when its gradient is asked for (arXiv 1604.06174)."""

    draws = False  # whether it draws random numbers, which have to be the same again

    def forward(self, *inputs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(*inputs)
        return checkpoint(super().forward, *inputs, use_reentrant=False, preserve_rng_state=self.draws)


def recompute(model: GPT, kind: str) -> None:
    """full: every block. selective: every MLP, which keeps half or more of a block, and the attention nothing."""
    modules = {"none": [], "selective": [block.mlp for block in model.blocks], "full": list(model.blocks)}[kind]
    for module in modules:
        module.__class__ = mixed(Recomputed, type(module))
        module.draws = any(getattr(part, "lora_dropout", 0.0) for part in module.modules())


class Compiled(nn.Module):
    """A network of compiled blocks."""

    def arranged(self, documents: Documents | None, tokens: Tensor) -> Documents | None:
        """On a GPU, where scores are changed before the softmax, with what its compiled attention needs."""
        if documents is not None:  # Dynamo may take their count for a constant, unless it is told
            torch._dynamo.maybe_mark_dynamic(documents.starts, 0)
        changed = self.config.attention_softcap is not None or self.config.sinks
        if not (changed and tokens.is_cuda and torch.is_grad_enabled() and is_compiled(self)):
            return documents
        if documents is None:  # each row is one
            begins = torch.arange(tokens.size(0) + 1, device=tokens.device, dtype=torch.int32)
            documents = Documents(torch.zeros_like(tokens), begins * tokens.size(1))
        return documents.with_masks({layer.window for layer in self.config.layers})


def compile_blocks(model: GPT) -> None:
    """Each block by torch.compile, for any count of tokens and documents; blocks that are alike share a graph."""
    model.__class__ = mixed(Compiled, type(model))
    for block in model.blocks:
        block.compile(dynamic=True)


def is_compiled(model: GPT) -> bool:
    """Whether its blocks are."""
    return any(block._compiled_call_impl is not None for block in model.blocks)


def run_uncompiled(model: GPT, reason: str) -> None:
    """Take the blocks as they are written, and say why."""
    warnings.warn(f"the blocks run uncompiled, since torch.compile fails: {reason}", stacklevel=2)
    for block in model.blocks:
        block._compiled_call_impl = None


@contextmanager
def as_written() -> Iterator[None]:
    """Inside, nothing is compiled: for what runs rarely, in shapes of its own."""
    with torch.compiler.set_stance("force_eager"):
        yield


# ---- in the host's memory -------------------------------------------------------------------------------------------


class Copies:
    """Copies to the host and back on a stream of their own, beside which a GPU goes on computing."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.on_gpu else None

    def begin(self) -> Any:
        """The context in which copies are made: after all that is queued by now."""
        if not self.on_gpu:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in pinned memory, complete when `done` has been called."""
        with self.begin():
            host = torch.empty_like(tensor, device="cpu", pin_memory=self.on_gpu).copy_(tensor, non_blocking=True)
        if self.on_gpu:
            tensor.record_stream(self.stream)  # its memory is not given away before it is copied
        return host

    def to_device(self, host: Tensor) -> Tensor:
        """A copy on the device, complete when `done` has been called."""
        with self.begin():
            return host.to(self.device, non_blocking=True, copy=True)

    def done(self, *tensors: Tensor) -> None:
        """What is computed from now on sees the copies; `tensors` are those that it uses."""
        if self.on_gpu:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream(self.device))


class Kept(saved_tensors_hooks):
    """What autograd keeps within this context waits in the host's memory; each is fetched while the one after it is used.

    Weights, whose storages are `staying`, and small tensors stay where they are. What several products keep is copied once.
    """

    def __init__(self, copies: Copies, staying: set[int]) -> None:
        self.copies, self.staying = copies, staying
        self.hosts: list[Tensor] = []
        self.numbers = WeakIdKeyDictionary()  # by storage, then by what of it is kept
        self.fetched: dict[int, Tensor] = {}
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Tensor | int:
        """Its number, once it is on its way."""
        storage, elsewhere = tensor.untyped_storage(), tensor.device.type != self.copies.device.type
        if storage.data_ptr() in self.staying or tensor.nbytes < SMALLEST or elsewhere:
            return tensor
        known = self.numbers.setdefault(storage, {})
        view = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if view not in known:
            self.hosts.append(self.copies.to_host(tensor))
            known[view] = len(self.hosts) - 1
        return known[view]

    def unpack(self, kept: Tensor | int) -> Tensor:
        """The tensor; the one that was kept before it is asked for next."""
        if isinstance(kept, Tensor):
            return kept
        for number in (kept, kept - 1):
            if number >= 0 and number not in self.fetched:
                self.fetched[number] = self.copies.to_device(self.hosts[number])
            if number == kept:
                self.copies.done(self.fetched[kept])
        for number in [number for number in self.fetched if number > kept + NEARBY]:
            del self.fetched[number]
        return self.fetched[kept]


class Offloaded(nn.Module):
    """A network that keeps nothing on the device for its backward but weights and what is small."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*inputs, **named)
        staying = {parameter.untyped_storage().data_ptr() for parameter in self.parameters()}
        with Kept(self.copies, staying):
            return super().forward(*inputs, **named)


def offload_activations(model: GPT, device: torch.device) -> None:
    """Let `model` keep its activations in the host's memory between forward and backward."""
    model.__class__ = mixed(Offloaded, type(model))
    model.copies = Copies(device)
