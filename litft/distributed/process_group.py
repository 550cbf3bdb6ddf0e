"""What the processes of a run say to each other: they meet, agree, keep in step, and notice who is lost."""

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from torch import distributed, nn

from litft.args import seconds
from litft.args.processes import local_rank, started_by
from litft.errors import RankError
from litft.model.placement import is_sharded

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def launch(fabric: "Fabric", timeout: str) -> "HostGroup":
    """Start the processes, and have them meet; ValueError where they do not. Returns how they speak to each other."""
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not distributed.is_initialized():
            _meet_anew(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), seconds(timeout))
        if fabric.world_size > 1 and started_by() is None and local_rank() == "0":
            print(f"starting {fabric.world_size} processes", file=sys.stderr, flush=True)
        fabric.launch()
        return HostGroup(fabric.world_size, timeout)
    except (distributed.DistStoreError, distributed.DistNetworkError) as error:
        reason = str(error).split("\n")[0][:200]
        remedy = "look at the others' messages, at their --strategy, and whether they reach MASTER_ADDR and MASTER_PORT"
        raise RankError(f"the processes have not met within --timeout {timeout} ({reason}); {remedy}") from None


def _meet_anew(rank: int, processes: int, timeout: float) -> None:
    """Agree on a port where no one has been before; DistStoreError where one of the processes does not come.

    torchrun keeps one store for all its attempts (torch 2.11 to 2.13): gloo would find the addresses of processes that have
    died, and wait for them without end. So each process says a word that was never said, and waits for an answer to it.
    """
    limit = timedelta(seconds=timeout)
    address, ends = os.environ["MASTER_ADDR"], time.monotonic() + timeout
    store = distributed.TCPStore(address, int(os.environ["MASTER_PORT"]), is_master=False, timeout=limit)
    word = uuid4().hex
    store.set(f"litft/here/{rank}", word)
    if rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            port = str(free.getsockname()[1])
        missing = set(range(1, processes))
        while missing:
            if time.monotonic() > ends:
                raise distributed.DistStoreError(f"waiting for process {min(missing)} of {processes}")
            for other in [other for other in missing if store.check([f"litft/here/{other}"])]:
                theirs = store.get(f"litft/here/{other}").decode()  # an old one, maybe
                store.set(f"litft/answer/{theirs}", f"{port} {word}")
                missing -= {other} if store.check([f"litft/seen/{word}/{other}"]) else set()
            time.sleep(0.02)
    else:
        port, first = store.get(f"litft/answer/{word}").decode().split()
        store.set(f"litft/seen/{first}/{rank}", "")
    os.environ |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}


class HostGroup:
    """What all processes agree on, from host to host: no GPU is waited for."""

    def __init__(self, processes: int, timeout: str) -> None:
        self.processes = processes
        limit = timedelta(seconds=seconds(timeout))
        # another for checkpoints: those are written beside the steps
        self.group, self.writing = (
            distributed.new_group(backend="gloo", timeout=limit) if processes > 1 else None for _ in range(2)
        )

    def all_reduce_max(self, *values: float) -> list[float]:
        """The largest of each value over all processes."""
        if self.group is None:
            return list(values)
        shared = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(shared, distributed.ReduceOp.MAX, group=self.group)
        return shared.tolist()

    def check_equal(self, facts: dict[str, Any]) -> None:
        """ValueError in every process where one has other facts than the first."""
        if self.group is None:
            return
        all_facts: list[dict[str, Any]] = [{}] * self.processes
        distributed.all_gather_object(all_facts, facts, group=self.group)
        for rank, theirs in enumerate(all_facts):
            pairs = {name: (value, theirs.get(name)) for name, value in all_facts[0].items()}
            odd = [f"{name} ({str(a)[:60]}, there {str(b)[:60]})" for name, (a, b) in pairs.items() if a != b]
            if odd:
                reason = f"process {rank} differs from process 0 in its {', '.join(odd[:5])}"
                raise ValueError(f"{reason}; give all of them the same files and flags")


@contextmanager
def sync_gradients(fabric: "Fabric", model: nn.Module, last: bool) -> Iterator[None]:
    """Inside, a backward pass adds to the gradients; those of a step's last micro-batch are then the same on all processes.

    A sharded network reduces each micro-batch's: whole gradients that wait for the last would take as much as the weights.
    """
    network = getattr(model, "module", model)
    if is_sharded(network):
        network.set_requires_all_reduce(last)  # between replicas once a step is enough
        yield
    else:
        with fabric.no_backward_sync(model, enabled=fabric.world_size > 1 and not last):
            yield


@contextmanager
def join_uneven(model: nn.Module, hosts: HostGroup) -> Iterator[None]:
    """Inside, each process may run the network as often as it likes.

    A sharded one can only run on all together: who is done takes part in the others' passes with a token of its own.
    """
    if not is_sharded(model):
        yield
        return
    hook = model.register_forward_pre_hook(lambda *_: hosts.all_reduce_max(1.0) and None, prepend=True)
    try:
        yield
    finally:
        hook.remove()
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    while any(hosts.all_reduce_max(0.0)):
        model(token)


def peer_failure(error: BaseException, timeout: str) -> str | None:
    """What a library's error says of the other processes, in words; None: nothing."""
    text = str(error)
    of_them = (distributed.DistBackendError, distributed.DistNetworkError, distributed.DistStoreError)
    if not isinstance(error, of_them) and not any(name in text.lower() for name in ("gloo", "nccl", "process group")):
        return None  # such as "the launch timed out", which is a GPU's
    if "onnection" in text:  # gloo's word for a process that is gone
        return "another process of the run has ended"
    silent = "imed out" in text or "imeout" in text
    return f"another process of the run has not answered for {timeout} (--timeout)" if silent else None


def end_children(fabric: "Fabric") -> None:
    """Kill the processes that Fabric has started here: one that is stopped would stay, and hold its memory."""
    for process in getattr(fabric.strategy.launcher, "procs", ()):
        process.kill()
