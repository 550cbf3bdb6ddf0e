"""The updates of a training step: gradients of its samples, then a step of the optimizer."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from litft.data.sample import Sample
from litft.distributed.devices import is_out_of_memory
from litft.distributed.process_group import Processes
from litft.model.placement import full_tensor
from litft.training.accumulation import accumulate
from litft.training.divergence import DivergenceGuard
from litft.training.memory.probe import MemoryProbe
from litft.training.network import TrainedNetwork
from litft.training.optimizers.wrapped import unwrapped_in_backward
from litft.training.output.metrics import FP16_COLUMNS
from litft.training.planned_run import PlannedRun

# beyond the seeds of dropout, one for each rank
FIRST_ROUNDING_SEED = 2049


class Updates:
    """Takes the updates of each step; in fp16, of a loss that is scaled so that small gradients are
    not lost.

    The scale follows torch's rule (`torch.amp.GradScaler`): an update whose gradients overflow is
    left out and halves it; after 2,000 others it is doubled.
    """

    def __init__(
        self,
        processes: Processes,
        run: PlannedRun,
        network: TrainedNetwork,
        probe: MemoryProbe,
        divergence: DivergenceGuard,
        data_ready: Callable[[], None],
    ) -> None:
        """data_ready: called when the data of a step is there."""
        self.fabric = processes.fabric
        self.args = run.setup.args
        self.objective = run.setup.objective
        self.schedule = run.schedule
        self.model = network.model
        self.trained = network.trained
        self.mesh = network.mesh
        self.probe = probe
        self.divergence = divergence
        self.data_ready = data_ready
        is_fp16 = run.settings.precision == "fp16"
        self.scaler = GradScaler(self.fabric.device.type, enabled=is_fp16)
        # updates left out because gradients overflowed
        self.skipped = 0

    def state(self) -> dict[str, Any]:
        """Return the state of the scale, for a checkpoint; empty without one."""
        if not self.scaler.is_enabled():
            return {}
        return {**self.scaler.state_dict(), "skipped": self.skipped}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the state in a checkpoint."""
        if state and self.scaler.is_enabled():
            state = dict(state)
            self.skipped = state.pop("skipped", 0)
            self.scaler.load_state_dict(state)

    def metrics(self) -> dict[str, float]:
        """Return the values of FP16_COLUMNS in fp16; nothing otherwise."""
        if not self.scaler.is_enabled():
            return {}
        return dict(zip(FP16_COLUMNS, (self.scaler.get_scale(), self.skipped), strict=True))

    def step(
        self, model: nn.Module, optimizer: Optimizer, samples: list[Sample], step: int
    ) -> tuple[Tensor, Tensor]:
        """Take the updates of a step, which are one but for rewards; returns the mean of the loss
        and scores, and of the norm."""
        count = self.objective.updates
        results = []
        for update in range(count):
            results.append(self._update(model, optimizer, samples, step * count + update))
        if count == 1:
            return results[0]
        values = torch.stack([values for values, _ in results]).mean(0)
        return values, torch.stack([norm for _, norm in results]).mean()

    def _update(
        self, model: nn.Module, optimizer: Optimizer, samples: list[Sample], number: int
    ) -> tuple[Tensor, Tensor]:
        """Update the weights with the gradient over `samples`; returns the objective's loss and
        scores, and the norm. number: of the update, from the beginning of the run."""
        # Dropout depends on the update and the rank alone, so that a resumed run draws the same.
        # Each update has 4,099 seeds: the first 2,049 for dropout, the others for stochastic
        # rounding.
        seed = (self.args.seed * 1_000_003 + number) * 4099
        # the updates of a step share its data
        counts_data = number % self.objective.updates == 0
        model.train()
        if self.args.train.optimizer_in_backward:  # with one device only
            in_backward = unwrapped_in_backward(optimizer)
            with in_backward.stepping():
                values = self._backward(model, optimizer, samples, seed, counts_data)
            return values, in_backward.norm()
        own_seed = seed + self.fabric.global_rank
        values = self._backward(model, optimizer, samples, own_seed, counts_data)

        # without a limit nothing is clipped, but the norm is still a column of metrics.csv
        limit = self.args.train.max_grad_norm or math.inf
        self.scaler.unscale_(optimizer)
        norm = full_tensor(nn.utils.clip_grad_norm_(self.trained.values(), limit))
        if self._is_taken(values[0], norm, number):
            # stochastic rounding: ranks that hold the same weights round them the same way
            shard = self.mesh.get_local_rank("shard") if self.mesh else 0
            torch.manual_seed(seed + FIRST_ROUNDING_SEED + shard)
            optimizer.step()
        self.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return values, norm

    def _is_taken(self, loss: Tensor, norm: Tensor, number: int) -> bool:
        """Return whether to step the optimizer: not where gradients overflow fp16, nor, with
        --train.skip_nan, where a value is not finite."""
        is_fp16 = self.scaler.is_enabled()
        skips = self.args.train.skip_nan
        # to read the numbers is to wait for the GPU, so it is only done where it is needed
        if not (is_fp16 or skips) or math.isfinite(float(loss) + float(norm)):
            self.divergence.skipped = 0
            return True
        if is_fp16 and math.isfinite(float(loss)):
            self.skipped += 1
            self.divergence.check_loss_scale(number, self.scaler.get_scale())
        elif skips:
            self.divergence.skip(number // self.objective.updates)
        # otherwise the guard ends the run, and the weights stay as they are
        return False

    def _backward(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        samples: list[Sample],
        seed: int,
        counts_data: bool,
    ) -> Tensor:
        """Compute the gradients of the objective; with --train.oom_retry, again in smaller
        micro-batches after an OOM."""
        is_first_attempt = True
        while True:
            try:
                # a new attempt starts with the same random state, however far the failed one got
                torch.manual_seed(seed)
                # later, the time of the failed attempt would count as waiting for data
                return self._gradients(model, samples, counts_data and is_first_attempt)
            except RuntimeError as error:
                # with several processes the others wait in a
                # collective: only the probe can recover there
                if not (
                    self.args.train.oom_retry
                    and self.fabric.world_size == 1
                    and is_out_of_memory(error)
                ):
                    raise
                reason = str(error)

            # gradients of the micro-batches before the failure
            optimizer.zero_grad(set_to_none=True)
            self.probe.halve(reason)
            is_first_attempt = False

    def _gradients(
        self, model: nn.Module, samples: list[Sample], counts_data: bool
    ) -> Tensor:
        """Lay the samples out in micro-batches and accumulate their gradients; returns the loss and
        scores. counts_data: whether the time until now was waiting for data."""
        layout = self.schedule.layout
        learned = self.objective.learned(samples)
        batches = layout.batches(learned, self.fabric.global_rank)
        if counts_data:
            self.data_ready()
        self.objective.before_step(self.fabric, self.model, samples, layout)
        return accumulate(
            self.fabric,
            self.objective,
            model,
            batches,
            totals=self.objective.totals(samples),
            scale=self.scaler.scale,
        )
