"""What a run leaves in its folder: config.yaml, metrics.csv, checkpoints/, best/, final/,
report.html."""

import dataclasses
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from litft import run_dir
from litft.atomic import replace_folder
from litft.checkpoints.adapter_reader import noted_step
from litft.data.dataset import histogram
from litft.distributed.devices import machine_lines
from litft.distributed.process_group import Processes
from litft.errors import Interrupted
from litft.training.memory.flops import peak_flops
from litft.training.network import TrainedNetwork
from litft.training.output import run_checkpoints
from litft.training.output.base_files import BaseFiles
from litft.training.output.loggers import finish, make_logger, row_sink
from litft.training.output.metrics import FP16_COLUMNS, Metrics, Row
from litft.training.output.next_commands import next_commands
from litft.training.output.report import Report, SummaryTile, write_report
from litft.training.output.result_folder import ResultWriter
from litft.training.output.run_folder import RunFolder
from litft.training.output.screen import Screen
from litft.training.planned_run import PlannedRun
from litft.training.run_description import (
    description,
    format_duration,
    method_title,
    run_title,
)
from litft.training.validation import Validation, metric_format


@dataclasses.dataclass(frozen=True)
class Observers:
    """Who watches a run."""

    screen: Screen
    # called in the first process with every row of metrics.csv, when it is written
    callback: Callable[[Row], None] | None = None


class Recorder:
    """Writes a run's folder.

    The first process writes; all of them take part in what has to be gathered.
    """

    def __init__(
        self,
        processes: Processes,
        run: PlannedRun,
        run_folder: RunFolder,
        network: TrainedNetwork,
        validation: Validation,
        observers: Observers,
    ) -> None:
        fabric = processes.fabric
        setup = run.setup
        self.args = setup.args
        self.fabric = fabric
        self.cpu_group = processes.cpu_group
        self.run = run
        self.setup = setup
        self.schedule = run.schedule
        self.settings = run.settings
        self.run_folder = run_folder
        self.folder = run_folder.folder
        self.network = network
        self.validation = validation
        self.screen = observers.screen
        self.callback = observers.callback
        self.say = self.screen.say
        self.is_writer = fabric.global_rank == 0
        self.results = ResultWriter(run, network, self.folder, self.is_writer)
        self.peak = peak_flops(fabric.device, run.settings.precision)
        path = self.folder / "metrics.csv"
        peak = None
        # a CPU's peak is measured, which other programs disturb
        if self.peak and fabric.device.type != "cpu":
            peak = self.peak * fabric.world_size
        if not self.is_writer:
            path = None
        columns = [
            *setup.objective.columns,
            *validation.columns,
            *(validation.metrics.keys() - {"exact_match"}),
        ]
        if run.settings.precision == "fp16":
            columns += FP16_COLUMNS
        self.metrics = Metrics(path, peak, columns, self._send_row)
        group = processes.cpu_group.checkpoint_group
        self.saver = run_checkpoints.Saver(self.folder, self.is_writer, group)
        self.base_files = BaseFiles(
            [*setup.source.weight_files, setup.source.base / "config.json"]
        )
        of_teacher = []
        if setup.teacher is not None:
            of_teacher = [*setup.teacher.weight_files, setup.teacher.base / "config.json"]
        self.teacher_files = BaseFiles(of_teacher, "the teacher of what was trained")
        self.is_open = False  # the folder is this run's
        # time.monotonic() from which on report.html may be written again
        self.next_report = 0.0
        self.logger: Any = None
        # sends a row to the logger
        self.log_row: Callable[[Row], None] | None = None
        # the logger and the run's name there, of a run that is resumed
        self.logged_as: list[str] | None = None

    # ---- the beginning

    def restore(self, optimizer: Optimizer) -> tuple[dict[str, Any] | None, list[str]]:
        """Fill parameters and optimizer from the newest readable checkpoint, if the run is to be
        resumed.

        Returns what the checkpoint says of the run's progress, or None, and what is wrong with
        newer checkpoints.
        """
        if not self.args.resume:
            return None, []
        parameters = self.network.parameters
        identity = self.run_folder.identity()
        progress, damaged = run_checkpoints.restore_newest(
            self.folder, identity, parameters, optimizer, self.cpu_group
        )
        if progress is not None:
            self.logged_as = progress.get("logger")
            self.base_files.check(progress.get("base_files") or {})
            self.teacher_files.check(progress.get("teacher_files") or {})
        return progress, damaged

    def open(self, start_step: int) -> None:
        """Make the run's folder and write config.yaml; what a resumed run left beyond `start_step`
        is deleted.

        Raises ValueError in every process where one does not see the folder.
        """
        if self.is_writer:
            self._open(start_step)
            self.base_files.start()
            self.teacher_files.start()
        self.fabric.barrier()
        if any(self.cpu_group.all_reduce_max(not run_dir.is_run(self.folder))):
            reason = "a process does not see what the first one writes there"
            raise ValueError(
                f"--out_dir {self.folder}: {reason}; name a folder that all nodes share"
            )
        # all processes decide by the earlier rows, and must decide the same
        self.metrics.resumed_rows = self.fabric.broadcast(self.metrics.resumed_rows)

    def _open(self, start_step: int) -> None:
        config = self.run_folder.write_config()
        self.is_open = True

        # what the folder has beyond `start_step` belongs to steps that are taken again
        if start_step < self.schedule.steps:
            run_dir.set_final_aside(self.folder)
        # a run from its beginning keeps no row, not even that of step 0
        self.metrics.truncate(start_step or -1)
        run_checkpoints.delete_after(self.folder, start_step)
        self.publish_best(start_step)
        for path in self.folder.glob("best-*.partial"):
            shutil.rmtree(path)
        if (noted_step(self.folder / "best") or 0) > start_step:
            shutil.rmtree(self.folder / "best")

        # the logger takes the rows from here on
        project = self.args.logger_project
        self.logger = make_logger(
            self.args.logger, self.folder, config, start_step, self.logged_as, project
        )
        if self.logger:
            self.log_row = row_sink(self.logger, self.say)

    def _send_row(self, row: Row) -> None:
        """Pass a row of metrics.csv on, when it is written."""
        if self.callback:
            self.callback(row)
        if self.log_row:
            self.log_row(row)

    def start_lines(self, start_step: int) -> Iterator[str]:
        """Yield where a resumed run starts."""
        if start_step == self.schedule.steps:
            yield (
                f"all {start_step} steps are done, and final/ is written again; to train further, "
                "add --train.max_steps or --train.epochs with a larger number"
            )
        elif start_step:
            yield f"continuing after step {start_step}"
        elif self.args.resume:
            yield "no checkpoint to continue from; starting at step 0"

    @cached_property
    def _description(self) -> list[str]:
        """The data and the plan: the same in every report of the run."""
        return description(self.run, self.peak)

    # ---- checkpoints

    def save(
        self, optimizer: Optimizer, step: int, elapsed: float, loss_scale: dict[str, Any]
    ) -> None:
        """Write the state after `step` steps, to resume from; every process takes part.

        elapsed: seconds of the run. loss_scale: the state of the scale of the loss in fp16.
        """
        progress = {
            "samples": self.schedule.seen(step),
            "elapsed": elapsed,
            "loss_scale": loss_scale,
            "identity": self.run_folder.identity(),
            "tokenizer": self.setup.tokenizer.choices(),
            "logger": [self.args.logger, self.logger.version] if self.logger else None,
            "base_files": self.base_files.record() if self.is_writer else {},
            "teacher_files": self.teacher_files.record() if self.is_writer else {},
        }

        def when_written() -> None:
            run_checkpoints.prune(self.folder, self.args.save.keep_last)
            self.publish_best(step)

        # on a CPU, the copy of a whole model that writing in the background needs would take memory
        # from the steps
        in_background = (
            self.fabric.device.type == "cuda" or not self.setup.method.saves_full_model
        )
        self.saver.begin(
            step, self.network.parameters, optimizer, progress, when_written, in_background
        )

    def newest_checkpoint(self) -> str:
        """What a failed run can continue from, for a message."""
        newest = run_checkpoints.newest(self.folder)
        if newest:
            return f"{newest} is complete: --resume continues from it"
        return "no checkpoint had been written"

    # ---- folders to open

    def write_best(self, step: int) -> None:
        """Write the best weights so far under a preliminary name.

        They become best/ when the next checkpoint is complete. If the run ends before it, the
        resumed run repeats these steps, and best/ must not be from them.
        """
        if self.is_writer:
            for earlier, path in self._preliminary_bests():
                # no checkpoint, complete or being written, has it as its best
                if earlier > (self.saver.writing_step or 0):
                    shutil.rmtree(path)
        self.results.write(f"best-{step:06d}.partial", step)

    def has_best(self, step: int) -> bool:
        """Whether best/, or what becomes best/, has the weights after `step` steps; the same in
        every process."""
        found = False
        if self.is_writer:
            written = [
                self.folder / "best",
                *(path for _, path in self._preliminary_bests()),
            ]
            found = any(noted_step(path) == step for path in written)
        return self.fabric.broadcast(found)

    def write_final(self) -> None:
        """Write final/, and delete what it was before the run was continued."""
        self.results.write("final")
        if self.is_writer:
            run_dir.delete_previous_final(self.folder)

    def publish_best(self, step: int) -> None:
        """Give what was best after `step` steps the name best/."""
        for best_step, path in self._preliminary_bests():
            if best_step <= step:
                replace_folder(path, self.folder / "best")

    def _preliminary_bests(self) -> list[tuple[int, Path]]:
        """What `write_best` has written and is not best/ yet, with its step; the oldest first."""
        bests = []
        for path in self.folder.glob("best-*.partial"):
            step = path.name[len("best-") : -len(".partial")]
            if step.isdecimal():
                bests.append((int(step), path))
        return sorted(bests)

    # ---- the end

    def finish(self) -> None:
        """Print the results and what to do with them, and write the report."""
        self.screen.results(self._scores(), self._results())
        verdicts = self.validation.before_after.lines()
        if verdicts:
            self.say("compared with the model before training:")
        for line in verdicts:
            self.say(f"  {line}")
        step = int(self.metrics.newest.get("step", 0))
        steps = self.schedule.steps
        if step == steps:
            self.report("finished")
        else:
            self.report(f"finished after {step:,} of {steps:,} steps")
        self.say(
            f"the result is in {self.folder / 'final'}, the report in "
            f"{self.folder / 'report.html'}; next:\n"
        )
        final = self.folder / "final"
        for line in next_commands(final, self.args, self.schedule.data, self.setup.method):
            self.say(f"  {line}")

    def _results(self) -> list[str]:
        """The best step, the time and the memory."""
        validation = self.validation
        lines = []
        kept = noted_step(self.folder / "best")
        # of an earlier part of the run, which had --save.best
        is_outdated = kept is not None and kept != validation.best
        if validation.best is not None and (self.args.save.best or is_outdated):
            line = validation.best_text
            if kept == validation.best:
                line += ", which is in best/"
            elif kept is not None:
                line += f"; best/ has step {kept}"
            else:
                line += "; best/ is empty: that step was before --save.best"
            lines.append(line)
        return [
            *lines,
            f"{self.metrics.seconds:.0f} s of training, {self.metrics.summary(self.fabric.device)}",
        ]

    def _scores(self) -> dict[str, list[str]]:
        """The first and the last value of each score of the validations, as text."""
        validation = self.validation

        # title, format, and values by step
        scores = [("validation loss", "{:.4f}", validation.losses)]
        if self.setup.objective.data_kind == "prompts":
            scores = [("validation reward", "{:.4f}", self._score_by_step("val_reward"))]
            for name in validation.objective.validation_scores[1:]:
                title = name.replace("_", "@")
                scores.append((title, "{:.1%}", self._score_by_step(f"val_{name}")))
        for name, by_step in validation.metric_values.items():
            scores.append((name.replace("_", " "), metric_format(name), by_step))
        for name in validation.sets:
            column = validation.column_of_set(name)
            by_step = self._score_by_step(column)
            scores.append((validation.titles[column], "{:.4f}", by_step))
        for name, form in (("accuracy", "{:.1%}"), ("margin", "{:.3g}")):
            scores.append((f"validation {name}", form, self._score_by_step(f"val_{name}")))

        # the first and the last value, where there are any
        ends = {}
        for title, form, by_step in scores:
            steps = [step for step, value in by_step.items() if not math.isnan(value)]
            if steps:
                first = by_step[min(steps)]
                last = by_step[max(steps)]
                # a resumed run may measure what its beginning has not
                if min(steps) > min(validation.losses, default=0):
                    title = f"{title} (since step {min(steps)})"
                ends[title] = [form.format(first), form.format(last)]
        return ends

    def _score_by_step(self, column: str) -> dict[int, float]:
        """A score of named sets, or of preferences, which the row of a validation may lack."""
        by_step = {}
        for step, row in self.validation.scores.items():
            if column in row:
                by_step[step] = row[column]
        return by_step

    @contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """Within the context, an error that ends the run also ends up in report.html, once the run
        has its folder."""
        try:
            yield
        except Exception as error:
            if self.is_open and self.is_writer and not isinstance(error, Interrupted):
                # stdout may be closed; the first error is the one to report
                with suppress(OSError):
                    self.report(f"failed: {error}")
            raise

    def report(self, state: str) -> None:
        """Write report.html; state: of the run, such as "finished", shown as its title. An error
        is only a warning."""
        try:
            self._report(state)
        except Exception as error:
            self.say(f"warning: report.html could not be written ({error})")

    def report_progress(self, step: int) -> None:
        """Write the report of the run so far, but use at most 2 % of the time for it: metrics.csv
        grows."""
        start = time.monotonic()
        if start >= self.next_report and self.is_writer:
            self.report(f"running: {step:,} of {self.schedule.steps:,} steps")
            seconds = time.monotonic() - start
            self.next_report = start
            if seconds > 0.1:
                self.next_report += 50 * seconds

    def _report(self, state: str) -> None:
        if self.setup.objective.is_cross_entropy:
            loss = "Loss per token"
        else:
            loss = f"Loss ({self.setup.objective.title})"
        smoothing = self.args.train.label_smoothing
        if smoothing:
            loss += f"; that of training has label smoothing {smoothing:g}"
        report = Report(
            title=run_title(self.setup),
            state=state,
            tiles=self._tiles(),
            flags=self._main_flags(),
            setup=self._description,
            machine=machine_lines(self.fabric.device, self.fabric.world_size),
            lengths=histogram(self.schedule.data.train.lengths),
            answers=self.validation.answers,
            scores=self.validation.titles,
            hardest=self.validation.hardest,
            verdicts=self.validation.before_after.lines(),
            loss=loss,
        )
        write_report(self.folder, report)

    def _tiles(self) -> list[SummaryTile]:
        """The results of the report: scores before and after, time, speed, memory."""
        tiles = []
        for name, values in self._scores().items():
            tiles.append(SummaryTile(name, " \u2192 ".join(dict.fromkeys(values))))
        newest = self.metrics.newest
        tokens = self.metrics.tokens
        seconds = self.metrics.seconds
        if seconds:
            tiles += [
                SummaryTile("training time", format_duration(seconds)),
                SummaryTile("tokens per second", f"{tokens / seconds:,.0f}"),
            ]
        memory = newest.get("memory_gib")
        if memory:
            tiles.append(SummaryTile("peak memory", f"{memory:.2f} GiB"))
        return tiles

    def _main_flags(self) -> dict[str, str]:
        """The flags of the report that say most about the run, as they were resolved."""
        args = self.args
        schedule = self.schedule
        flags = {
            "base model": args.checkpoint_dir,
            "data": ", ".join(item.path for item in args.data.paths),
            "method": method_title(self.setup),
            "quantization of the base": self.setup.quantize,
            "precision": self.settings.precision,
            "planned steps": f"{schedule.steps:,}, each of {args.train.global_batch_size} examples",
            "learning rate": f"{args.train.learning_rate:g}, {args.train.lr_schedule}",
            "optimizer": args.train.optimizer,
            "longest row": f"{schedule.data.limit:,} tokens",
            "devices": f"{args.devices * args.num_nodes}, {self.settings.strategy}",
            "seed": str(args.seed),
        }
        return {name: str(value) for name, value in flags.items()}

    def close_logger(self, status: str) -> None:
        """Report the run's end, "success" or "failed", to the logger."""
        if self.logger:
            finish(self.logger, status, self.say)

    def explain_os_error(self, error: OSError) -> OSError:
        """The same error, with the free disk space and the newest checkpoint in its message."""
        if self.folder.is_dir():
            free = f"{shutil.disk_usage(self.folder).free / 2**20:,.0f} MiB are free there"
        else:
            free = ""
        reason: Iterable[str] = filter(
            None, [error.strerror or str(error), free, self.newest_checkpoint()]
        )
        return OSError(error.errno, "; ".join(reason), error.filename)
