"""Fine-tuning: from the flags to a run's folder, and the one loop that all methods and strategies share."""

import dataclasses
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning_fabric import Fabric
from torch import Tensor, nn
from tqdm import tqdm

from litft import checkpoint, runs
from litft.args import FinetuneArgs, TrainArgs
from litft.data.load import Data, load_data
from litft.data.samples import Sample
from litft.data.steps import Layout, collate
from litft.evaluate import answer, exact_match, validation_loss
from litft.flops import Flops, peak_flops
from litft.folder import DEMO, base_record, copy_tokenizer, resolve
from litft.job import Job
from litft.metrics import Metrics
from litft.optim import make_optimizer, set_rate
from litft.parallel import make_fabric
from litft.preview import Preview, dry_run
from litft.quantize import bitsandbytes
from litft.result import Result, write_result
from litft.weights import SHARD_BYTES


def finetune(args: FinetuneArgs) -> Path | None:
    """Train as `args` say; returns the run's folder, of a dry run nothing.

    ValueError for whatever the user can mend, before any training.
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
    source.check_length("--data.max_seq_length", args.data.max_seq_length)
    data = load_data(args.data, job.tokenizer, job.method.vocab_size(source.config), source.config.context)
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
    Run(args, fabric, job, data, folder).train()
    return folder


def learning_rate(train: TrainArgs, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of `steps`: a linear rise over the warm-up, then the schedule's fall."""
    warmup = round(train.warmup_fraction * steps)
    if step < warmup:
        return train.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    fall = {"cosine": (1 + math.cos(math.pi * progress)) / 2, "linear": 1 - progress, "constant": 1.0}[train.lr_schedule]
    return train.learning_rate * (train.min_lr_ratio + (1 - train.min_lr_ratio) * fall)


def accumulate(fabric: Fabric, model: nn.Module, samples: list[Sample], layout: Layout) -> Tensor:
    """Add to the gradients those of the samples' mean loss a token, and return that loss.

    The sum over this rank's micro-batches is divided by the count over *all*; DDP averages over ranks, hence the factor.
    """
    count = sum(sample.supervised for sample in samples)
    batches = layout.batches(samples, fabric.global_rank)
    total = torch.zeros((), device=fabric.device)
    for number, batch in enumerate(batches, 1):
        batch = batch.to(fabric.device)
        synced = fabric.world_size == 1 or number == len(batches)
        with fabric.no_backward_sync(model, enabled=not synced):
            loss, _ = model(batch.tokens, **batch.inputs())
            fabric.backward(loss * (fabric.world_size / count))
        total += loss.detach()
    return fabric.all_reduce(total, reduce_op="sum") / count


def progress_bar(begun: int, steps: int, disable: bool) -> tqdm:
    """Steps, rate and ETA; a log file gets a line every ten seconds in place of a moving bar."""
    terminal = sys.stderr.isatty()
    return tqdm(
        total=steps,
        initial=begun,
        unit="step",
        disable=disable,
        dynamic_ncols=terminal,
        mininterval=0.1 if terminal else 10,
        maxinterval=10 if terminal else 60,
        bar_format=None if terminal else "{l_bar}{r_bar}\n",
    )


class Run:
    """One fine-tuning run on one process of it."""

    def __init__(self, args: FinetuneArgs, fabric: Fabric, job: Job, data: Data, folder: Path) -> None:
        self.args, self.fabric, self.job, self.data = args, fabric, job, data
        self.source, self.tokenizer, self.method = job.source, job.tokenizer, job.method
        self.folder, self.main = folder, fabric.global_rank == 0
        self.precision = job.precision(fabric.device)
        self.model, self.parameters = job.build(self.precision, fabric.device)
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.peak = peak_flops(fabric.device, self.precision)
        self.metrics = Metrics(folder / "metrics.csv" if self.main else None, self.peak and self.peak * fabric.world_size)
        self.preview = Preview(args, data, job.tokenizer, fabric.world_size)
        self.layout, self.order = self.preview.layout, self.preview.order
        self.samples, self.steps = self.preview.samples, self.preview.steps
        self.scores: dict[str, list[float]] = {"validation loss": [], "exact match": []}

    def train(self) -> None:
        """Prepare the folder, run the steps, leave the result; ValueError where the GPU's memory does not suffice."""
        try:
            self._train()
        except torch.OutOfMemoryError as error:
            shape = f"micro-batches of up to {self.preview.shape()} do not fit"
            remedy = "lower --data.max_seq_length or --train.micro_batch_size, or choose --quantize nf4"
            raise ValueError(f"{shape} into {self.fabric.device}'s memory ({str(error).split('. ')[0]}); {remedy}") from None

    def _train(self) -> None:
        args, fabric = self.args, self.fabric
        optimizer = make_optimizer(args.train, self.method, self.trained)
        begun = self._resume(optimizer)
        fabric.barrier()
        if self.main:
            self._open_folder(begun)
        model, optimizer = fabric.setup(self.model, optimizer)
        if self.main:
            self._say(self._headline(begun))
        if begun == 0:
            self._evaluate(0, final=True)
        self._loop(model, optimizer, begun)
        if self.main:
            self._write_final()
            self._summary()
        fabric.barrier()

    def _loop(self, model: nn.Module, optimizer: torch.optim.Optimizer, begun: int) -> None:
        args, metrics = self.args.train, self.metrics
        order, flops = self.order, Flops(self.model)
        log_interval = args.log_interval or (1 if self.fabric.device.type == "cpu" else 10)
        bar = progress_bar(begun, self.steps, disable=not self.main)
        for step in range(begun, self.steps):
            metrics.start()
            seen = min((step + 1) * args.global_batch_size, self.samples)
            samples = [self.data.train[i] for i in order.indices(step * args.global_batch_size, seen)]
            rate = learning_rate(args, step, self.steps)
            loss, norm = self._step(model, optimizer, samples, step, rate)
            metrics.stop()
            if step == begun:
                self._probe(model, optimizer)
            done, last = step + 1, step + 1 == self.steps
            metrics.add(
                step=done,
                epoch=seen / order.size,
                samples=seen,
                tokens=sum(sample.tokens.numel() for sample in samples),
                flops=flops(samples),
                loss=loss,
                learning_rate=rate,
                grad_norm=norm,
            )
            bar.update()
            if last or (self.args.eval.interval and done % self.args.eval.interval == 0):
                self._evaluate(done, final=last)
            saving = last or (self.args.save.interval and done % self.args.save.interval == 0)
            if saving or done % log_interval == 0:
                metrics.flush(self.fabric.device)
                self._check_finite(done, "loss", metrics.loss)
                bar.set_postfix_str(metrics.line(), refresh=False)
            if saving:
                progress = {"samples": seen, "identity": self._identity(), "tokenizer": self.tokenizer.choices()}
                checkpoint.save(self.fabric, self.folder, done, self.parameters, optimizer, progress)
                checkpoint.prune(self.fabric, self.folder, self.args.save.keep_last)
        bar.close()

    def _step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, samples: list[Sample], step: int, rate: float
    ) -> tuple[Tensor, Tensor]:
        """One optimizer step over `samples`; returns the mean loss a token before it, and the gradient's norm."""
        # dropout's state is a function of the step and the rank: a resumed run draws what an uninterrupted one would
        seed = (self.args.seed * 1_000_003 + step) * 4099
        torch.manual_seed(seed + self.fabric.global_rank)
        model.train()
        loss = accumulate(self.fabric, model, samples, self.layout)
        limit = self.args.train.max_grad_norm or math.inf
        norm = nn.utils.clip_grad_norm_(self.trained.values(), limit)
        set_rate(optimizer, rate)
        torch.manual_seed(seed)  # what an optimizer rounds by chance, every rank rounds alike
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss, norm

    def _probe(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Run the largest micro-batch of the whole run, beside the optimizer's state: what does not fit is told now."""
        rows = [[self.data.train[i] for i in row] for row in self.preview.heaviest]
        batch = collate(rows).to(self.fabric.device)
        with self.fabric.no_backward_sync(model, enabled=self.fabric.world_size > 1):
            self.fabric.backward(model(batch.tokens, **batch.inputs())[0])
        optimizer.zero_grad(set_to_none=True)

    def _evaluate(self, step: int, final: bool) -> None:
        """Put the validation loss, before and after training also exact match, into the row of `step`."""
        if not self.data.val:
            return
        self.metrics.settle(self.fabric.device)
        most = self.args.eval.max_batches and self.args.eval.max_batches * self.args.train.global_batch_size
        values = {"val_loss": validation_loss(self.fabric, self.model, self.data.val[:most], self.layout)}
        self._check_finite(step, "validation loss", values["val_loss"])
        self.scores["validation loss"].append(values["val_loss"])
        if final and self.args.eval.exact_match:
            values["exact_match"] = exact_match(self.fabric, self.model, self.tokenizer, self.data.val)
            self.scores["exact match"].append(values["exact_match"])
        self.metrics.note(step, **values)
        line = f"step {step}: validation loss {values['val_loss']:.4f}"
        if "exact_match" in values:
            line += f", exact match {values['exact_match']:.1%} of {len(self.data.val)}"
        self._say(line)

    def _check_finite(self, step: int, name: str, value: float) -> None:
        if not math.isfinite(value):
            remedy = "lower --train.learning_rate" if step else "look for NaN or infinity in its weights and config.json"
            raise ValueError(f"step {step}: the {name} is {value}, so nothing more can be learned; {remedy}")

    def _open_folder(self, begun: int) -> None:
        """Make the run's folder and say in it how the run began; what lies beyond `begun` steps never happened."""
        if self.args.overwrite:
            runs.clear(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        stored = dataclasses.asdict(self.args)
        for name in ("out_dir", "resume", "overwrite"):
            stored.pop(name)
        runs.write_config(self.folder, self.method.title, yaml.safe_dump(stored, sort_keys=False))
        self.metrics.cut(begun or -1)
        for name, column in (("validation loss", "val_loss"), ("exact match", "exact_match")):
            self.scores[name] = [row[column] for row in self.metrics.before if column in row]

    def _resume(self, optimizer: torch.optim.Optimizer) -> int:
        """Continue from the newest checkpoint if asked to; returns the steps already done."""
        newest = checkpoint.newest(self.folder) if self.args.resume else None
        if newest is None:
            return 0
        progress = checkpoint.read_progress(newest)
        if changed := checkpoint.changes(newest, self._identity()):
            remedy = "resume with what the run began with, or begin another run with its adapter as --checkpoint_dir"
            raise ValueError(f"{newest} was saved with {'; '.join(changed)}; {remedy}")
        if progress["step"] > self.steps:
            raise ValueError(f"{newest} is beyond the run's {self.steps} steps; raise --train.max_steps or --train.epochs")
        checkpoint.restore(newest, self.parameters, optimizer)
        return progress["step"]

    def _identity(self) -> dict[str, Any]:
        """What a run must share with the one it continues, or it would silently be another."""
        own = {"seed": self.args.seed, "precision": self.precision, "training data": self.data.digest}
        return self.job.identity() | own

    def _headline(self, begun: int) -> str:
        lines = [*self.preview.lines(), *self.preview.plan_lines(self.job, self.precision, self.fabric.device, self.peak)]
        if self.source.adapter:
            lines.append("going on with this adapter: ranks, targets and tokens are its own")
            lines += filter(None, [self.source.another_quantization(self.job.quantize)])
        if tokens := self.job.untrained_tokens(self.model, self.data.special):
            remedy = f"--data.new_tokens '{','.join(tokens)}' trains them"
            lines.append(f"warning: the embeddings of the template's {', '.join(tokens)} look untrained; {remedy}")
        if begun == self.steps:
            lines.append(f"all {begun} steps are done; final/ is written again")
        elif begun:
            lines.append(f"continuing after step {begun}")
        elif self.args.resume:
            lines.append("no checkpoint to continue from; beginning at step 0")
        return "\n".join(lines)

    def _write_final(self) -> None:
        """The folder to open, under its name only when complete."""
        partial, final = self.folder / "final.partial", self.folder / "final"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        values = self.method.values(self.model)
        if self.method.whole:
            write_result(partial, self.source, self.source.dtype(None), Result(self.method, values), SHARD_BYTES / 1e9)
        else:
            own = {"quantize": self.job.quantize, "precision": self.precision}
            record = base_record(self.source, final)
            self.method.write(partial, self.source, values, record | {"litft": record["litft"] | own})
        copy_tokenizer(self.tokenizer, partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)

    def _summary(self) -> None:
        metrics = self.metrics
        for name, values in self.scores.items():
            if values:
                form = "{:.1%}" if name == "exact match" else "{:.4f}"
                self._say(f"{name}: {form.format(values[0])} -> {form.format(values[-1])}")
        if self.data.val and (found := self.data.val[0].answer):
            self.model.eval()
            prompt = found[0].tolist()
            self._say(f"for example: {self.tokenizer.decode(prompt[-64:]).strip()}")
            self._say(f"  it answers: {answer(self.model, self.tokenizer, prompt, 64)}")
        self._say(f"{metrics.seconds:.0f} s of training, {metrics.summary(self.fabric.device)}")
        self._say(f"the result is in {self.folder / 'final'}; next:\n")
        chat = "python generate/chat.py" if Path("generate/chat.py").is_file() else "litft chat"
        kind = "" if self.args.quantize == "none" else f" --quantize {self.args.quantize}"
        self._say(f"  {chat} --checkpoint_dir {self.folder / 'final'}{kind}")

    def _say(self, line: str) -> None:
        if self.main and sys.stderr.isatty():
            tqdm.write(line)  # above the bar
        elif self.main:
            print(line, flush=True)
