"""The largest micro-batch of the whole run, tried before the first step: what does not fit is
reported at once."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn
from torch.optim import Optimizer

from litft.data.packing import MicroBatch
from litft.distributed.devices import is_out_of_memory
from litft.distributed.process_group import Processes, sync_gradients
from litft.errors import RankError, first_line
from litft.model.placement import local
from litft.training.memory.check import remedies
from litft.training.memory.residence import residence
from litft.training.memory_saving.compile import is_compiled, run_uncompiled
from litft.training.network import TrainedNetwork
from litft.training.objectives import Totals
from litft.training.optimizers.make import state_bytes
from litft.training.optimizers.wrapped import unwrapped_in_backward
from litft.training.planned_run import PlannedRun


class MemoryProbe:
    """Finds out whether the steps fit into memory, and lays them out in smaller micro-batches where
    that is asked for."""

    def __init__(
        self,
        processes: Processes,
        run: PlannedRun,
        network: TrainedNetwork,
        say: Callable[[str], None],
    ) -> None:
        self.args = run.setup.args
        self.fabric = processes.fabric
        self.cpu_group = processes.cpu_group
        self.run = run
        self.schedule = run.schedule
        self.network = network
        self.say = say

    def try_largest(self, model: nn.Module, optimizer: Optimizer, resumed: bool) -> None:
        """Try the largest micro-batch until it fits; compiled blocks that fail run uncompiled from
        then on.

        resumed: the optimizer's state is in memory already. Raises RankError where it does not fit
        and --train.oom_retry is not given, or cannot help.
        """
        while True:
            reason = None
            try:
                self._try_largest(model, optimizer, resumed)
            except Exception as error:  # compilers raise many kinds
                out_of_memory = is_out_of_memory(error)
                # neither memory nor the compiler
                if not out_of_memory and not is_compiled(self.network.model):
                    raise
                if not out_of_memory:
                    run_uncompiled(self.network.model, first_line(error))
                    optimizer.zero_grad(set_to_none=True)
                    continue
                reason = str(error)
            optimizer.zero_grad(set_to_none=True)
            # one process that lacks memory is enough: all must lay the steps out alike
            if not any(self.cpu_group.all_reduce_max(float(reason is not None))):
                return
            self.halve(reason or "in another process")

    def _try_largest(self, model: nn.Module, optimizer: Optimizer, resumed: bool) -> None:
        """Run one micro-batch forward and backward next to the optimizer's state; two where
        gradients are accumulated."""
        device = self.fabric.device
        batch = self._largest_batch()
        state_size = 0
        passes = 1
        if device.type == "cuda":
            if not resumed:
                state_size = self._state_bytes_on_device()
            # a second pass, in which the gradients of the first one are in memory
            passes += self.schedule.shape().accumulated
        objective = self.run.setup.objective
        totals = Totals(samples=1, tokens=1)
        objective.begin_probe(device)
        # on a GPU, bytes stand for the optimizer's state, which the first step would create
        state = torch.empty(state_size, dtype=torch.uint8, device=device)
        model.train()
        if self.args.train.optimizer_in_backward:
            without_steps = unwrapped_in_backward(optimizer).discarding()
        else:
            without_steps = nullcontext()
        # the gradients are discarded, so DDP does not reduce them
        with sync_gradients(self.fabric, model, last=self.network.sharded), without_steps:
            for _ in range(passes):
                self.fabric.backward(objective(model, batch, totals)[0])
        del state

    def _largest_batch(self) -> MicroBatch:
        """Return the longest rows, with as many targets as any micro-batch of the run has."""
        largest = self.schedule.largest
        samples = self.schedule.data.train
        rows = []
        for numbers in largest.rows:
            rows.append([samples[number] for number in numbers])
        batch = self.schedule.layout.collate_rows(rows)
        return batch.with_min_targets(largest.max_targets).to(self.fabric.device)

    def _state_bytes_on_device(self) -> int:
        """Return how many bytes of the optimizer's state will be on the device."""
        train = self.args.train
        device = self.fabric.device
        place = residence(
            train.optimizer, train.cpu_offload, self.network.sharded, device.type
        )
        if not place.state:
            return 0
        parameters = {
            name: local(parameter) for name, parameter in self.network.trained.items()
        }
        return state_bytes(train.optimizer, parameters)

    def halve(self, reason: str) -> None:
        """Lay the steps out in micro-batches of half the size; RankError where that is not asked
        for, or not possible."""
        longest = int(self.schedule.data.train.lengths.max())
        smaller = self.schedule.layout.halved(longest)
        if smaller is None or not self.args.train.oom_retry:
            raise RankError(self.out_of_memory(reason))
        if self.fabric.device.type == "cuda":
            torch.cuda.empty_cache()
        before = self.schedule.shape()
        self.schedule.set_layout(smaller)
        self.say(
            f"micro-batches of up to {before} do not fit into memory; continuing with "
            f"{self.schedule.shape()}"
        )

    def out_of_memory(self, reason: str) -> str:
        """The message of a run that does not fit: its largest micro-batch, and what would save
        memory."""
        number, tokens = self.schedule.longest()
        size = (
            f"micro-batches of up to {self.schedule.shape()} do not fit into "
            f"{self.fabric.device}'s memory"
        )
        longest = (
            f"the longest row has training example {number} with its {tokens:,} tokens"
        )
        remedy = ", or ".join(remedies(self.run)) or "choose a smaller model"
        return f"{size} ({reason.split('. ')[0][:200]}); {longest}; {remedy}"
