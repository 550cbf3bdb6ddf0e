"""Fine-tuning: from the flags to a run's folder, and the one loop that all methods and strategies share."""

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm import tqdm

import litft
from litft import run_dir
from litft.args import FinetuneArgs, TrainArgs, seconds
from litft.args.finetune import as_started
from litft.args.processes import launch_id
from litft.checkpoints.hub import fetch, hub_id, pinned_data
from litft.data.dataset import load_data
from litft.data.encoder import Sample
from litft.data.packing import MicroBatch
from litft.data.sources import hub_data
from litft.distributed.devices import check_devices, is_out_of_memory, make_fabric, pick_accelerator
from litft.distributed.process_group import end_children, launch, peer_failure, sync_gradients
from litft.errors import Interrupted, RankError, summary
from litft.model.placement import full_tensor, local
from litft.model.quantization import bitsandbytes
from litft.pretrained import DEMO, resolve
from litft.signals import Signals
from litft.training.compile import as_written, is_compiled, run_uncompiled
from litft.training.dry_run import dry_run, duration
from litft.training.flops import Flops
from litft.training.loggers import check_logger, finish
from litft.training.metrics import Row
from litft.training.optimizers import averaged, make_optimizer, set_rate, state_bytes
from litft.training.recorder import Run
from litft.training.remedies import remedies
from litft.training.residence import residence
from litft.training.schedule import Schedule
from litft.training.settings import Settings, choose
from litft.training.setup import Setup

MOST_LEFT_OUT = 10  # steps in a row that --train.skip_nan leaves out before the run ends all the same
EXPLODED = 3  # times the loss of the first step, or of guessing: nothing comes back from there


def pinned(args: FinetuneArgs) -> FinetuneArgs:
    """The same, what is of the hub with the commits that it means now: config.yaml says which they were."""
    folders = {name: hub_id(getattr(args, name) or "") for name in ("checkpoint_dir", "base_dir")}
    found = {name: str(fetch(wanted)[1]) for name, wanted in folders.items() if wanted}
    data = [str(pinned_data(wanted)) if (wanted := hub_data(path)) else path for path in args.data.path]
    return replace(args, **found, data=replace(args.data, path=data))


class Outcome(NamedTuple):
    """A finished run: its folder, and the newest value of every column of its metrics.csv."""

    folder: Path
    metrics: Row


def finetune(args: FinetuneArgs, callback: Callable[[Row], None] | None = None) -> Outcome | None:
    """Train as `args` say; of a dry run nothing is returned.

    callback: gets every row of metrics.csv when it is written, in the first process. ValueError for whatever the user can
    mend, `Interrupted` where a signal ended the run with its state saved.
    """
    args = as_started(args)
    if problems := args.problems():
        raise ValueError("\n".join(problems))
    if args.checkpoint_dir is None:
        args = replace(args, checkpoint_dir=str(DEMO / "base"), data=replace(args.data, path=[str(DEMO)]))
    args = pinned(args)
    named = run_dir.named(args.out_dir, args.resume)
    if run_dir.begun_by(named, launch_id()):  # of several nodes torchrun tells only the one where a process has died
        args = replace(args, resume=True, overwrite=False)
    if named:
        inputs = (args.checkpoint_dir, args.base_dir, *args.data.path, args.data.val_path, args.data.template)
        run_dir.check(named, args.resume, args.overwrite, inputs)
    setup, schedule, settings = prepared(args)
    if args.dry_run:
        dry_run(setup, schedule, settings)
        return None
    fabric = make_fabric(args, settings.strategy)
    hosts = launch(fabric, args.timeout)
    # the first process makes the folder; all have looked at what was there before any gets here
    chosen = str(named or run_dir.claim(setup.method.title)) if fabric.global_rank == 0 else None
    folder = Path(fabric.broadcast(chosen))
    if any(hosts.all_reduce_max(args.resume)):
        setup.args = replace(setup.args, resume=True, overwrite=False)
    hosts.check_equal(facts(setup, schedule, settings))
    run = Training(fabric, hosts, setup, schedule, settings, folder)
    run.metrics.sinks += [callback] if callback else []
    run.train()
    return Outcome(folder, run.metrics.newest)


def prepared(args: FinetuneArgs) -> tuple[Setup, Schedule, Settings]:
    """What is known before the processes meet: the method, the data, the plan. No weight is read; ValueError."""
    source = resolve(args.checkpoint_dir, args.base_dir)
    source.check()
    setup = Setup(args, source)
    if setup.quantize != "none":
        bitsandbytes()  # where it is missing, that is said before the data is read
    device, offload = torch.device(pick_accelerator(args.accelerator)), args.train.cpu_offload
    check_devices(device.type, args.devices)
    if offload != "none" and device.type == "cpu":
        raise ValueError(f"--train.cpu_offload {offload}: without a GPU all is in the host's memory; leave it out")
    one, full = args.devices * args.num_nodes == 1, setup.method.name == "full"
    if one and offload == "parameters" and (setup.quantize != "none" or full):
        reason = "what is trained stays on the GPU" if full else "quantized weights stay on the GPU"
        raise ValueError(f"--train.cpu_offload parameters: {reason}; leave it out")
    check_logger(args.logger)
    source.check_length("--data.max_seq_length", args.data.max_seq_length)
    known, context = setup.method.vocab_size(source.config), source.config.max_positions
    data = load_data(args.data, setup.tokenizer, known, context, seconds(args.timeout))
    for flag, given in (("--eval.patience", args.eval.patience), ("--save.best", args.save.best)):
        if given and not len(data.val):
            reason = "it goes by the validation loss, and nothing is held out"
            raise ValueError(f"{flag}: {reason}; give --data.val_fraction or val_path")
    if setup.tokenizer.tells_date:  # a resumed run goes on with its first day
        setup.args = replace(args, data=replace(args.data, date=setup.tokenizer.day))
    schedule = Schedule(setup.args, data, args.devices * args.num_nodes)
    return setup, schedule, choose(setup, schedule, device)


def facts(setup: Setup, schedule: Schedule, settings: Settings) -> dict[str, Any]:
    """What all processes of a run must share."""
    groups = {name: value if isinstance(value, dict) else {"": value} for name, value in asdict(setup.args).items()}
    flags = {f"--{name}.{key}".rstrip("."): value for name, group in groups.items() for key, value in group.items()}
    versions = {"torch": torch.__version__, "litft": litft.__version__}
    own = {"strategy": settings.strategy, "recomputation": settings.recomputed, "rows": schedule.layout.rows}
    data = {"training data": schedule.data.digest, "validation data": schedule.data.held_out}
    return {**versions, **own, **data, **setup.identity(), **flags}


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
        with sync_gradients(fabric, model, last=number == len(batches)):
            loss, _ = model(batch.tokens, **batch.inputs())
            fabric.backward(loss * (fabric.world_size / count))
        total += loss.detach()
    return fabric.all_reduce(total, reduce_op="sum") / count


class Paused(Exception):
    """A signal was caught, in this process or another."""

    def __init__(self, number: int) -> None:
        self.number = number


class Training(Run):
    """A run's steps, on every process alike."""

    left_out = 0  # steps in a row, by --train.skip_nan
    signals: Signals
    started = 0.0  # what `elapsed` was before the first step of this process

    def train(self) -> None:
        """Prepare the folder, run the steps, leave the result; ValueError where memory does not suffice."""
        status = "failed"
        try:
            with Signals() as self.signals:
                self._train()
            status = "success"
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise RankError(self._too_large(str(error))) from None
            if self.fabric.world_size > 1 and (reason := peer_failure(error, self.args.timeout)):
                end_children(self.fabric)
                raise RankError(f"{reason}; {self.kept()}") from None
            raise
        except OSError as error:
            free = f"{shutil.disk_usage(self.folder).free / 2**20:,.0f} MiB are free there" if self.folder.is_dir() else ""
            reason = "; ".join(filter(None, [error.strerror or str(error), free, self.kept()]))
            raise OSError(error.errno, reason, error.filename) from None
        finally:
            if self.logger:
                finish(self.logger, status, self.say)

    def _train(self) -> None:
        optimizer = make_optimizer(self.args.train, self.method, self.trained)
        damaged = self.resume(optimizer)
        self.hosts.check_equal({"step to go on from": self.start_step})  # and all have read what is there
        if self.main:
            self.open_folder()
        self.fabric.barrier()
        self.check_folder()
        self.metrics.before = self.fabric.broadcast(self.metrics.before)  # whatever goes by it, all processes do alike
        self.validation.go_on(self.metrics.before)
        model, optimizer = self.fabric.setup(self.model, optimizer, move_to_device=not self.on_host)
        if self.main:
            self.say("\n".join([*damaged, *self.headline]))
        self._fit(model, optimizer)
        done = self.start_step
        try:
            self.validation.pause = self._pause
            if done == 0 or _due(self.args.eval.interval, done):  # it may have been interrupted
                self._evaluate(optimizer, done, final=done == 0)
            for done in self._steps(model, optimizer):  # noqa: B007
                self._pause()
            self._evaluate(optimizer, done, final=True)
        except Paused as paused:
            self._stop(optimizer, done, paused.number)
        self._keep(optimizer, done)
        if self.main:
            self.place_best(done)
        with averaged(optimizer):
            self.write("final")
        if self.main:
            self.finish()
        self.fabric.barrier()

    def _pause(self) -> None:
        """Paused in every process where one has caught a signal: at the end of a step, and within a validation."""
        caught, self.elapsed = self.hosts.all_reduce_max(self.signals.caught, time.monotonic() - self.clock)
        if caught:
            raise Paused(int(caught))

    def _stop(self, optimizer: Optimizer, done: int, number: int) -> None:
        """End with the state saved."""
        self._keep(optimizer, done)
        stopped = Interrupted(number, done, self.folder)
        if self.main and done:
            self.report(str(stopped))
        raise stopped

    def _keep(self, optimizer: Optimizer, done: int) -> None:
        """Write the rows and the state of a run that goes no further."""
        if self.metrics.rows:
            self._flush(done, pace=0.0)
        self.saver.finish()
        if done > self.start_step and self.saver.saved != done:
            self.save(optimizer, done)
            self.saver.finish()

    def _steps(self, model: nn.Module, optimizer: Optimizer) -> Iterator[int]:
        """Make steps until one of the limits; after each, how many are done."""
        args, done = self.args, self.start_step
        log_interval = args.train.log_interval or (1 if self.fabric.device.type == "cpu" else 10)
        flops = Flops(self.model)
        (self.started,) = self.hosts.all_reduce_max(time.monotonic() - self.clock)
        with tqdm(total=self.steps, initial=done, unit="step", disable=not (self.main and sys.stderr.isatty())) as bar:
            while not (ended := self._ending(done)):
                self._advance(model, optimizer, done, flops)
                done += 1
                bar.update()
                self.saver.poll()
                yield done
                if _due(args.eval.interval, done) and done < self.steps:
                    self._evaluate(optimizer, done)
                if self._ending(done):
                    continue  # saved when it has been evaluated
                saving = _due(args.save.interval, done)
                if saving or done % log_interval == 0:
                    self._flush(done, (self.elapsed - self.started) / (done - self.start_step))
                if saving:
                    self.save(optimizer, done)
        if done < self.steps:
            self.say(f"step {done}: {ended}")

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
        metrics = self.metrics
        metrics.start()
        samples = [self.data.train[number] for number in self.schedule.step_indices(step)]
        rate = learning_rate(self.args.train, step, self._projected(step))
        loss, norm = self._step(model, optimizer, samples, step, rate)
        metrics.stop()
        seen = self.schedule.seen(step + 1)
        metrics.add(
            step=step + 1,
            epoch=seen / self.schedule.order.size,
            samples=seen,
            tokens=sum(sample.tokens.numel() for sample in samples),
            flops=flops(samples),
            loss=loss,
            learning_rate=rate,
            grad_norm=norm,
        )

    def _projected(self, step: int) -> int:
        """How many steps there will be; with a limit of time, as many as the pace so far allows for."""
        if self.limit == math.inf or step == self.start_step == 0:
            return self.steps
        began, first = (self.started, self.start_step) if step > self.start_step else (0.0, 0)
        pace = max(1e-9, (self.elapsed - began) / (step - first))
        return min(self.steps, max(step + 1, step + round((self.limit - self.elapsed) / pace)))

    def _step(
        self, model: nn.Module, optimizer: Optimizer, samples: list[Sample], step: int, rate: float
    ) -> tuple[Tensor, Tensor]:
        """One optimizer step over `samples`; returns the mean loss a token before it, and the gradient's norm."""
        # dropout's state is a function of the step and the rank: a resumed run draws what an uninterrupted one would
        seed = (self.args.seed * 1_000_003 + step) * 4099
        model.train()
        set_rate(optimizer, rate)
        if self.args.train.optimizer_in_backward:
            with optimizer.optimizer.stepping():
                loss = self._gradients(model, optimizer, samples, seed)
            return loss, optimizer.optimizer.norm()
        loss = self._gradients(model, optimizer, samples, seed + self.fabric.global_rank)
        limit = self.args.train.max_grad_norm or math.inf
        norm = full_tensor(nn.utils.clip_grad_norm_(self.trained.values(), limit))
        if self.args.train.skip_nan and not math.isfinite(float(loss) + float(norm)):
            self._leave_out(step)
        else:
            self.left_out = 0
            # what an optimizer rounds by chance, all who hold the same round alike
            torch.manual_seed(seed + (self.mesh.get_local_rank("shard") if self.mesh else 0))
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss, norm

    def _gradients(self, model: nn.Module, optimizer: Optimizer, samples: list[Sample], seed: int) -> Tensor:
        """Those of the samples' mean loss a token, which is returned; in smaller micro-batches where memory asks for it."""
        while True:
            try:
                torch.manual_seed(seed)
                batches = self.schedule.layout.batches(samples, self.fabric.global_rank)
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
        if self.left_out >= MOST_LEFT_OUT:
            raise ValueError(f"step {step + 1}: {MOST_LEFT_OUT} steps in a row are not finite; {self._slower()}")
        examples = ", ".join(map(str, self.schedule.step_indices(step)))
        self.say(f"step {step + 1} is left out: its loss or gradient is not finite; its training examples: {examples}")

    def _evaluate(self, optimizer: Optimizer, step: int, final: bool = False) -> None:
        """Put the validation's scores into the row of `step`, show the answers, keep the best."""
        validation, size = self.validation, self.args.train.global_batch_size
        asked = any(item["step"] == step for item in validation.answers)
        scored = step in validation.losses and not (final and self.args.eval.exact_match and step not in validation.matches)
        self.metrics.settle(self.fabric.device)
        with averaged(optimizer), as_written():
            if len(self.data.val) and not scored:
                values = validation.measure(step, self.schedule.layout, size, final)
                if not math.isfinite(values["val_loss"]):
                    raise ValueError(self._not_finite(step, "validation loss", values["val_loss"]))
                self.metrics.note(step, **values)
                line = f"step {step}: validation loss {values['val_loss']:.4f}, perplexity {values['val_perplexity']:.4g}"
                if "exact_match" in values:
                    line += f", exact match {values['exact_match']:.1%} of {validation.asked}"
                elif final and self.args.eval.exact_match:
                    line += "; no answer is whole within the length limit, so there is no exact match"
                self.say(line)
            for item in [] if asked else validation.ask(step):
                self.say(f"  {_one_line(item['prompt'])}\n  -> {_one_line(item['answer'])}")
            if self.args.save.best and step and validation.best == step and not asked:
                self.write_best(step)

    def _flush(self, done: int, pace: float) -> None:
        """Write the rows of the steps until now, look at them, and show the last; pace: seconds a step."""
        for row in self.metrics.flush(self.fabric.device):
            self._check(row)
        steps = self._projected(done)
        left = max(0.0, min(pace * (steps - done), self.limit - self.elapsed))
        if self.metrics.last:
            self.say(f"step {done}/{steps}: {self.metrics.line()}, {duration(left)} left")

    def _check(self, row: Row) -> None:
        """ValueError where the run has diverged: nothing of it is saved after that."""
        if "loss" not in row:
            return
        step = int(row["step"])
        for column, name in (("loss", "loss"), ("grad_norm", "gradient's norm")):
            if not math.isfinite(row[column]):
                if self.args.train.skip_nan:
                    return
                raise ValueError(self._not_finite(step, name, row[column]))
        first = self.metrics.first["loss"]
        if row["loss"] > EXPLODED * max(math.log(self.source.config.vocab_size), first):
            raise ValueError(self._not_finite(step, "loss", row["loss"], f" and was {first:.3g}"))

    def _slower(self) -> str:
        """What to do where a run has diverged, which --resume would repeat."""
        kept = self.folder / "best"
        onward = f", from {kept} as its --checkpoint_dir" if kept.is_dir() else ""
        return f"begin another run{onward} with a lower --train.learning_rate (now {self.args.train.learning_rate:g})"

    def _not_finite(self, step: int, name: str, value: float, more: str = "") -> str:
        remedy = self._slower() if step else "look for NaN or infinity in its weights and config.json"
        examples = ", ".join(map(str, self.schedule.step_indices(step - 1))) if step and "validation" not in name else ""
        whose = f"; the step's training examples: {examples} (--train.skip_nan leaves such steps out)" if examples else ""
        return f"step {step}: the {name} is {value:.4g}{more}, so nothing more can be learned; {remedy}{whose}"

    def _fit(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Run the largest micro-batch of the whole run, beside the optimizer's state: what does not fit is told now."""
        while True:
            reason = None
            try:
                self._probe(model, optimizer)
            except Exception as error:  # compilers raise many kinds
                if not is_out_of_memory(error) and not is_compiled(self.model):
                    raise
                if not is_out_of_memory(error):
                    run_uncompiled(self.model, summary(error))
                    optimizer.zero_grad(set_to_none=True)
                    continue
                reason = str(error)
            optimizer.zero_grad(set_to_none=True)
            if not any(self.hosts.all_reduce_max(float(reason is not None))):
                return
            self._halve(reason or "in another process")

    def _probe(self, model: nn.Module, optimizer: Optimizer) -> None:
        """One micro-batch, and where a step has several another beside its gradients."""
        in_backward = self.args.train.optimizer_in_backward
        largest = self.schedule.largest
        rows = [[self.data.train[number] for number in row] for row in largest.rows]
        batch = self.schedule.layout.collated(rows).learning(largest.learned).to(self.fabric.device)
        held, passes = 0, 1
        if self.fabric.device.type == "cuda":
            mine = {name: local(parameter) for name, parameter in self.trained.items()}
            train = self.args.train
            place = residence(train.optimizer, train.cpu_offload, self.mesh is not None, self.fabric.device.type)
            held = state_bytes(train.optimizer, mine) if place.state and not self.start_step else 0
            passes += self.schedule.shape().accumulated
        state = torch.empty(held, dtype=torch.uint8, device=self.fabric.device)
        model.train()
        with (
            sync_gradients(self.fabric, model, last=self.mesh is not None),
            optimizer.optimizer.forgetting() if in_backward else nullcontext(),
        ):
            for _ in range(passes):
                self.fabric.backward(model(batch.tokens, **batch.inputs())[0])
        del state

    def _halve(self, reason: str) -> None:
        """Lay the steps out in micro-batches of half the size; ValueError where that is not asked for, or not possible."""
        before = self.schedule.layout
        after = before.halved(int(self.data.train.lengths.max()))
        if after is None or not self.args.train.oom_retry:
            raise RankError(self._too_large(reason))
        if self.fabric.device.type == "cuda":
            torch.cuda.empty_cache()
        shape = self.schedule.shape()
        self.schedule.lay_out(after)
        self.say(f"micro-batches of up to {shape} do not fit into memory; going on with {self.schedule.shape()}")

    def _too_large(self, reason: str) -> str:
        number, tokens = self.schedule.longest()
        what = f"micro-batches of up to {self.schedule.shape()} do not fit into {self.fabric.device}'s memory"
        longest = f"the longest row has training example {number} with its {tokens:,} tokens"
        less = ", or ".join(remedies(self.setup, self.schedule, self.settings)) or "choose a smaller model"
        return f"{what} ({reason.split('. ')[0][:200]}); {longest}; {less}"


def _one_line(text: str, width: int = 100) -> str:
    """The end of a text, for the screen."""
    text = " ".join(text.split())
    return text if len(text) <= width else f"...{text[-width:]}"


def _due(interval: int, done: int) -> bool:
    """Whether an interval ends after so many steps; 0: never."""
    return bool(interval) and done % interval == 0
