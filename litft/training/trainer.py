"""The training loop, shared by all methods, strategies and numbers of processes."""

import copy
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from litft import run_dir
from litft.args import parse_duration
from litft.args.parser import method_name
from litft.distributed.devices import is_out_of_memory, mesh_of
from litft.distributed.process_group import (
    Processes,
    end_children,
    peer_failure,
)
from litft.errors import Interrupted, RankError
from litft.evaluation.rewards.scorer import RewardError
from litft.evaluation.scoring import Metric
from litft.signals import Signals
from litft.training.before_after import measures_forgetting
from litft.training.divergence import DivergenceGuard
from litft.training.intervals import (
    checkpoint_is_due,
    num_measured,
    validation_cost,
    validation_interval,
)
from litft.training.lr_schedule import learning_rate
from litft.training.memory.flops import Flops
from litft.training.memory.probe import MemoryProbe
from litft.training.memory_saving.compile import is_compiled, uncompiled
from litft.training.network import blocks_on_host, build_trained_network, prepare_blocks
from litft.training.on_policy import open_own_answers
from litft.training.optimizers.make import (
    averaged_weights,
    make_optimizer,
    set_learning_rate,
)
from litft.training.output.recorder import Observers, Recorder
from litft.training.output.run_folder import RunFolder
from litft.training.output.screen import open_screen, shorten, shorten_left
from litft.training.planned_run import PlannedRun, check_one_micro_batch
from litft.training.rollouts import open_rollouts
from litft.training.run_description import format_duration
from litft.training.run_samples import open_samples
from litft.training.updates import Updates
from litft.training.validation import Measured, Validation


class SignalCaught(Exception):
    """This process or another one has caught a signal."""

    def __init__(self, number: int) -> None:
        self.number = number


class Trainer:
    """Trains on one process; every process of a run does the same.

    The constructor opens the samples and builds the network with the method in it; `fit` is the run
    from there on, and reads top to bottom.

    The pieces it is made of: `PlannedRun` says what the run is, which samples a step has and what
    memory decided; `build_trained_network` builds the network, `RunSamples` reads the samples,
    `Updates` takes optimizer steps, `MemoryProbe` tries the largest micro-batch, `Validation`
    measures, `DivergenceGuard` looks at losses, `Recorder` writes the run's folder,
    `CpuProcessGroup` is how the processes agree.
    `self.model` is the network; the `model` and `optimizer` that methods take are Fabric's wrappers
    of the network and of the optimizer.
    """

    def __init__(
        self,
        processes: Processes,
        run: PlannedRun,
        folder: Path,
        observers: Observers | None = None,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        fabric = processes.fabric
        setup = run.setup
        # `PlannedRun` says why
        run = replace(run, schedule=copy.copy(run.schedule))
        self.args = setup.args
        self.fabric = fabric
        self.cpu_group = processes.cpu_group
        self.setup = setup
        self.schedule = run.schedule
        self.settings = run.settings
        self.data = run.schedule.data
        self.signals = Signals()

        if observers is None:
            observers = Observers(open_screen(fabric.global_rank == 0))
        self.screen = observers.screen
        self.say = self.screen.say
        self.run_folder = RunFolder(processes, run, folder)

        # the samples, as `RunSamples`; a teacher reads them before the student is in memory
        self.mesh = mesh_of(self.args, run.settings.strategy, fabric.device)
        self.samples, teacher = open_samples(
            processes, run, self.run_folder, self.screen, self.mesh
        )

        # the network, built and filled before Fabric wraps it
        with self.screen.showing_activity(f"reading the weights of {setup.source.folder}"):
            network = build_trained_network(
                setup, run.settings.precision, fabric.device, self.mesh
            )
        prepare_blocks(setup, network, run.settings.recomputed, fabric.device)
        self.model = network.model
        self.trained = network.trained
        self.flops = Flops(self.model)
        self.objective = setup.objective
        self.rollouts = open_rollouts(processes, setup, self.model, self.say)
        self.own_answers = open_own_answers(
            processes, setup, self.model, teacher, self.data.limit
        )

        # the measurements, and the folder that records them
        self.num_measured = num_measured(self.args, self.data)  # examples in a validation
        self.validation_cost = validation_cost(self.args, self.data)
        self.validation = self._open_validation(processes, folder, metrics or {})
        self.recorder = Recorder(
            processes, run, self.run_folder, network, self.validation, observers
        )
        self.metrics = self.recorder.metrics
        self.probe = MemoryProbe(processes, run, network, self.say)
        uniform = self.objective.uniform_loss(setup.source.config.vocab_size)
        guard = DivergenceGuard(self.args.train, self.schedule, uniform, folder, self.say)
        self.divergence = guard
        self.updates = Updates(
            processes, run, network, self.probe, guard, self.metrics.data_ready
        )
        # finished steps, and those that were finished before this process began
        self.step = self.start_step = 0
        self.time_limit = parse_duration(self.args.train.max_time or "") or math.inf
        # seconds of the run, the same on all processes
        self.elapsed = 0.0
        self.start_time = time.monotonic()
        # what `elapsed` was at the last checkpoint
        self.saved_at = 0.0
        # what `elapsed` was before this process's first step
        self.elapsed_before = 0.0

    def _open_validation(
        self, processes: Processes, folder: Path, metrics: Mapping[str, Metric]
    ) -> Validation:
        measured = Measured(
            self.setup.tokenizer,
            self.data,
            self.args.eval,
            objective=self.objective,
            metrics=metrics,
            rollouts=self.rollouts,
            forgetting=measures_forgetting(self.args, self.schedule),
        )
        return Validation(
            processes,
            self.model,
            measured,
            folder / "samples.jsonl",
            samples=self.samples.of_validation(),
            # a signal is noticed between the batches of a validation too
            before_batch=self._check_signals,
        )

    def fit(self) -> None:
        """Train until a limit is reached, and write the result.

        Raises ValueError where memory does not suffice or the loss diverges, `Interrupted` where a
        signal ended the run with its state saved, OSError where the run's folder cannot be written.
        """
        with self.recorder.reporting_failures(), self._explain_errors(), self.signals:
            # the reference is the model at the start, so it comes before a checkpoint is read
            self._compute_references()
            # a checkpoint is read into the plain network and optimizer, before Fabric wraps them
            optimizer = make_optimizer(self.args.train, self.setup.method, self.trained)
            self._open_run(optimizer)
            model, optimizer = self._wrap(optimizer)
            self._try_largest_micro_batch(model, optimizer)
            with self._stop_on_signal(optimizer):
                # before training, or after a resumed step: the run may have been interrupted within
                # this validation
                if self.step == 0 or self._validation_is_due():
                    with self.screen.showing_activity("validating before the first step"):
                        self._validate(optimizer)
                    self._log(pace=0.0)
                    self.recorder.report_progress(self.step)
                # under a time limit the learning rate depends on
                # it, so all processes must have the same value
                (self.elapsed_before,) = self.cpu_group.all_reduce_max(
                    time.monotonic() - self.start_time
                )
                with self.screen.bar(self.step, self.schedule.steps, "first step"):
                    while (reason := self._stop_reason()) is None:
                        self._train_step(model, optimizer)
                        self.screen.advance(self.step)
                        self._after_step(optimizer)
                if self.step < self.schedule.steps:
                    self.say(f"step {self.step}: {reason}")
                with self.screen.showing_activity("validating"):
                    self._validate(optimizer)
            self._finish(optimizer)

    def _compute_references(self) -> None:
        """Compute the log-probabilities in the reference model; a resumed run computes them from
        the initial weights, too."""
        if self.objective.needs_reference:
            self.run_folder.begin()
            while (reason := self._try_references()) is not None:
                self.probe.halve(reason)  # what was computed is not computed again
            self.start_time = time.monotonic()
            # --train.max_time does not count the reference
            self.elapsed = 0.0

    def _try_references(self) -> str | None:
        """Compute the references; return the message of an out-of-memory error that a smaller
        layout may avoid."""
        try:
            with uncompiled():
                identity = self.run_folder.identity()
                folder = self.recorder.folder
                self.samples.compute_references(
                    self.fabric, self.model, folder, identity, self.say, self._check_signals
                )
            return None
        except SignalCaught as signal:
            raise self._interrupted(signal) from None
        except RuntimeError as error:
            # with several processes the others would wait in a collective
            if self.fabric.world_size > 1 or not is_out_of_memory(error):
                raise
            return str(error)

    def _open_run(self, optimizer: Optimizer) -> None:
        """Open the run's folder, with the state of its newest checkpoint if asked to resume."""
        warnings = self._resume(optimizer)
        # all have read the checkpoint by now
        self.cpu_group.check_equal({"step to continue from": self.start_step})
        self.recorder.open(self.start_step)
        self.validation.restore(self.metrics.resumed_rows)
        self.screen.record(self.metrics.resumed_rows)
        for line in [*warnings, *self.recorder.start_lines(self.start_step)]:
            self.say(line)

    def _wrap(self, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Return the network and the optimizer as Fabric wraps them."""
        # Fabric must not move offloaded blocks to the device
        on_host = blocks_on_host(self.setup, self.mesh is not None)
        return self.fabric.setup(self.model, optimizer, move_to_device=not on_host)

    def _try_largest_micro_batch(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Take the largest micro-batch first: what does not fit, or does not compile, fails before
        training."""
        activity = "trying the largest micro-batch"
        if is_compiled(self.model):
            activity += ", compiling"
        with self.screen.showing_activity(activity):
            self.probe.try_largest(model, optimizer, resumed=self.start_step > 0)

    def _resume(self, optimizer: Optimizer) -> list[str]:
        """Continue from the newest readable checkpoint if asked to; returns warnings about
        unreadable ones."""
        progress, damaged = self.recorder.restore(optimizer)
        if progress is None:
            return []
        self.step = self.start_step = progress["step"]
        if progress["samples"] > self.schedule.num_samples:
            newest = f"{self.recorder.folder}/checkpoints/step-{self.start_step:06d}"
            reason = f"is beyond the run's {self.schedule.steps} steps"
            raise ValueError(
                f"{newest} {reason}; raise --train.max_steps or --train.epochs"
            )
        self.elapsed = progress["elapsed"]
        self.saved_at = self.elapsed
        # the clock goes on from where the checkpoint was saved
        self.start_time -= self.elapsed
        self.schedule.resume_at(self.start_step, progress["samples"])
        # after a short step, those that follow have other examples than in one run
        check_one_micro_batch(self.args, self.schedule)
        self.updates.restore(progress.get("loss_scale") or {})
        return [f"warning: {reason}; using the checkpoint before it" for reason in damaged]

    def _train_step(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Take one optimizer step over the next global batch, and record its row of metrics."""
        step = self.step
        metrics = self.metrics
        metrics.start()
        samples = self.samples.of_step(step)
        if self.rollouts is not None or self.own_answers is not None:
            # to generate and to rate answers is no waiting for data
            metrics.data_ready()
        of_rollouts: dict[str, float] = {}
        if self.rollouts is not None:
            samples, of_rollouts = self.rollouts.collect(
                step, samples, self.schedule.layout
            )
        if self.own_answers is not None:
            samples, of_rollouts = self.own_answers.replaced(
                step, samples, self.schedule.layout
            )
        rate = learning_rate(self.args.train, step, self._projected_steps(step))
        set_learning_rate(optimizer, rate)
        values, norm = self.updates.step(model, optimizer, samples, step)
        metrics.stop()
        self.step += 1
        samples_seen = self.schedule.seen(self.step)
        # tensors stay on the device until the rows are written: no step waits for the GPU
        metrics.add(
            step=self.step,
            epoch=samples_seen / self.schedule.order.size,
            samples=samples_seen,
            tokens=sum(sample.tokens.numel() for sample in samples),
            flops=self.objective.updates * self.flops(self.objective.learned(samples)),
            loss=values[0],
            **dict(zip(self.objective.scores, values[1:], strict=True)),
            **of_rollouts,
            **self.updates.metrics(),
            learning_rate=rate,
            grad_norm=norm,
        )

    def _after_step(self, optimizer: Optimizer) -> None:
        """Validate, log and save where their intervals end."""
        args = self.args
        step = self.step
        # a checkpoint written in the background gets its final name here
        self.recorder.saver.poll()
        # also advances `elapsed`, by which the end and the checkpoints are decided
        self._check_signals()
        # at the end, `fit` validates
        validate = self._validation_is_due() and self._stop_reason() is None
        if validate:
            with self.screen.showing_activity("validating"):
                self._validate(optimizer)
        if self._stop_reason():
            return  # saved after the last validation
        save = checkpoint_is_due(
            args, step, self.schedule.steps, self.elapsed - self.saved_at
        )

        # steps on a CPU are slow: a short run shows about fifty of them rather than every tenth
        on_cpu = self.fabric.device.type == "cpu"
        log_interval = args.train.log_interval or (
            max(1, min(10, self.schedule.steps // 50)) if on_cpu else 10
        )
        # rows are written, and checked for divergence,
        # before a checkpoint of these weights is saved
        if save or validate or step % log_interval == 0:
            self._log((self.elapsed - self.elapsed_before) / (step - self.start_step))
        if validate:
            self.recorder.report_progress(step)
        if save:
            self.recorder.save(optimizer, step, self.elapsed, self.updates.state())
            self.saved_at = self.elapsed
        if validate:
            # one that came during the sample answers, which may take a while
            self._check_signals()

    def _validation_is_due(self) -> bool:
        """Whether to validate after the steps done so far."""
        interval = validation_interval(
            self.args,
            self.schedule.steps,
            cost=self.validation_cost,
            has_losses=self.num_measured > 0,
        )
        return bool(interval) and self.step % interval == 0

    def _stop_reason(self) -> str | None:
        """Why the run ends now; None: it continues."""
        patience = self.args.eval.patience
        if self.step >= self.schedule.steps:
            return "all steps are done"
        if self.elapsed >= self.time_limit:
            return f"--train.max_time {self.args.train.max_time} is over"
        if patience and self.validation.since_best >= patience:
            return f"{self.validation.best_text}, {patience} validations ago"
        return None

    def _projected_steps(self, step: int) -> int:
        """How many steps the run will have; under a time limit, as many as the pace so far
        allows."""
        if self.time_limit == math.inf or step == self.start_step == 0:
            return self.schedule.steps

        # the pace of this process once it has done a step;
        # until then that of the run before it was resumed
        since, first = (
            (self.elapsed_before, self.start_step) if step > self.start_step else (0.0, 0)
        )
        pace = max(1e-9, (self.elapsed - since) / (step - first))
        # at least the step that is about to begin counts
        return min(
            self.schedule.steps,
            max(step + 1, step + round((self.time_limit - self.elapsed) / pace)),
        )

    def _validate(self, optimizer: Optimizer) -> None:
        """Put the validation scores into the step's row, show sample answers, and keep the best
        weights.

        A resumed run repeats nothing that is done already.
        """
        validation = self.validation
        step = self.step
        # what is queued on the device still belongs to the time of the steps
        self.metrics.synchronize(self.fabric.device)
        # uncompiled: sets and answers have shapes of their own, each of which would be compiled
        with averaged_weights(optimizer), uncompiled():
            self._measure()
            has_answers = any(item["step"] == step for item in validation.answers)
            if not has_answers:
                self._show_answers()
            is_best = self.args.save.best and step > 0 and validation.best == step
            if is_best and not self.recorder.has_best(step):
                self.recorder.write_best(step)

    def _measure(self) -> None:
        """Measure the scores of this step, unless a run that was interrupted in this validation has
        recorded them; before and after training also what the verdict compares."""
        validation = self.validation
        step = self.step
        layout = self.schedule.layout
        size = self.args.train.global_batch_size
        has_metrics = all(step in values for values in validation.metric_values.values())
        has_scores = step in validation.losses and has_metrics
        if len(self.data.val) and not has_scores:
            scores = validation.measure(step, layout, size)
            self.divergence.check_validation(step, scores["val_loss"])
            self.metrics.note(step, **scores)
            self.say(validation.line(step, scores))
        if step == 0:
            validation.measure_before(layout, size)
        elif self._stop_reason() is not None:
            validation.measure_after(layout, size)

    def _show_answers(self) -> None:
        """Generate the sample answers of this step, and print each when it is there."""
        # without a validation set, no other line says which step they are of
        if self.validation.prompts and not len(self.data.val):
            self.say(f"step {self.step}: sample answers")
        for item in self.validation.generate_answers(self.step):
            self.say(f"  {shorten_left(item['prompt'])}\n  -> {shorten(item['answer'])}")

    def _log(self, pace: float) -> None:
        """Write the rows collected since the last time, check them, and show the newest; pace:
        seconds per step."""
        rows = self.metrics.flush(self.fabric.device)
        for row in rows:
            self.divergence.check(row, self.metrics.first)
        steps = self._projected_steps(self.step)
        left = max(0.0, min(pace * (steps - self.step), self.time_limit - self.elapsed))
        if self.metrics.last:
            self.screen.row(self.metrics.last, steps, format_duration(left) if pace else "")
        self.screen.record(rows)

    def _check_signals(self) -> None:
        """Advance `elapsed`, and raise SignalCaught on every process if one has caught a signal.

        Called after every step, and by `Validation` before each of its batches.
        """
        # one reduction: all processes learn of a signal of any of them, and agree on the time
        caught, self.elapsed = self.cpu_group.all_reduce_max(
            self.signals.caught, time.monotonic() - self.start_time
        )
        if caught:
            raise SignalCaught(int(caught))

    @contextmanager
    def _stop_on_signal(self, optimizer: Optimizer) -> Iterator[None]:
        """Within the context, a signal ends the run with its state saved."""
        try:
            yield
        except RewardError as error:
            self._save_state(optimizer)
            message = f"{error}\nafter mending it: {self._resume_command()}"
            raise ValueError(message) from error
        except SignalCaught as signal:
            self._save_state(optimizer)
            stopped = self._interrupted(signal)
            if self.recorder.is_writer and self.step:
                self.recorder.report(str(stopped))
            raise stopped from None

    def _interrupted(self, signal: SignalCaught) -> Interrupted:
        """Return the exception that ends the run, with the command that continues it."""
        is_last = self.step >= self.schedule.steps
        return Interrupted(signal.number, self.step, self._resume_command(), is_last)

    def _resume_command(self) -> str:
        """Return the command that continues the run."""
        command = run_dir.command(f"finetune/{method_name(type(self.args))}.py")
        return f"{command} --resume --out_dir {self.recorder.folder}"

    def _finish(self, optimizer: Optimizer) -> None:
        """Write the last state, best/, final/ and the report."""
        self._save_state(optimizer)
        if self.recorder.is_writer:
            self.recorder.publish_best(self.step)
        with averaged_weights(optimizer):
            self.recorder.write_final()
        if self.recorder.is_writer:
            self.recorder.finish()
        self.fabric.barrier()

    def _save_state(self, optimizer: Optimizer) -> None:
        """Write the rows and the checkpoint of a run that ends here."""
        if self.metrics.rows:
            self._log(pace=0.0)
        saver = self.recorder.saver

        # a checkpoint still being written may be that of this very step
        saver.finish()
        if self.step > self.start_step and saver.saved_step != self.step:
            self.recorder.save(optimizer, self.step, self.elapsed, self.updates.state())
            saver.finish()

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Within the context, errors of memory, of other processes and of the disk say what to do;
        loggers are closed."""
        status = "failed"
        try:
            yield
            status = "success"
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise RankError(self.probe.out_of_memory(str(error))) from None
            # a process that hangs would never end by itself
            if self.fabric.world_size > 1 and (
                reason := peer_failure(error, self.args.timeout)
            ):
                end_children(self.fabric)
                raise RankError(f"{reason}; {self.recorder.newest_checkpoint()}") from None
            raise
        except OSError as error:
            raise self.recorder.explain_os_error(error) from None
        finally:
            self.recorder.close_logger(status)
            if self.rollouts is not None:
                self.rollouts.close()
