"""Tensor-parallel decoding: rank 0 runs the command and broadcasts each call of its decoders to the
other ranks.

Every rank holds a shard of the model, and a forward pass needs all of them. So the other ranks
repeat rank 0's calls and discard the results.
"""

import atexit
import json
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from select import select
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed

from litft.args.processes import is_first_on_node, process_counts, started_by
from litft.distributed.devices import is_out_of_memory, make_inference_fabric
from litft.distributed.process_group import end_children, launch, peer_failure
from litft.distributed.tensor_parallel import TensorParallelPlacement, check_divides
from litft.errors import PeerLost, RankError
from litft.inference.decoder import Decoder
from litft.methods.mixins import disabled, mixins
from litft.model.config import Config
from litft.model.placement import WeightPlacement
from litft.model.quantization import WEIGHTS_PER_SCALE, cuts_blocks, is_quantizable
from litft.model.transformer import GPT
from litft.pretrained.folder import PretrainedFolder
from litft.signals import defer_signal

# timeout at the start and within a forward pass
TIMEOUT = "10m"
# environment variable with the process id of rank 0
LEADER_VARIABLE = "LITFT_LEADER"
# timeout between calls: rank 0 may wait for the user
IDLE_TIMEOUT = timedelta(days=365)

# B rows, T tokens of a call, V vocabulary


class TensorParallelDecoder:
    """The processes that decode together. Raises ValueError if the devices are not available."""

    def __init__(self, devices: int, accelerator: str, config: Config) -> None:
        if is_first_on_node():
            # the launcher starts the other processes with this environment
            os.environ[LEADER_VARIABLE] = str(os.getpid())
        elif LEADER_VARIABLE in os.environ:
            _exit_with(int(os.environ[LEADER_VARIABLE]))
        elif started_by() is None:
            # torchrun and srun end the processes that they have started
            reason = (
                f"LOCAL_RANK is {os.environ['LOCAL_RANK']!r}, and no launcher has started this "
                "process"
            )
            raise RankError(f"{reason}; unset it")

        self.fabric = make_inference_fabric(accelerator, devices)
        launch(self.fabric, TIMEOUT)
        self.rank = self.fabric.global_rank
        self.device = self.fabric.device
        self.placement = TensorParallelPlacement(config, self.rank, devices)

        # On the host, with a timeout of its own: between
        # calls, the other ranks wait as long as the user does.
        group = distributed.new_group(backend="gloo", timeout=IDLE_TIMEOUT)
        # a number would mean that this process is no member, but all are
        assert isinstance(group, distributed.ProcessGroup)
        self._group = group
        # pending calls are sent with the next one
        self._decoder_numbers = count()
        self._pending_calls = []
        self._in_call = False

    def start(self, model: GPT) -> None:
        """Return in rank 0; the other ranks follow its calls and exit when it exits."""
        if self.rank:
            self._follow_leader(model)
        atexit.register(self._shut_down)

    @contextmanager
    def disabled(self, model: GPT) -> Iterator[None]:
        """Within the context, adapters are disabled on all ranks."""
        # it concerns the model, not a decoder: the number has no meaning
        self.defer(0, "turn", False)
        try:
            with disabled(model):
                yield
        finally:
            self.defer(0, "turn", True)

    @contextmanager
    def call(self, number: int, name: str, *inputs: Any) -> Iterator[None]:
        """Within the context, the other ranks make the same call of decoder `number`; Ctrl-C is
        held back until it ends."""
        # nested calls are not sent: the other ranks repeat the outer one
        if self._in_call:
            yield
            return

        self.defer(number, name, *inputs)
        self._in_call = True
        try:
            # an interrupt between sending and computing would leave the ranks out of step
            with defer_signal(signal.SIGINT):
                self._send_calls()
                yield
        except RuntimeError as error:
            if is_out_of_memory(error) or not (reason := peer_failure(error, TIMEOUT)):
                raise
            end_children(self.fabric)
            raise PeerLost(f"{reason}; start again") from None
        finally:
            self._in_call = False

    def defer(self, number: int, name: str, *inputs: Any) -> None:
        """Have the other ranks make this call before the next one that needs them."""
        self._pending_calls.append((number, name, *inputs))

    def defer_outside_call(self, number: int, name: str, *inputs: Any) -> None:
        """Defer a call, unless it is part of an outer call, which the other ranks repeat as a
        whole."""
        if not self._in_call:
            self.defer(number, name, *inputs)

    def decoder(
        self, model: GPT, rows: int, capacity: int, compiled: bool
    ) -> "LeadingDecoder":
        """Create a decoder on every rank."""
        return LeadingDecoder(
            self, next(self._decoder_numbers), model, rows, capacity, compiled
        )

    def _send_calls(self) -> None:
        calls = self._pending_calls
        self._pending_calls = []
        payload = torch.frombuffer(bytearray(json.dumps(calls).encode()), dtype=torch.uint8)
        # first the size, since a receiver must allocate memory for the text
        distributed.broadcast(torch.tensor([len(payload)]), 0, group=self._group)
        distributed.broadcast(payload, 0, group=self._group)

    def _shut_down(self) -> None:
        self.defer(0, "end")
        with suppress(RuntimeError):  # the other ranks have exited already
            self._send_calls()
        distributed.destroy_process_group()  # without this, gloo's threads may abort

    def _follow_leader(self, model: GPT) -> NoReturn:
        """Repeat rank 0's calls until it exits."""
        decoders: dict[int, Decoder] = {}
        try:
            while True:
                for number, name, *inputs in self._receive_calls():
                    if name == "end":
                        # at a normal exit gloo's threads may abort
                        os._exit(0)
                    self._repeat_call(model, decoders, number, name, inputs)
        except RuntimeError as error:
            if is_out_of_memory(error) or not peer_failure(error, TIMEOUT):
                raise
            os._exit(0)  # rank 0 has exited

    def _repeat_call(
        self,
        model: GPT,
        decoders: dict[int, Decoder],
        number: int,
        name: str,
        inputs: list[Any],
    ) -> None:
        """Repeat one call of rank 0."""
        if name == "open":
            decoders[number] = Decoder(model, *inputs)
        elif name == "close":
            del decoders[number]
        elif name == "turn":
            for mixin in mixins(model):
                mixin.set_enabled(*inputs)
        else:
            decoder = decoders[number]
            if name == "step":
                # tokens are on the device in rank 0, so they
                # are broadcast there rather than sent as text
                tokens = torch.empty(
                    len(decoder.texts), dtype=torch.long, device=self.device
                )
                distributed.broadcast(tokens, 0)
                inputs = [tokens, *inputs]
            # rank 0 raises and reports the same error
            with suppress(ValueError):
                getattr(decoder, name)(*inputs)

    def _receive_calls(self) -> list[list[Any]]:
        """Receive the next calls."""
        size = torch.empty(1, dtype=torch.long)
        distributed.broadcast(size, 0, group=self._group)
        payload = torch.empty(int(size), dtype=torch.uint8)
        distributed.broadcast(payload, 0, group=self._group)
        return json.loads(bytes(payload.tolist()))


class LeadingDecoder(Decoder):
    """The Decoder of rank 0, whose calls the other ranks repeat."""

    def __init__(
        self,
        tp_decoder: TensorParallelDecoder,
        number: int,
        model: GPT,
        rows: int,
        capacity: int,
        compiled: bool,
    ) -> None:
        self.tp_decoder = tp_decoder
        self.number = number
        with tp_decoder.call(number, "open", rows, capacity, compiled):
            super().__init__(model, rows, capacity, compiled)
        # sent with the next call: a finalizer may run at any time, also within a collective call
        weakref.finalize(self, tp_decoder.defer, number, "close")

    def reserve(self, tokens: int) -> None:
        with self.tp_decoder.call(self.number, "reserve", tokens):
            super().reserve(tokens)

    def prefill(
        self, row: int, ids: Sequence[int], max_length: int | None = None
    ) -> Tensor:
        """Replace the text of a row on every rank; return the logits (V,), see
        `Decoder.prefill`."""
        with self.tp_decoder.call(self.number, "prefill", row, list(ids), max_length):
            return super().prefill(row, ids, max_length)

    def extend(self, row: int, ids: Sequence[int]) -> Tensor:
        """Append T tokens to a row on every rank; return the logits (T, V), see
        `Decoder.extend`."""
        with self.tp_decoder.call(self.number, "extend", row, list(ids)):
            return super().extend(row, ids)

    def clear(self, row: int) -> None:
        with self.tp_decoder.call(self.number, "clear", row):
            super().clear(row)

    def truncate(self, row: int, length: int) -> None:
        self.tp_decoder.defer_outside_call(self.number, "truncate", row, length)
        super().truncate(row, length)

    def step(self, tokens: Tensor, active: Sequence[bool]) -> Tensor:
        """Run a decode step with tokens (B,) on every rank; return the logits (B, V), see
        `Decoder.step`."""
        with self.tp_decoder.call(self.number, "step", list(active)):
            distributed.broadcast(tokens, 0)
            return super().step(tokens, active)

    def append(self, row: int, token: int) -> None:
        self.tp_decoder.defer_outside_call(self.number, "append", row, token)
        super().append(row, token)


def _exit_with(leader: int) -> None:
    """Exit this process silently when the one that started it has exited, and leave Ctrl-C to that
    one."""

    def watch() -> None:
        # Linux: the descriptor becomes readable when the process ends
        if hasattr(os, "pidfd_open"):
            with suppress(ProcessLookupError):
                select([os.pidfd_open(leader)], [], [])
        else:
            while os.getppid() == leader:
                time.sleep(0.2)
        os._exit(0)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes
    threading.Thread(target=watch, daemon=True).start()


def make_tp_decoder(
    devices: int, accelerator: str, source: PretrainedFolder
) -> TensorParallelDecoder | None:
    """Start or join the processes that --devices or torchrun asks for; return None for a single
    process.

    Raises ValueError if the model cannot be sharded over this many devices.
    """
    devices, nodes = process_counts(devices, 1)
    if nodes > 1:
        raise ValueError(
            f"tensor-parallel decoding needs a single machine, but was started on {nodes}; start "
            "it on one of them"
        )
    if devices == 1:
        return None
    check_divides(source.config, devices)
    if source.checkpoint.is_quantized:
        reason = "its weights are quantized already, but each device would quantize its own shard"
        raise ValueError(
            f"--devices {devices}: {source.base}: {reason}; use one device, or the unquantized "
            "folder"
        )
    return TensorParallelDecoder(devices, accelerator, source.config)


def note_on_cut_blocks(
    source: PretrainedFolder, placement: WeightPlacement, kind: str | None
) -> str | None:
    """Return what to say if blocks of quantized weights cross the boundaries between devices, so
    that the answers are not quite those of one device; None if none do."""
    if kind in (None, "int8"):
        return None
    outline = source.outline
    for name, parameter in outline.named_parameters():
        partition = placement.partition(name)
        if partition is None or not is_quantizable(name, outline):
            continue
        dim, _, count = partition
        if cuts_blocks(tuple(parameter.shape), dim, count):
            return (
                f"note: the blocks of {WEIGHTS_PER_SCALE} weights that {kind} scales together do "
                f"not divide {name} evenly, so each device quantizes its part with other blocks: "
                "the answers differ a little from those of one device; --quantize int8 has no "
                "blocks"
            )
    return None
