"""Communication between the processes of a run: rendezvous, consistency checks, gradient sync, and
detection of failures."""

import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule

from litft.args.processes import is_first_on_node, started_by
from litft.distributed.devices import limit_of
from litft.errors import RankError
from litft.model.placement import is_sharded
from litft.model.transformer import GPT

if TYPE_CHECKING:
    from lightning_fabric import Fabric

T = TypeVar("T")


def launch(fabric: "Fabric", timeout: str) -> "CpuProcessGroup":
    """Start and connect the processes, and return how they agree.

    Raise RankError if they do not all connect in time.
    """
    try:
        if (
            os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            and not distributed.is_initialized()
        ):
            rank = int(os.environ["RANK"])
            _agree_on_port(rank, int(os.environ["WORLD_SIZE"]), limit_of(timeout))
        if fabric.world_size > 1 and started_by() is None and is_first_on_node():
            print(f"starting {fabric.world_size} processes", file=sys.stderr, flush=True)
        fabric.launch()
        return CpuProcessGroup(fabric.world_size, timeout)
    except (distributed.DistStoreError, distributed.DistNetworkError) as error:
        reason = str(error).split("\n")[0][:200]
        remedy = (
            "check the other processes' messages and --strategy, and that all can reach "
            "MASTER_ADDR and MASTER_PORT"
        )
        raise RankError(
            f"the processes did not all connect within --timeout {timeout} ({reason}); {remedy}"
        ) from None


def _agree_on_port(rank: int, processes: int, limit: timedelta) -> None:
    """Agree on an unused port, and set MASTER_PORT to it; raise DistStoreError if a process does
    not appear in time.

    torchrun keeps one store for all restarts (torch 2.11 to 2.13), so gloo would find addresses of
    dead processes there and wait for them forever. Here each process stores a fresh random token,
    and rank 0 sends the port in reply to that token.
    """
    address = os.environ["MASTER_ADDR"]
    deadline = time.monotonic() + limit.total_seconds()
    # documented in torch.distributed, whose stubs take it for private
    store = distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        address, int(os.environ["MASTER_PORT"]), is_master=False, timeout=limit
    )

    # announce this attempt by a token that no earlier one has
    token = uuid4().hex
    store.set(f"litft/here/{rank}", token)
    # the first process answers until every other one has confirmed
    if rank == 0:
        with socket.socket() as free_socket:
            free_socket.bind(("", 0))
            port = str(free_socket.getsockname()[1])
        missing = set(range(1, processes))
        while missing:
            if time.monotonic() > deadline:
                raise distributed.DistStoreError(
                    f"waiting for process {min(missing)} of {processes}"
                )
            for peer in [peer for peer in missing if store.check([f"litft/here/{peer}"])]:
                # may be from an earlier attempt
                peer_token = store.get(f"litft/here/{peer}").decode()
                store.set(f"litft/answer/{peer_token}", f"{port} {token}")
                # an answer to the token of a dead process is never confirmed
                if store.check([f"litft/seen/{token}/{peer}"]):
                    missing.remove(peer)
            time.sleep(0.02)
    else:
        port, master_token = store.get(f"litft/answer/{token}").decode().split()
        store.set(f"litft/seen/{master_token}/{rank}", "")

    # torch then opens a store of its own at the new port
    os.environ |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}


@dataclass(frozen=True)
class Processes:
    """The processes of a run: Fabric for their devices, and a group for what they decide."""

    fabric: "Fabric"
    cpu_group: "CpuProcessGroup"


class CpuProcessGroup:
    """gloo groups for small values on the host: communication does not wait for a GPU."""

    def __init__(self, processes: int, timeout: str) -> None:
        self.processes = processes
        limit = limit_of(timeout)
        # checkpoints are written concurrently with training steps and need their own group
        self.group = None
        self.checkpoint_group: distributed.ProcessGroup | None = None
        if processes > 1:
            self.group = distributed.new_group(backend="gloo", timeout=limit)
            checkpoint_group = distributed.new_group(backend="gloo", timeout=limit)
            assert isinstance(checkpoint_group, distributed.ProcessGroup)  # all are members
            self.checkpoint_group = checkpoint_group

    def all_reduce_max(self, *values: float) -> list[float]:
        """Return the maximum of each value over all processes."""
        if self.group is None:
            return list(values)
        maxima = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(maxima, distributed.ReduceOp.MAX, group=self.group)
        return maxima.tolist()

    def all_gather(self, value: T) -> list[T]:
        """Return the value of every process, by rank.

        The values are pickled: they come from this run's own processes.
        """
        if self.group is None:
            return [value]
        values: list[T] = [value] * self.processes
        distributed.all_gather_object(values, value, group=self.group)
        return values

    def gather_parts(self, own: Sequence[T | None]) -> list[T]:
        """Return the items of all processes in one list; own: those of this process, and None where
        another process has the item."""
        by_number: dict[int, T] = {}
        for of_rank in self.all_gather(own):
            for number, item in enumerate(of_rank):
                if item is not None:
                    by_number[number] = item
        return [by_number[number] for number in range(len(own))]

    def check_equal(self, facts: dict[str, Any]) -> None:
        """Raise ValueError on every process if `facts` of any process differ from those of process
        0."""
        if self.group is None:
            return
        all_facts = self.all_gather(facts)
        # all processes compare with the first one, so all raise the same error
        for rank, peer_facts in enumerate(all_facts):
            differences = []
            # a fact that only one of the two has differs, too
            for name in all_facts[0] | peer_facts:
                expected = all_facts[0].get(name)
                actual = peer_facts.get(name)
                if expected != actual:
                    differences.append(
                        f"{name} ({str(expected)[:60]} on process 0, {str(actual)[:60]} on the "
                        "other)"
                    )
            if differences:
                reason = (
                    f"process {rank} differs from process 0 in {', '.join(differences[:5])}"
                )
                raise ValueError(f"{reason}; give all processes the same files and flags")


def sum_over_processes(fabric: "Fabric", values: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over all processes, in the shape of `values`."""
    total = fabric.all_reduce(values, reduce_op="sum")
    assert isinstance(total, torch.Tensor)  # like what is reduced
    return total


@contextmanager
def sync_gradients(fabric: "Fabric", model: nn.Module, last: bool) -> Iterator[None]:
    """Within the context, backward accumulates gradients; with `last` (a step's last micro-batch)
    they are also all-reduced.

    A sharded network reduce-scatters the gradients of every micro-batch: unsharded ones would need
    as much memory as the unsharded weights.
    """
    from lightning_fabric.wrappers import _FabricModule

    assert isinstance(model, _FabricModule)  # what `fabric.setup` returns
    network = model.module
    if isinstance(network, FSDPModule):
        # replicas only need to sync once per step
        network.set_requires_all_reduce(last)
        yield
    else:
        with fabric.no_backward_sync(model, enabled=fabric.world_size > 1 and not last):
            yield


@contextmanager
def join_uneven(model: GPT, cpu_group: CpuProcessGroup) -> Iterator[None]:
    """Within the context, processes may run the network different numbers of times.

    A forward pass of a sharded network needs all processes. A process that has finished joins the
    passes of the others with a dummy token.
    """
    if not is_sharded(model):
        yield
        return
    # announced before each forward pass, for the processes that have finished
    hook = model.register_forward_pre_hook(
        lambda *_: cpu_group.all_reduce_max(1.0) and None, prepend=True
    )
    try:
        yield
    finally:
        hook.remove()

    # a finished process joins until no process announces a pass
    dummy_token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    while any(cpu_group.all_reduce_max(0.0)):
        model(dummy_token)


def peer_failure(error: BaseException, timeout: str) -> str | None:
    """Return what an error of a communication library means if another process ended or hangs, else
    None."""
    text = str(error)
    comm_errors = (
        distributed.DistBackendError,
        distributed.DistNetworkError,
        distributed.DistStoreError,
    )
    if not isinstance(error, comm_errors) and not any(
        name in text.lower() for name in ("gloo", "nccl", "process group")
    ):
        # for example CUDA's "the launch timed out"
        return None

    # gloo reports a lost process as a closed connection; the first letter may be a capital
    if "onnection" in text:
        return "another process of the run has ended"
    timed_out = "imed out" in text or "imeout" in text
    if timed_out:
        return f"another process of the run has not answered for {timeout} (--timeout)"
    return None


def end_children(fabric: "Fabric") -> None:
    """Kill the processes that Fabric started on this machine: a stopped one would stay and keep its
    memory."""
    for process in getattr(fabric.strategy.launcher, "procs", ()):
        process.kill()
