"""One fine-tuning run on one process of it: what it is made of, and the folder that it fills."""

import dataclasses
import math
import shutil
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from lightning_fabric import Fabric
from torch.optim import Optimizer
from tqdm import tqdm

from litft import run_dir
from litft.args import seconds
from litft.args.processes import launch_id, started_by
from litft.checkpoints.weight_files import SHARD_BYTES
from litft.data.dataset import SPLIT, histogram
from litft.distributed.devices import machine_lines, mesh_of
from litft.distributed.process_group import HostGroup
from litft.model.placement import full_tensor
from litft.pretrained import base_record, copy_tokenizer
from litft.save_pretrained import Result, write_result
from litft.training import run_state
from litft.training.activation_checkpointing import recompute
from litft.training.compile import compile_blocks
from litft.training.cpu_offload import offload_activations, offload_parameters
from litft.training.dry_run import data_lines, plan_lines
from litft.training.flops import peak_flops
from litft.training.html_report import Report, write_report
from litft.training.loggers import make_logger, row_sink
from litft.training.metrics import Metrics
from litft.training.schedule import Schedule
from litft.training.settings import Settings
from litft.training.setup import Setup
from litft.training.validation import Validation


class Run:
    """Where a run stands, and what it keeps: config.yaml, metrics.csv, checkpoints/, best/, final/, report.html."""

    def __init__(
        self, fabric: Fabric, hosts: HostGroup, setup: Setup, schedule: Schedule, settings: Settings, folder: Path
    ) -> None:
        self.args, self.fabric, self.hosts, self.setup, self.schedule = setup.args, fabric, hosts, setup, schedule
        self.settings = settings
        args, self.data, self.precision = setup.args, schedule.data, settings.precision
        self.source, self.tokenizer, self.method = setup.source, setup.tokenizer, setup.method
        self.folder, self.main = folder, fabric.global_rank == 0
        self.mesh = mesh_of(args, settings.strategy, fabric.device)
        self.model, self.parameters = setup.build(self.precision, fabric.device, self.mesh)
        self._arrange_blocks()
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.peak = peak_flops(fabric.device, self.precision)
        self.metrics = Metrics(folder / "metrics.csv" if self.main else None, self.peak and self.peak * fabric.world_size)
        self.validation = Validation(
            fabric, hosts, self.model, setup.tokenizer, self.data, args.eval, folder / "samples.jsonl"
        )
        self.saver = run_state.Saver(folder, self.main, hosts.writing)
        self.logger: Any = None
        self.logged_as: list[str] | None = None  # who logged the run that goes on, and what they called it
        self.limit = seconds(args.train.max_time or "") or math.inf
        self.start_step, self.elapsed, self.clock = 0, 0.0, time.monotonic()  # elapsed: as all processes see it

    @property
    def on_host(self) -> bool:
        """Whether the blocks' frozen weights wait in the host's memory; of a sharded network FSDP sees to that."""
        return self.args.train.cpu_offload == "parameters" and self.mesh is None

    def _arrange_blocks(self) -> None:
        train, device = self.args.train, self.fabric.device
        if self.on_host:
            offload_parameters(self.model, device)
        recompute(self.model, self.settings.recomputed)
        if train.compile if train.compile is not None else device.type == "cuda" and not self.on_host:
            compile_blocks(self.model)
        if train.cpu_offload == "activations":
            offload_activations(self.model, device)

    @property
    def steps(self) -> int:
        """How many there are, if no other limit comes first."""
        return self.schedule.steps

    def resume(self, optimizer: Optimizer) -> list[str]:
        """Continue from the newest whole checkpoint if asked to; returns what is wrong with newer ones."""
        if not self.args.resume:
            return []
        progress, damaged = run_state.restore_newest(self.folder, self.identity(), self.parameters, optimizer)
        if progress is None:
            return []
        self.start_step = progress["step"]
        if self.start_step > self.steps:
            newest = f"{self.folder}/checkpoints/step-{self.start_step:06d}"
            raise ValueError(f"{newest} is beyond the run's {self.steps} steps; raise --train.max_steps or --train.epochs")
        self.elapsed, self.logged_as = progress["elapsed"], progress.get("logger")
        self.clock -= self.elapsed
        self.schedule.go_on(self.start_step, progress["samples"])
        return [f"warning: {reason}; the checkpoint before it is taken" for reason in damaged]

    def open_folder(self) -> None:
        """Make the run's folder and say in it how the run began; what lies beyond the steps begun with never happened."""
        if self.args.overwrite:
            run_dir.clear(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        stored = dataclasses.asdict(self.args)
        given_elsewhere = ("devices", "num_nodes") if started_by() else ()
        for name in ("out_dir", "resume", "overwrite", *given_elsewhere):
            stored.pop(name)
        run_dir.write_config(self.folder, self.method.title, yaml.safe_dump(stored, sort_keys=False), launch_id())
        self.metrics.cut(self.start_step or -1)
        run_state.cut(self.folder, self.start_step)
        self.place_best(self.start_step)
        for path in self.folder.glob("best-*.partial"):
            shutil.rmtree(path)
        self.logger = make_logger(
            self.args.logger, self.folder, stored, self.start_step, self.logged_as, self.args.logger_project
        )
        if self.logger:
            self.metrics.sinks.append(row_sink(self.logger, self.say))

    def check_folder(self) -> None:
        """ValueError in every process where one does not see the folder that the first has opened."""
        if any(self.hosts.all_reduce_max(not run_dir.is_run(self.folder))):
            reason = "a process does not see what the first one writes there"
            raise ValueError(f"--out_dir {self.folder}: {reason}; name a folder that all nodes share")

    def identity(self) -> dict[str, Any]:
        """What a run must share with the one it continues, or it would silently be another."""
        own = {"seed": self.args.seed, "precision": self.precision, "training data": self.data.digest, "split": SPLIT}
        measured = self.validation.measured(self.args.train.global_batch_size)
        own |= {"validation data (--data.val_path)": self.data.held_out, "measured examples (--eval.max_batches)": measured}
        return self.setup.identity() | own

    @cached_property
    def headline(self) -> list[str]:
        """What is about to be done: the data, the plan, where it begins."""
        lines = [
            *data_lines(self.schedule, self.tokenizer),
            *plan_lines(self.setup, self.schedule, self.settings, self.peak),
        ]
        if self.source.adapter:
            lines.append("going on with this adapter: ranks, targets and tokens are its own")
            lines += filter(None, [self.source.another_quantization(self.setup.quantize)])
        if tokens := self.setup.untrained_tokens(self.data.special):
            remedy = f"--data.new_tokens '{','.join(tokens)}' trains them"
            lines.append(f"warning: the embeddings of the template's {', '.join(tokens)} look untrained; {remedy}")
        if self.start_step == self.steps:
            lines.append(f"all {self.start_step} steps are done; final/ is written again")
        elif self.start_step:
            lines.append(f"continuing after step {self.start_step}")
        elif self.args.resume:
            lines.append("no checkpoint to continue from; beginning at step 0")
        return lines

    def save(self, optimizer: Optimizer, done: int) -> None:
        """The state after so many steps, to resume from; every process takes part."""
        progress = {
            "samples": self.schedule.seen(done),
            "elapsed": self.elapsed,
            "identity": self.identity(),
            "tokenizer": self.tokenizer.choices(),
            "logger": [self.args.logger, self.logger.version] if self.logger else None,
        }

        def then() -> None:
            run_state.prune(self.folder, self.args.save.keep_last)
            self.place_best(done)

        # a copy of the whole model would take a CPU's memory from the steps
        beside = self.fabric.device.type == "cuda" or not self.method.saves_full_model
        self.saver.begin(done, self.parameters, optimizer, progress, then, beside)

    def kept(self) -> str:
        """What there is to go on with."""
        newest = run_state.newest(self.folder)
        return f"{newest} is whole: --resume goes on from there" if newest else "no checkpoint was written before"

    def write_best(self, step: int) -> None:
        """A folder to open of the best so far; it becomes best/ with the next checkpoint, or a resumed run had another."""
        for earlier, path in self._bests() if self.main else ():
            if earlier > (self.saver.start_step or 0):  # or a checkpoint that is still being written has it for its best
                shutil.rmtree(path)
        self.write(f"best-{step:06d}.partial")

    def place_best(self, done: int) -> None:
        """Make what was best after so many steps best/."""
        for step, path in self._bests():
            if step <= done:
                run_dir.put_in_place(path, self.folder / "best")

    def _bests(self) -> list[tuple[int, Path]]:
        """What was best at some step, and is not best/ yet; the oldest first."""
        found = [(path.name[5:-8], path) for path in self.folder.glob("best-*.partial")]
        return sorted((int(step), path) for step, path in found if step.isdecimal())

    def write(self, name: str) -> None:
        """A folder to open, under its name only when complete.

        All processes of a sharded network take part, which gathers it tensor by tensor; the first one writes.
        """
        partial, folder = self.folder / f"{name}.partial", self.folder / name
        if self.main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
        values = {name: parameter.detach() for name, parameter in self.parameters.items()}
        if self.method.saves_full_model and (self.main or self.mesh is not None):
            result, dtype = Result(self.method, values), self.source.dtype(None)
            write_result(partial if self.main else None, self.source, dtype, result, SHARD_BYTES / 1e9)
        elif self.mesh is not None:
            values = {name: full_tensor(value) for name, value in values.items()}
        if not self.main:
            return
        if not self.method.saves_full_model:
            own = {"quantize": self.setup.quantize, "precision": self.precision}
            record = base_record(self.source, folder)
            self.method.write(partial, self.source, values, record | {"litft": record["litft"] | own})
        copy_tokenizer(self.tokenizer, partial)
        run_dir.put_in_place(partial, folder)

    def finish(self) -> None:
        """Say what came out, and what to do with it."""
        lines = self.results()
        for line in lines:
            self.say(line)
        self.report(*lines)
        self.say(f"the result is in {self.folder / 'final'}, all about the run in {self.folder / 'report.html'}; next:\n")
        chat = "python generate/chat.py" if Path("generate/chat.py").is_file() else "litft chat"
        kind = "" if self.args.quantize == "none" else f" --quantize {self.args.quantize}"
        self.say(f"  {chat} --checkpoint_dir {self.folder / 'final'}{kind}")

    def results(self) -> list[str]:
        """The scores before and after, and what it cost."""
        validation, lines = self.validation, []
        scores = (("validation loss", "{:.4f}", validation.losses), ("exact match", "{:.1%}", validation.matches))
        for name, form, values in scores:
            if values:
                lines.append(f"{name}: {form.format(values[min(values)])} -> {form.format(values[max(values)])}")
        if self.args.save.best and validation.best is not None:
            lines.append(f"lowest at step {validation.best}, {validation.losses[validation.best]:.4f}, which is in best/")
        return [*lines, f"{self.metrics.seconds:.0f} s of training, {self.metrics.summary(self.fabric.device)}"]

    def report(self, *lines: str) -> None:
        """Write report.html."""
        report = Report(
            title=f"{self.method.title} on {self.source.folder.name}",
            summary=lines,
            setup=self.headline,
            machine=machine_lines(self.fabric.device, self.fabric.world_size),
            lengths=histogram(self.data.train.lengths),
            answers=self.validation.answers,
        )
        write_report(self.folder, report)

    def say(self, line: str) -> None:
        """Put a line on the screen, above the bar where there is one."""
        if self.main and sys.stderr.isatty():
            tqdm.write(line)
        elif self.main:
            print(line, flush=True)
