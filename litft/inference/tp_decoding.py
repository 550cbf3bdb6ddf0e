"""Processes that decode together: the first does what was asked for, and tells the others each call of its decoders.

All hold a part of the network, and a pass needs all of them. So the others make the first one's calls again, and throw away
what comes out.
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

from litft.args.processes import counted, local_rank, started_by
from litft.distributed.devices import is_out_of_memory, make_inference_fabric
from litft.distributed.process_group import end_children, launch, peer_failure
from litft.distributed.tensor_parallel import TensorParallelPlacement, check_divides
from litft.errors import PeerLost, RankError
from litft.inference.decoder import Decoder
from litft.methods.mixins import disabled, mixins
from litft.model.config import Config
from litft.model.transformer import GPT
from litft.pretrained import PretrainedFolder
from litft.signals import held_back

MEETING = "10m"  # how long the processes wait for each other at the start, and within a pass
LEADER = "LITFT_LEADER"  # the environment's name for the process that has started the others
IDLE = timedelta(days=365)  # and the others for the first one, which may wait for a person

# B rows, V vocabulary


class TensorParallelDecoder:
    """The processes; ValueError where there cannot be so many."""

    def __init__(self, devices: int, accelerator: str, config: Config) -> None:
        if local_rank() == "0":
            os.environ[LEADER] = str(os.getpid())
        elif LEADER in os.environ:
            _end_with(int(os.environ[LEADER]))
        elif started_by() is None:  # torchrun and srun end whom they have started
            reason = f"LOCAL_RANK is {os.environ['LOCAL_RANK']!r}, and no launcher has started this process"
            raise RankError(f"{reason}; unset it")
        self.fabric = make_inference_fabric(accelerator, devices)
        launch(self.fabric, MEETING)
        self.rank, self.device = self.fabric.global_rank, self.fabric.device
        self.slices = TensorParallelPlacement(config, self.rank, devices)
        self._group = distributed.new_group(backend="gloo", timeout=IDLE)
        self._numbers, self._waiting, self._inside = count(), [], False  # calls that are told with the next one

    def begin(self, model: GPT) -> None:
        """Return in the first process, at whose end the others end too."""
        if self.rank:
            self._follow(model)
        atexit.register(self._end)

    @contextmanager
    def disabled(self, model: GPT) -> Iterator[None]:
        """As the function, in every process."""
        self.later(0, "turn", False)
        try:
            with disabled(model):
                yield
        finally:
            self.later(0, "turn", True)

    @contextmanager
    def call(self, number: int, name: str, *inputs: Any) -> Iterator[None]:
        """Inside, the others make the same call of the decoder of this number; Ctrl-C waits for its end."""
        if self._inside:  # of a call that they make themselves
            yield
            return
        self.later(number, name, *inputs)
        self._inside = True
        try:
            with held_back(signal.SIGINT):
                self._tell()
                yield
        except RuntimeError as error:
            if is_out_of_memory(error) or not (reason := peer_failure(error, MEETING)):
                raise
            end_children(self.fabric)
            raise PeerLost(f"{reason}; start again") from None
        finally:
            self._inside = False

    def later(self, number: int, name: str, *inputs: Any) -> None:
        """Have the others make this call before the next one that needs them."""
        self._waiting.append((number, name, *inputs))

    def note(self, number: int, name: str, *inputs: Any) -> None:
        """The same, but for what a call that they make too does by itself."""
        if not self._inside:
            self.later(number, name, *inputs)

    def decoder(self, model: GPT, rows: int, capacity: int, compiled: bool) -> "LeadingDecoder":
        """A decoder in every process."""
        return LeadingDecoder(self, next(self._numbers), model, rows, capacity, compiled)

    def _tell(self) -> None:
        waiting, self._waiting = self._waiting, []
        text = torch.frombuffer(bytearray(json.dumps(waiting).encode()), dtype=torch.uint8)
        distributed.broadcast(torch.tensor([len(text)]), 0, group=self._group)
        distributed.broadcast(text, 0, group=self._group)

    def _end(self) -> None:
        self.later(0, "end")
        with suppress(RuntimeError):  # they have ended already
            self._tell()
        distributed.destroy_process_group()  # or gloo's threads may abort

    def _follow(self, model: GPT) -> NoReturn:
        """Make the first process's calls until it ends."""
        decoders: dict[int, Decoder] = {}
        try:
            while True:
                for number, name, *inputs in self._told():
                    if name == "end":
                        os._exit(0)  # at a usual exit gloo's threads may abort
                    self._repeat(model, decoders, number, name, inputs)
        except RuntimeError as error:
            if is_out_of_memory(error) or not peer_failure(error, MEETING):
                raise
            os._exit(0)  # the first process has ended

    def _repeat(self, model: GPT, decoders: dict[int, Decoder], number: int, name: str, inputs: list[Any]) -> None:
        """One call of the first process."""
        if name == "open":
            decoders[number] = Decoder(model, *inputs)
        elif name == "close":
            del decoders[number]
        elif name == "turn":
            for part in mixins(model):
                part.turn(*inputs)
        else:
            decoder = decoders[number]
            if name == "step":
                tokens = torch.empty(len(decoder.texts), dtype=torch.long, device=self.device)
                distributed.broadcast(tokens, 0)
                inputs = [tokens, *inputs]
            with suppress(ValueError):  # which the first process raises too, and says
                getattr(decoder, name)(*inputs)

    def _told(self) -> list[list[Any]]:
        """The next calls."""
        size = torch.empty(1, dtype=torch.long)
        distributed.broadcast(size, 0, group=self._group)
        text = torch.empty(int(size), dtype=torch.uint8)
        distributed.broadcast(text, 0, group=self._group)
        return json.loads(bytes(text.tolist()))


class LeadingDecoder(Decoder):
    """A Decoder whose calls are made in all processes."""

    def __init__(
        self, team: TensorParallelDecoder, number: int, model: GPT, rows: int, capacity: int, compiled: bool
    ) -> None:
        self.team, self.number = team, number
        with team.call(number, "open", rows, capacity, compiled):
            super().__init__(model, rows, capacity, compiled)
        weakref.finalize(self, team.later, number, "close")

    def reserve(self, tokens: int) -> None:
        with self.team.call(self.number, "reserve", tokens):
            super().reserve(tokens)

    def read(self, row: int, ids: Sequence[int], planned: int | None = None) -> Tensor:
        with self.team.call(self.number, "read", row, list(ids), planned):
            return super().read(row, ids, planned)

    def extend(self, row: int, ids: Sequence[int], *page: Any) -> Tensor:
        with self.team.call(self.number, "extend", row, list(ids)):
            return super().extend(row, ids, *page)

    def clear(self, row: int) -> None:
        with self.team.call(self.number, "clear", row):
            super().clear(row)

    def truncate(self, row: int, length: int) -> None:
        self.team.note(self.number, "truncate", row, length)
        super().truncate(row, length)

    def step(self, tokens: Tensor, active: Sequence[bool]) -> Tensor:
        with self.team.call(self.number, "step", list(active)):
            distributed.broadcast(tokens, 0)
            return super().step(tokens, active)

    def hold(self, row: int, token: int) -> None:
        self.team.note(self.number, "hold", row, token)
        super().hold(row, token)


def _end_with(leader: int) -> None:
    """Have this process end, without a word, when the one that started it has ended; Ctrl-C is left to that one."""

    def watch() -> None:
        if hasattr(os, "pidfd_open"):
            with suppress(ProcessLookupError):
                select([os.pidfd_open(leader)], [], [])
        else:
            while os.getppid() == leader:
                time.sleep(0.2)
        os._exit(0)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a terminal sends to all
    threading.Thread(target=watch, daemon=True).start()


def join_team(devices: int, accelerator: str, source: PretrainedFolder) -> TensorParallelDecoder | None:
    """The processes that --devices asks for, or torchrun has started; None: this one alone.

    ValueError where a network cannot be cut so.
    """
    devices, nodes = counted(devices, 1)
    if nodes > 1:
        raise ValueError(f"the network is cut within a machine, and this is started on {nodes}; start it on one of them")
    if devices == 1:
        return None
    check_divides(source.config, devices)
    if source.checkpoint.is_quantized:
        reason = "its weights are quantized already, and each device would quantize its part"
        raise ValueError(f"--devices {devices}: {source.base}: {reason}; use one device, or the unquantized folder")
    return TensorParallelDecoder(devices, accelerator, source.config)
