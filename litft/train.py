"""Fine-tuning: from the flags to a run's folder, and the one loop that all methods and strategies share."""

import dataclasses
import math
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm import tqdm

from litft import checkpoint, runs
from litft.args import FinetuneArgs, TrainArgs, seconds
from litft.data.load import Data, load_data
from litft.data.samples import Sample
from litft.data.steps import MicroBatch, collate
from litft.evaluate import Validation
from litft.flops import Flops, peak_flops
from litft.folder import DEMO, base_record, copy_tokenizer, resolve
from litft.job import Job
from litft.loggers import check_logger, finish, make_logger, row_sink
from litft.metrics import Metrics, Row
from litft.optim import OPTIMIZERS, averaged, make_optimizer, set_rate
from litft.parallel import HostGroup, is_out_of_memory, machine_lines, make_fabric
from litft.preview import Preview, dry_run, duration, histogram
from litft.quantize import bitsandbytes
from litft.report import Report, write_report
from litft.result import Result, write_result
from litft.signals import Signals
from litft.weights import SHARD_BYTES

PATIENCE = 10  # steps in a row that --train.skip_nan leaves out before the run ends all the same
EXPLODED = 3  # times the loss of the first step, or of guessing: nothing comes back from there


class Outcome(NamedTuple):
    """A finished run: its folder, and the newest value of every column of its metrics.csv."""

    folder: Path
    metrics: Row


def finetune(args: FinetuneArgs, callback: Callable[[Row], None] | None = None) -> Outcome | None:
    """Train as `args` say; of a dry run nothing is returned.

    callback: gets every row of metrics.csv when it is written, in the first process. ValueError for whatever the user can
    mend, `runs.Stopped` where a signal ended the run with its state saved.
    """
    if problems := args.problems():
        raise ValueError("\n".join(problems))
    if args.checkpoint_dir is None:
        args = replace(args, checkpoint_dir=str(DEMO / "base"), data=replace(args.data, path=[str(DEMO)]))
    named = runs.named(args.out_dir, args.resume)
    if named:
        inputs = (args.checkpoint_dir, args.base_dir, *args.data.path, args.data.val_path, args.data.template)
        runs.check(named, args.resume, args.overwrite, inputs)
    source = resolve(args.checkpoint_dir, args.base_dir)
    source.check()
    job = Job(args, source)
    if job.quantize != "none":
        bitsandbytes()  # where it is missing, that is said before the data is read
    check_logger(args.logger)
    source.check_length("--data.max_seq_length", args.data.max_seq_length)
    data = load_data(args.data, job.tokenizer, job.method.vocab_size(source.config), source.config.context)
    for flag, given in (("--eval.patience", args.eval.patience), ("--save.best", args.save.best)):
        if given and not len(data.val):
            raise ValueError(f"{flag} goes by the validation loss, and nothing is held out; give --data.val_path")
    if job.tokenizer.tells_date:  # a resumed run goes on with its first day
        args = replace(args, data=replace(args.data, date=job.tokenizer.day))
    if args.dry_run:
        dry_run(args, job, data)
        return None
    fabric = make_fabric(args)
    fabric.launch()
    # the first process makes the folder; all have looked at what was there before any gets here
    chosen = str(named or runs.claim(job.method.title)) if fabric.global_rank == 0 else None
    folder = Path(fabric.broadcast(chosen))
    run = Run(args, fabric, job, data, folder)
    run.metrics.sinks += [callback] if callback else []
    run.train()
    return Outcome(folder, run.metrics.newest)


def learning_rate(train: TrainArgs, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of `steps`: a linear rise over the warm-up, then the schedule's fall."""
    warmup = round(train.warmup_fraction * steps)
    if step < warmup:
        return train.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    tail = round(train.decay_fraction * steps)
    fall = {
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "linear": 1 - progress,
        "constant": 1.0,
        "wsd": 1 - math.sqrt(max(0, step - steps + tail) / max(1, tail)),  # arXiv 2405.18392
    }[train.lr_schedule]
    return train.learning_rate * (train.min_lr_ratio + (1 - train.min_lr_ratio) * fall)


def accumulate(fabric: Fabric, model: nn.Module, batches: list[MicroBatch], count: int) -> Tensor:
    """Add to the gradients those of the mean loss over `count` targets, all ranks' together, and return that loss.

    The sum over this rank's micro-batches is divided by the count over *all*; DDP averages over ranks, hence the factor.
    """
    total = torch.zeros((), device=fabric.device)
    for number, batch in enumerate(batches, 1):
        batch = batch.to(fabric.device)
        synced = fabric.world_size == 1 or number == len(batches)
        with fabric.no_backward_sync(model, enabled=not synced):
            loss, _ = model(batch.tokens, **batch.inputs())
            fabric.backward(loss * (fabric.world_size / count))
        total += loss.detach()
    return fabric.all_reduce(total, reduce_op="sum") / count


class Run:
    """One fine-tuning run on one process of it."""

    def __init__(self, args: FinetuneArgs, fabric: Fabric, job: Job, data: Data, folder: Path) -> None:
        self.args, self.fabric, self.job, self.data = args, fabric, job, data
        self.source, self.tokenizer, self.method = job.source, job.tokenizer, job.method
        self.folder, self.main = folder, fabric.global_rank == 0
        self.hosts = HostGroup(fabric.world_size)
        self.precision = job.precision(fabric.device)
        self.model, self.parameters = job.build(self.precision, fabric.device)
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.peak = peak_flops(fabric.device, self.precision)
        self.metrics = Metrics(folder / "metrics.csv" if self.main else None, self.peak and self.peak * fabric.world_size)
        self.preview = Preview(args, data, job.tokenizer, fabric.world_size)
        self.steps = self.preview.steps
        self.validation = Validation(fabric, self.model, job.tokenizer, data, args.eval, folder / "samples.jsonl")
        self.logger: Any = None
        self.logged_as: str | None = None  # what a logger called the run that goes on
        self.limit = seconds(args.train.max_time or "") or math.inf
        self.begun, self.elapsed, self.clock = 0, 0.0, time.monotonic()  # elapsed: as all processes see it
        self.left_out = 0  # steps in a row

    def train(self) -> None:
        """Prepare the folder, run the steps, leave the result; ValueError where memory does not suffice."""
        try:
            self._train()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise ValueError(self._too_large(str(error))) from None
        except OSError as error:
            newest = checkpoint.newest(self.folder)
            kept = f"{newest} is whole: --resume goes on from there" if newest else "no checkpoint was written before"
            raise OSError(error.errno, f"{error.strerror or error}; {kept}", error.filename) from None

    def _train(self) -> None:
        optimizer = make_optimizer(self.args.train, self.method, self.trained)
        damaged = self._resume(optimizer)
        self.fabric.barrier()
        if self.main:
            self._open_folder()
        self.metrics.before = self.fabric.broadcast(self.metrics.before)  # whatever goes by it, all processes do alike
        self.validation.go_on(self.metrics.before)
        model, optimizer = self.fabric.setup(self.model, optimizer)
        if self.main:
            self._say("\n".join([*damaged, self._headline()]))
        self._fit(model, optimizer)
        if self.begun == 0:
            self._evaluate(optimizer, 0, final=True)
        done = self._loop(model, optimizer)
        self._evaluate(optimizer, done, final=True)
        self._flush(done)
        if done > self.begun:
            self._save(optimizer, done)
        if self.main:
            with averaged(optimizer):
                self._write("final")
                self._finish()
        self.fabric.barrier()

    def _loop(self, model: nn.Module, optimizer: Optimizer) -> int:
        """Steps until one of the limits, or a signal; returns how many are done."""
        args, done = self.args, self.begun
        log_interval = args.train.log_interval or (1 if self.fabric.device.type == "cpu" else 10)
        flops, started = Flops(self.model), time.monotonic()
        bar = tqdm(total=self.steps, initial=done, unit="step", disable=not (self.main and sys.stderr.isatty()))
        with Signals() as signals, bar:
            while not (ended := self._ending(done)):
                self._advance(model, optimizer, done, flops)
                done += 1
                bar.update()
                if _due(args.eval.interval, done) and done < self.steps:
                    self._evaluate(optimizer, done)
                caught, self.elapsed = self.hosts.most(signals.caught, time.monotonic() - self.clock)
                if self._ending(done):
                    continue  # saved when it has been evaluated
                saving = caught or _due(args.save.interval, done)
                if saving or done % log_interval == 0:
                    self._flush(done, (time.monotonic() - started) / (done - self.begun))
                if saving:
                    self._save(optimizer, done)
                if caught:
                    stopped = runs.Stopped(int(caught), done, self.folder)
                    if self.main:
                        self._report(str(stopped))
                    raise stopped
        if done < self.steps:
            self._say(f"step {done}: {ended}")
        return done

    def _ending(self, done: int) -> str | None:
        """Why the run ends after `done` steps; None: it does not."""
        patience = self.args.eval.patience
        if done >= self.steps:
            return "all steps are done"
        if self.elapsed >= self.limit:
            return f"--train.max_time {self.args.train.max_time} is over"
        if patience and self.validation.stale >= patience:
            return f"the validation loss was lowest at step {self.validation.best}, {patience} validations ago"
        return None

    def _advance(self, model: nn.Module, optimizer: Optimizer, step: int, flops: Flops) -> None:
        """One step and its row."""
        metrics, size = self.metrics, self.args.train.global_batch_size
        metrics.start()
        samples = [self.data.train[number] for number in self.preview.of_step(step)]
        rate = learning_rate(self.args.train, step, self._projected(step))
        loss, norm = self._step(model, optimizer, samples, step, rate)
        metrics.stop()
        seen = min((step + 1) * size, self.preview.samples)
        metrics.add(
            step=step + 1,
            epoch=seen / self.preview.order.size,
            samples=seen,
            tokens=sum(sample.tokens.numel() for sample in samples),
            flops=flops(samples),
            loss=loss,
            learning_rate=rate,
            grad_norm=norm,
        )

    def _projected(self, step: int) -> int:
        """How many steps there will be; with a limit of time, as many as the pace so far allows for."""
        if self.limit == math.inf or not step:
            return self.steps
        return min(self.steps, max(step + 1, round(step * self.limit / max(self.elapsed, 1e-9))))

    def _step(
        self, model: nn.Module, optimizer: Optimizer, samples: list[Sample], step: int, rate: float
    ) -> tuple[Tensor, Tensor]:
        """One optimizer step over `samples`; returns the mean loss a token before it, and the gradient's norm."""
        # dropout's state is a function of the step and the rank: a resumed run draws what an uninterrupted one would
        seed = (self.args.seed * 1_000_003 + step) * 4099
        model.train()
        loss = self._gradients(model, optimizer, samples, seed + self.fabric.global_rank)
        limit = self.args.train.max_grad_norm or math.inf
        norm = nn.utils.clip_grad_norm_(self.trained.values(), limit)
        if self.args.train.skip_nan and not math.isfinite(float(loss) + float(norm)):
            self._leave_out(step)
        else:
            self.left_out = 0
            set_rate(optimizer, rate)
            torch.manual_seed(seed)  # what an optimizer rounds by chance, every rank rounds alike
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss, norm

    def _gradients(self, model: nn.Module, optimizer: Optimizer, samples: list[Sample], seed: int) -> Tensor:
        """Those of the samples' mean loss a token, which is returned; in smaller micro-batches where memory asks for it."""
        while True:
            try:
                torch.manual_seed(seed)
                batches = self.preview.layout.batches(samples, self.fabric.global_rank)
                self.metrics.data_ready()
                return accumulate(self.fabric, model, batches, sum(sample.supervised for sample in samples))
            except RuntimeError as error:
                # of several processes the others are waiting in a collective: there _fit alone can mend it
                if not (self.args.train.oom_retry and self.fabric.world_size == 1 and is_out_of_memory(error)):
                    raise
                reason = str(error)
            optimizer.zero_grad(set_to_none=True)
            self._halve(reason)

    def _leave_out(self, step: int) -> None:
        """Say which samples a step would have learned from; ValueError where that happens again and again."""
        self.left_out += 1
        if self.left_out >= PATIENCE:
            raise ValueError(f"step {step + 1}: {PATIENCE} steps in a row are not finite; lower --train.learning_rate")
        examples = ", ".join(map(str, self.preview.of_step(step)))
        self._say(f"step {step + 1} is left out: its loss or gradient is not finite; its training examples: {examples}")

    def _fit(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Run the largest micro-batch of the whole run, beside the optimizer's state: what does not fit is told now."""
        while True:
            reason = None
            try:
                self._probe(model)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error)
            optimizer.zero_grad(set_to_none=True)
            if not any(self.hosts.most(float(reason is not None))):
                return
            self._halve(reason or "in another process")

    def _probe(self, model: nn.Module) -> None:
        rows = [[self.data.train[number] for number in row] for row in self.preview.heaviest]
        batch = collate(rows).to(self.fabric.device)
        held, passes = 0.0, 1
        if self.fabric.device.type == "cuda":
            make = OPTIMIZERS[self.args.train.optimizer]
            held = 0 if self.begun else sum(make.state(name, p) for name, p in self.trained.items())
            passes += self.preview.shape().accumulated
        state = torch.empty(round(held), dtype=torch.uint8, device=self.fabric.device)
        model.train()
        with self.fabric.no_backward_sync(model, enabled=self.fabric.world_size > 1):
            for _ in range(passes):
                self.fabric.backward(model(batch.tokens, **batch.inputs())[0])
        del state

    def _halve(self, reason: str) -> None:
        """Lay the steps out in micro-batches of half the size; ValueError where that is not asked for, or not possible."""
        before = self.preview.layout
        after = before.halved(int(self.data.train.lengths.max()))
        if after is None or not self.args.train.oom_retry:
            raise ValueError(self._too_large(reason))
        if self.fabric.device.type == "cuda":
            torch.cuda.empty_cache()
        shape = self.preview.shape()
        self.preview.lay_out(after)
        self._say(f"micro-batches of up to {shape} do not fit into memory; going on with {self.preview.shape()}")

    def _too_large(self, reason: str) -> str:
        number, tokens = self.preview.longest()
        what = f"micro-batches of up to {self.preview.shape()} do not fit into {self.fabric.device}'s memory"
        remedies = ["lower --data.max_seq_length", "lower --train.micro_batch_size"]
        remedies += [] if self.method.whole or self.job.quantize != "none" else ["choose --quantize nf4"]
        remedies += [] if self.args.train.oom_retry else ["add --train.oom_retry"]
        longest = f"the longest row has training example {number} with its {tokens:,} tokens"
        return f"{what} ({reason.split('. ')[0][:200]}); {longest}; {', or '.join(remedies)}"

    def _evaluate(self, optimizer: Optimizer, step: int, final: bool = False) -> None:
        """Put the validation's scores into the row of `step`, show the answers, keep the best."""
        validation, size = self.validation, self.args.train.global_batch_size
        asked = any(item["step"] == step for item in validation.answers)
        scored = step in validation.losses and not (final and self.args.eval.exact_match and step not in validation.matches)
        self.metrics.settle(self.fabric.device)
        with averaged(optimizer):
            if len(self.data.val) and not scored:
                values = validation.measure(step, self.preview.layout, size, final)
                if not math.isfinite(values["val_loss"]):
                    raise ValueError(self._not_finite(step, "validation loss", values["val_loss"]))
                self.metrics.note(step, **values)
                line = f"step {step}: validation loss {values['val_loss']:.4f}, perplexity {values['val_perplexity']:.4g}"
                if "exact_match" in values:
                    line += f", exact match {values['exact_match']:.1%} of {len(self.data.val)}"
                self._say(line)
            for item in [] if asked else validation.ask(step):
                self._say(f"  {_one_line(item['prompt'])}\n  -> {_one_line(item['answer'])}")
            if self.main and self.args.save.best and step and validation.best == step and not asked:
                self._write("best")

    def _flush(self, done: int, pace: float | None = None) -> None:
        """Write the rows of the steps until now, and look at them; pace: seconds a step, of which a line tells."""
        for row in self.metrics.flush(self.fabric.device):
            self._check(row)
        if pace is not None:
            left = max(0.0, min(pace * (self._projected(done) - done), self.limit - self.elapsed))
            self._say(f"step {done}/{self.steps}: {self.metrics.line()}, {duration(left)} left")

    def _check(self, row: Row) -> None:
        """ValueError where the run has diverged: nothing of it is saved after that."""
        if "loss" not in row:
            return
        step, skips = int(row["step"]), self.args.train.skip_nan
        for column, name in (("loss", "loss"), ("grad_norm", "gradient's norm")):
            if not math.isfinite(row[column]) and not skips:
                raise ValueError(self._not_finite(step, name, row[column]))
        first = self.metrics.first["loss"]
        if row["loss"] > EXPLODED * max(math.log(self.source.config.vocab_size), first):
            raise ValueError(self._not_finite(step, "loss", row["loss"], f" and was {first:.3g}"))

    def _not_finite(self, step: int, name: str, value: float, more: str = "") -> str:
        remedy = "lower --train.learning_rate" if step else "look for NaN or infinity in its weights and config.json"
        examples = ", ".join(map(str, self.preview.of_step(step - 1))) if step and "validation" not in name else ""
        whose = f"; the step's training examples: {examples} (--train.skip_nan leaves such steps out)" if examples else ""
        return f"step {step}: the {name} is {value:.4g}{more}, so nothing more can be learned; {remedy}{whose}"

    def _save(self, optimizer: Optimizer, done: int) -> None:
        progress = {
            "samples": min(done * self.args.train.global_batch_size, self.preview.samples),
            "elapsed": self.elapsed,
            "identity": self._identity(),
            "tokenizer": self.tokenizer.choices(),
            "logger": self.logger.version if self.logger else None,
        }
        checkpoint.save(self.fabric, self.folder, done, self.parameters, optimizer, progress)
        if self.main:
            checkpoint.prune(self.folder, self.args.save.keep_last)

    def _open_folder(self) -> None:
        """Make the run's folder and say in it how the run began; what lies beyond the steps begun with never happened."""
        if self.args.overwrite:
            runs.clear(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        stored = dataclasses.asdict(self.args)
        for name in ("out_dir", "resume", "overwrite"):
            stored.pop(name)
        runs.write_config(self.folder, self.method.title, yaml.safe_dump(stored, sort_keys=False))
        self.metrics.cut(self.begun or -1)
        checkpoint.cut(self.folder, self.begun)
        self.logger = make_logger(self.args.logger, self.folder, stored, self.begun, self.logged_as)
        if self.logger:
            self.metrics.sinks.append(row_sink(self.logger, self._say))

    def _resume(self, optimizer: Optimizer) -> list[str]:
        """Continue from the newest whole checkpoint if asked to; returns what is wrong with newer ones."""
        if not self.args.resume:
            return []
        progress, damaged = checkpoint.restore_newest(self.folder, self._identity(), self.parameters, optimizer)
        if progress is None:
            return []
        self.begun = progress["step"]
        if self.begun > self.steps:
            newest = f"{self.folder}/checkpoints/step-{self.begun:06d}"
            raise ValueError(f"{newest} is beyond the run's {self.steps} steps; raise --train.max_steps or --train.epochs")
        self.elapsed, self.logged_as = progress["elapsed"], progress["logger"]
        self.clock -= self.elapsed
        return [f"warning: {reason}; the checkpoint before it is taken" for reason in damaged]

    def _identity(self) -> dict[str, Any]:
        """What a run must share with the one it continues, or it would silently be another."""
        own = {"seed": self.args.seed, "precision": self.precision, "training data": self.data.digest}
        return self.job.identity() | own

    def _headline(self) -> str:
        lines = [*self.preview.lines(), *self.preview.plan_lines(self.job, self.precision, self.fabric.device, self.peak)]
        if self.source.adapter:
            lines.append("going on with this adapter: ranks, targets and tokens are its own")
            lines += filter(None, [self.source.another_quantization(self.job.quantize)])
        if tokens := self.job.untrained_tokens(self.model, self.data.special):
            remedy = f"--data.new_tokens '{','.join(tokens)}' trains them"
            lines.append(f"warning: the embeddings of the template's {', '.join(tokens)} look untrained; {remedy}")
        if self.begun == self.steps:
            lines.append(f"all {self.begun} steps are done; final/ is written again")
        elif self.begun:
            lines.append(f"continuing after step {self.begun}")
        elif self.args.resume:
            lines.append("no checkpoint to continue from; beginning at step 0")
        return "\n".join(lines)

    def _write(self, name: str) -> None:
        """A folder to open, under its name only when complete."""
        partial, folder = self.folder / f"{name}.partial", self.folder / name
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        values = self.method.values(self.model)
        if self.method.whole:
            write_result(partial, self.source, self.source.dtype(None), Result(self.method, values), SHARD_BYTES / 1e9)
        else:
            own = {"quantize": self.job.quantize, "precision": self.precision}
            record = base_record(self.source, folder)
            self.method.write(partial, self.source, values, record | {"litft": record["litft"] | own})
        copy_tokenizer(self.tokenizer, partial)
        runs.put_in_place(partial, folder)

    def _finish(self) -> None:
        """Say what came out, and what to do with it."""
        lines = self._results()
        for line in lines:
            self._say(line)
        self._report(*lines)
        if self.logger:
            finish(self.logger)
        self._say(f"the result is in {self.folder / 'final'}, all about the run in {self.folder / 'report.html'}; next:\n")
        chat = "python generate/chat.py" if Path("generate/chat.py").is_file() else "litft chat"
        kind = "" if self.args.quantize == "none" else f" --quantize {self.args.quantize}"
        self._say(f"  {chat} --checkpoint_dir {self.folder / 'final'}{kind}")

    def _results(self) -> list[str]:
        """The scores before and after, and what it cost."""
        validation, lines = self.validation, []
        scores = (("validation loss", "{:.4f}", validation.losses), ("exact match", "{:.1%}", validation.matches))
        for name, form, values in scores:
            if values:
                lines.append(f"{name}: {form.format(values[min(values)])} -> {form.format(values[max(values)])}")
        if self.args.save.best and validation.best is not None:
            lines.append(f"lowest at step {validation.best}, {validation.losses[validation.best]:.4f}, which is in best/")
        return [*lines, f"{self.metrics.seconds:.0f} s of training, {self.metrics.summary(self.fabric.device)}"]

    def _report(self, *lines: str) -> None:
        """Write report.html."""
        report = Report(
            title=f"{self.method.title} on {self.source.folder.name}",
            summary=lines,
            setup=self._headline().splitlines(),
            machine=machine_lines(self.fabric.device, self.fabric.world_size),
            lengths=histogram(self.data.train.lengths),
            answers=self.validation.answers,
        )
        write_report(self.folder, report)

    def _say(self, line: str) -> None:
        if self.main and sys.stderr.isatty():
            tqdm.write(line)  # above the bar
        elif self.main:
            print(line, flush=True)


def _one_line(text: str, width: int = 100) -> str:
    """The end of a text, for the screen."""
    text = " ".join(text.split())
    return text if len(text) <= width else f"...{text[-width:]}"


def _due(interval: int, done: int) -> bool:
    """Whether an interval ends after so many steps; 0: never."""
    return bool(interval) and done % interval == 0
