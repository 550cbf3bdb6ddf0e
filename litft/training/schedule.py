"""What a run would do, shown before it does it: its data, samples as the model reads them, its plan.

The commands `prepare_data` and `plan`, the `--dry_run` of every fine-tuning script, and what a run says as it begins.
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from litft.args import (
    AdapterFinetuneArgs,
    AdapterV2FinetuneArgs,
    FinetuneArgs,
    FullFinetuneArgs,
    LoRAFinetuneArgs,
    PlanArgs,
    PrepareArgs,
    TrainArgs,
    size,
)
from litft.args.processes import global_rank
from litft.data.dataset import Data, length_limit, load_data, unknown_tokens
from litft.data.encoder import Sample
from litft.data.sampler import Layout, Order, cells, heaviest
from litft.data.token_store import Report
from litft.data.tokenizer import Tokenizer
from litft.distributed.devices import memory_there, shards
from litft.methods import Method, method_of
from litft.model.loss import IGNORED
from litft.pretrained import Source, resolve
from litft.training.activation_checkpointing import RECOMPUTED
from litft.training.communication_plan import SHARE, Cluster, Traffic, traffic
from litft.training.flops import peak_flops, peak_of
from litft.training.memory_plan import FILLED, Fit, Plan, fastest, in_words, predict
from litft.training.memory_trace import Shape
from litft.training.setup import Job

MOST_TOKENS = 32768  # of a micro-batch that --budget looks at: larger ones are no faster
BARS = 10  # of the histogram
STRATEGIES = {
    "ddp": "each device holds all of the weights",
    "fsdp": "each device holds a part of the weights and of the optimizer's state",
    "hsdp": "each device holds a part of the weights and of the optimizer's state, and each {size} devices all of them",
}
GREEN, OFF = "\033[32m", "\033[0m"
MARKS = "⟦", "⟧"  # where there is no colour


class Preview:
    """A run as its flags and its data plan it."""

    def __init__(self, args: FinetuneArgs, data: Data, tokenizer: Tokenizer, ranks: int) -> None:
        self.args, self.data = args, data
        self.unknown = unknown_tokens(tokenizer)
        self.size = args.train.global_batch_size
        self.order = Order(data.train.sizes, args.seed, data.weights)
        self.samples = planned_samples(args.train, self.order.size)
        self.layout = layout_of(args, data, ranks)
        self.go_on(0, 0)

    def go_on(self, step: int, samples: int) -> None:
        """Begin after so many steps: the last of a run that is made longer may have been a small one."""
        self.origin = step, samples  # a step, and the samples seen before it
        self.steps = step + max(0, -(-(self.samples - samples) // self.size))
        if samples < self.samples:
            self.lay_out(self.layout)

    def lay_out(self, layout: Layout) -> None:
        """Have the steps run as `layout` says."""
        self.layout = layout
        self.largest = heaviest(self.data.train, self.order, layout, self.samples, self.size, self.origin[1])

    def shape(self) -> Shape:
        """The largest micro-batch, and whether it is one of several of its step."""
        rows, learned, several = self.largest
        return Shape(len(rows), cells(self.data.train.lengths, rows) // len(rows), several, learned)

    def _accumulates(self, step: int) -> bool:
        """Whether a step is several micro-batches."""
        return len(self.layout.plan(self._lengths(step).tolist())) > self.layout.ranks

    def planned_shape(self) -> Shape:
        """The same as the plan counts it: DDP's buckets hold all gradients from the beginning."""
        shape = self.shape()
        return shape._replace(accumulated=shape.accumulated or self.strategy == "ddp")

    def _first_of_several(self) -> int | None:
        """The first step of the run that is several micro-batches; None: there is none."""
        steps = range(self.origin[0], self.steps)
        return next(filter(self._accumulates, steps), None)

    def longest(self) -> tuple[int, int]:
        """The longest example of the largest micro-batch, and its tokens."""
        number = max((number for row in self.largest.rows for number in row), key=lambda n: self.data.train.lengths[n])
        return number, int(self.data.train.lengths[number])

    def of_step(self, step: int) -> list[int]:
        """The numbers of a step's examples."""
        return self.order.indices(self.seen(step), self.seen(step + 1))

    def seen(self, steps: int) -> int:
        """How many samples that many steps have seen, the position in the data."""
        begun, samples = self.origin
        if steps < begun:
            return min(steps * self.size, samples)
        return min(samples + (steps - begun) * self.size, self.samples)

    def _lengths(self, step: int) -> np.ndarray:
        """Of a step's samples."""
        return self.data.train.lengths[self.of_step(step)]

    def flops(self, plan: Plan) -> float:
        """Of the whole run."""
        train = self.data.train
        numbers = self.order.indices(0, min(self.samples, 200_000))
        return plan.flops.of(train.lengths[numbers], train.supervised[numbers]) * self.samples / len(numbers)

    def settle(self, job: Job, device: torch.device) -> None:
        """Choose what the flags leave to the memory there is: how devices work together, what is recomputed, how many rows.

        ValueError for what cannot be together with it.
        """
        args, self.device, self.reason = job.args, device, "as asked for"
        self.there = memory_there(device, args.devices)
        for strategy in self._strategies():
            self.width = width = shards(args, strategy)
            self.strategy, self.precision = strategy, job.precision(device, width)
            found, smallest = self._fastest(job, device, width)
            if args.strategy == "auto" and strategy == "ddp":
                needed, there = in_words(smallest.plan.memory.peak), in_words(self.there)
                self.reason = f"since each needs {needed} with all of the weights, and has {there}"
            if found:
                break
        chosen = found or smallest
        self.recomputed, self.plan, self.slower = chosen.recomputed, chosen.plan, chosen.slower
        if chosen.rows != self.layout.rows:
            self.lay_out(replace(self.layout, rows=chosen.rows))
        if clashes := args.clashes(self.strategy):
            raise ValueError("\n".join(clashes) + (f" ({self.strategy}: {self.reason})" if args.strategy == "auto" else ""))
        if args.train.optimizer_in_backward and (step := self._first_of_several()) is not None:
            reason = f"the {args.train.global_batch_size} examples of step {step + 1} are several micro-batches"
            remedy = "lower --train.global_batch_size, or raise --train.micro_batch_size"
            raise ValueError(f"--train.optimizer_in_backward: {reason}, and each would be a step; {remedy}")

    def _strategies(self) -> list[str]:
        """Those to choose from, the fastest first."""
        if self.args.strategy != "auto":
            return [self.args.strategy]
        if self.layout.ranks == 1:
            return ["single"]
        return ["fsdp"] if self.args.train.cpu_offload == "parameters" else ["ddp", "fsdp"]

    def _fastest(self, job: Job, device: torch.device, width: int) -> tuple[Fit | None, Fit]:
        """The settings for weights in so many parts, of those that the flags leave open."""
        train, first = job.args.train, self.layout
        rows, kinds = [first.rows], [train.activation_checkpointing]
        if train.micro_batch_size == "auto":
            steps = (self.layout.plan(self._lengths(step).tolist()) for step in range(min(self.steps, 16)))
            most = max(sum(len(batch) for batch in step) for step in steps)
            rows = [count for count in (1, 2, 4, 8, 16, 32, 64) if count < 2 * most]
        if train.activation_checkpointing == "auto":
            kinds = list(RECOMPUTED)

        def planned(count: int, kind: str, quantize: str, offload: str) -> Plan:
            if count != self.layout.rows:
                self.lay_out(replace(first, rows=count))
            return predict(
                job.source,
                job.method,
                self.precision,
                quantize,
                self.planned_shape(),
                train.optimizer,
                kind,
                device.type,
                train.optimizer_in_backward,
                offload,
                width,
            )

        return fastest(planned, rows, kinds, [(job.quantize, train.cpu_offload)], int(FILLED * self.there))

    def plan_lines(self, job: Job, device: torch.device, peak: float | None) -> Iterator[str]:
        """What the run needs, on the machine at hand."""
        plan = self.plan
        chip = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        what = f"{job.source.folder} in {self.precision if job.quantize == 'none' else job.quantize}"
        yield f"{what}: {plan.title_line(job.method.title)}"
        if self.strategy != "single":
            size = shards(self.args, self.strategy)
            yield f"{STRATEGIES[self.strategy].format(size=size)} ({self.strategy}, {self.reason})"
        recomputed = {"none": "", "selective": "; MLPs are recomputed", "full": "; blocks are recomputed"}[self.recomputed]
        yield f"memory{'' if self.strategy == 'single' else ' of each'}: {plan.memory.line()}{recomputed}"
        yield time_line(self.flops(plan), self.slower, "the run", chip, peak, self.layout.ranks)
        if plan.memory.peak > self.there:
            flag = "--train.micro_batch_size" if self.layout.rows > 1 else "--data.max_seq_length"
            yield f"warning: that is more than the {in_words(self.there)} there are; lower {flag}"

    def lines(self) -> Iterator[str]:
        """The data, in a line a file and a line on how they are laid out."""
        data = self.data
        for name, report in data.reports.items():
            yield f"{name}: {file_line(report)}"
        yield f"the chat template is {data.template}"
        yield (
            f"{len(data.train):,} training and {len(data.val):,} validation examples; {_count(self.steps, 'step')} of "
            f"{self.size}, {self.samples / self.order.size:.3g} epochs of {self.order.size:,}, on "
            f"{_count(self.layout.ranks, 'device')}"
        )
        yield self.packing_line()
        if not len(data.val):
            yield "nothing is held out for validation; --data.val_fraction or --data.val_path changes that"
        if self.unknown:
            texts = ",".join(self.unknown)
            remedy = f"--data.new_tokens '{texts}' makes them tokens"
            yield f"warning: the tokenizer does not know the template's {texts}; {remedy}"
        if len(data.duplicates):
            yield (
                f"warning: {len(data.duplicates):,} training examples are in the validation part too, token for token; "
                "validation will look better than it is"
            )

    def packing_line(self) -> str:
        """How full the rows are, over the first 200 steps."""
        fed, slots, rows, steps = 0, 0, 0, range(min(self.steps, 200))
        for lengths in map(self._lengths, steps):
            fed += int(lengths.sum())
            for batch in self.layout.plan(lengths.tolist()):
                slots, rows = slots + cells(lengths, batch), rows + len(batch)
        room = f"packed into rows of at most {self.data.limit:,} tokens" if self.layout.room else "a row for each example"
        return f"{room}: {rows / len(steps):.1f} rows a step, {1 - fed / slots:.1%} padding"


def layout_of(args: FinetuneArgs, data: Data, ranks: int) -> Layout:
    """How the flags lay out the samples; where no two of them share a row, each row is one."""
    rows, shortest = args.train.micro_batch_size, np.sort(data.train.lengths)[:2]
    packs = args.data.packing and (len(shortest) < 2 or shortest.sum() <= data.limit)
    rows = (1 if args.data.packing else 4) if rows in (None, "auto") else rows
    return Layout(rows, data.limit if packs else None, ranks)


def planned_samples(train: TrainArgs, size: int) -> int:
    """How many samples the run will see, the position in the data at which it ends."""
    by_steps = train.max_steps * train.global_batch_size if train.max_steps else None
    epochs = train.epochs or (None if by_steps else 3.0)
    by_epochs = max(1, round(epochs * size)) if epochs else None
    return min(n for n in (by_steps, by_epochs) if n)


def file_line(report: Report) -> str:
    """A file's counts."""
    formats = ", ".join(f"{name} {count:,}" if len(report.formats) > 1 else name for name, count in report.formats.items())
    parts = [
        f"{_count(report.records, 'record')} ({formats}), {report.tokens:,} tokens, {report.supervised:,} of them learned"
    ]
    parts += [f"{count:,} {note}" for note, (count, _) in report.notes.items()]
    parts += [f"{report.bad[0]:,} bad, which are left out"] if report.bad[0] else []
    return "; ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def details(data: Data) -> Iterator[str]:
    """Which records something happened to: the first few of each kind."""
    for name, report in data.reports.items():
        for note, (count, places) in report.notes.items():
            found = ", ".join(place.removeprefix(f"{name}, ") for place in places)
            yield f"  {note}: {found}{' ...' if count > len(places) else ''}"
        yield from (f"  bad: {message}" for message in report.bad[1])
        if (more := report.bad[0] - len(report.bad[1])) > 0:
            yield f"  bad: {more:,} more"


def histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """How many samples have how many tokens: the least and most of each bar, and its count."""
    edges = np.unique(np.linspace(lengths.min() - 1, lengths.max(), BARS + 1).astype(int))
    counts, _ = np.histogram(lengths, edges + 1)
    return [tuple(map(int, bar)) for bar in zip(edges[:-1] + 1, edges[1:], counts, strict=True)]


def histogram_lines(lengths: np.ndarray) -> Iterator[str]:
    """The same as text."""
    bars = histogram(lengths)
    most = max(count for _, _, count in bars)
    for low, high, count in bars:
        yield f"  {low:7,} to {high:7,} tokens {'█' * round(40 * count / most):<40} {count:,}"


def shown(sample: Sample, tokenizer: Tokenizer, colour: bool) -> str:
    """A sample as the model reads it, with what is learned in colour, or between marks."""
    counted = (sample.targets != IGNORED).tolist()
    ids = [*sample.tokens.tolist(), *sample.targets[-1:].tolist() * counted[-1]]
    learned = [False, *counted[:-1], *[True] * counted[-1]]
    begin, end = (GREEN, OFF) if colour else MARKS
    text, before = "", 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or learned[at] != learned[at - 1]:
            whole = tokenizer.decode(ids[:at], skip_special=False)
            text += f"{begin}{whole[before:]}{end}" if learned[at - 1] else whole[before:]
            before = len(whole)
    return text


def samples_lines(preview: Preview, tokenizer: Tokenizer, count: int) -> Iterator[str]:
    """The first samples of the run."""
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    train = preview.data.train
    for number in preview.order.indices(0, min(count, preview.order.size)):
        sample = train[number]
        yield f"\n--- training example {number}: {sample.tokens.numel():,} tokens, {sample.supervised:,} learned"
        yield shown(sample, tokenizer, colour)


def data_report(preview: Preview, tokenizer: Tokenizer, count: int) -> Iterator[str]:
    """All there is to know of the data before it is trained on."""
    yield from preview.lines()
    yield from details(preview.data)
    yield "training examples by length:"
    yield from histogram_lines(preview.data.train.lengths)
    yield from samples_lines(preview, tokenizer, count)


def time_line(flops: float, slower: float, what: str, chip: str, peak: float | None, devices: int) -> str:
    """What so many FLOPs, which take `slower` times as long, come to on so many chips that can do `peak` a second."""
    time = "whose peak is not known"
    if peak:
        time = f"{duration(flops * slower / (peak * SHARE * devices))} at {SHARE:.0%} of its peak"
    size = f"{flops / 1e12:,.0f}" if flops >= 1e13 else f"{flops / 1e12:.2g}"
    return f"{what}: {size} TFLOPs; on {devices} x {chip}, {time}"


def duration(seconds: float) -> str:
    """In the unit that fits."""
    size, unit = next((row for row in ((86400, "days"), (3600, "hours"), (60, "minutes")) if seconds >= row[0]), (1, "s"))
    return f"{seconds / size:.2g} {unit}"


def dry_run(job: Job, preview: Preview) -> None:
    """What a run would do, said by the first process."""
    if global_rank() != "0":
        return
    for line in data_report(preview, job.tokenizer, count=3):
        print(line)
    print()
    for line in preview.plan_lines(job, preview.device, peak_flops(preview.device, preview.precision)):
        print(line)


def prepare_data(args: PrepareArgs) -> None:
    """Tokenize the data into the cache, and show what became of it."""
    finetuning = LoRAFinetuneArgs(checkpoint_dir=args.checkpoint_dir, base_dir=args.base_dir, data=args.data)
    finetuning.train.global_batch_size = args.global_batch_size
    source = resolve(args.checkpoint_dir, args.base_dir)
    job = Job(finetuning, source)
    data = load_data(args.data, job.tokenizer, job.method.vocab_size(source.config), source.config.context)
    for line in data_report(Preview(finetuning, data, job.tokenizer, 1), job.tokenizer, args.show):
        print(line)


def setting_flags(fit: Fit) -> str:
    """Settings as the flags of a fine-tuning command."""
    flags = [f"--train.micro_batch_size {fit.rows}", f"--train.activation_checkpointing {fit.recomputed}"]
    flags += [f"--quantize {fit.quantize}"] if fit.quantize != "none" else []
    return " ".join(flags + ([f"--train.cpu_offload {fit.cpu_offload}"] if fit.cpu_offload != "none" else []))


def within_budget(args: PlanArgs, tokens: int, planned: Callable[[int, str, str, str], Plan]) -> Fit:
    """The fastest settings that fit, of those that the flags leave open; ValueError where none do."""
    rows = [count for count in (1, 2, 4, 8, 16, 32) if count == 1 or count * tokens <= MOST_TOKENS]
    rows = [args.micro_batch_size] if args.micro_batch_size else rows
    kinds = [args.activation_checkpointing] if args.activation_checkpointing else RECOMPUTED
    held = [(args.quantize, args.cpu_offload)]
    if held == [("none", "none")] and args.method != "full" and args.strategy == "ddp":
        held += [("nf4", "none")] + ([("none", "parameters")] if "full" in kinds else [])
    fit, smallest = fastest(planned, rows, kinds, held, int(FILLED * size(args.budget)))
    if fit is None:
        least = f"{in_words(round(smallest.plan.memory.peak / FILLED))} with {setting_flags(smallest)}"
        remedy = "shorten --max_seq_length, or choose another method"
        raise ValueError(f"--budget {args.budget}: the least that this needs is {least}; {remedy}")
    return fit


class Paper(NamedTuple):
    """A plan from a config.json alone."""

    source: Source
    method: Method
    tokens: int  # of a row
    fit: Fit
    peak: float | None  # of a chip
    traffic: Traffic | None  # between several


def on_paper(args: PlanArgs) -> Paper:
    """What a method needs for a model, with the settings asked for, or the fastest that fit; ValueError where none do."""
    finetuning = {
        "lora": LoRAFinetuneArgs(lora=args.lora),
        "adapter": AdapterFinetuneArgs(adapter=args.adapter),
        "adapter_v2": AdapterV2FinetuneArgs(adapter=args.adapter),
        "full": FullFinetuneArgs(),
    }
    source, method = resolve(args.checkpoint_dir), method_of(finetuning[args.method])
    if source.adapter:
        raise ValueError(f"{source.adapter} is an adapter; name its base, {source.base}, and the method's flags")
    method.choose(source.meta_model(), source.adapter_rules)
    source.check_length("--max_seq_length", args.max_seq_length)
    tokens, width = length_limit(args.max_seq_length, source.config.context), shards(args, args.strategy)

    def planned(rows: int, recomputed: str, quantize: str, offload: str) -> Plan:
        shape, named = Shape(rows, tokens, args.micro_batches > 1), {"cpu_offload": offload, "shards": width}
        return predict(source, method, args.precision, quantize, shape, args.optimizer, recomputed, **named)

    if args.budget:
        fit = within_budget(args, tokens, planned)
    else:
        kind = args.activation_checkpointing or ("full" if args.cpu_offload == "parameters" else "none")
        setting = (args.micro_batch_size or 1, kind, args.quantize, args.cpu_offload)
        fit = Fit(*setting, planned(*setting))
    peak, moved = peak_of(args.chip, args.precision), None
    if args.devices * args.num_nodes > 1 and peak:
        cluster = Cluster(args.devices, args.num_nodes, width, args.node_gbs * 1e9, args.network_gbs * 1e9)
        batch = fit.plan.flops.of([tokens] * fit.rows, [tokens] * fit.rows)
        moved = traffic(fit.plan, cluster, args.micro_batches, batch, fit.slower, peak)
    return Paper(source, method, tokens, fit, peak, moved)


def plan(args: PlanArgs) -> None:
    """Say what a method needs for a model, from its config.json alone."""
    source, method, tokens, fit, peak, moved = on_paper(args)
    if args.budget:
        room = in_words(size(args.budget) - int(FILLED * size(args.budget)))
        print(f"the fastest that fits into {args.budget}, of which {room} are left to CUDA: {setting_flags(fit)}")
    found, everywhere = fit.plan, args.devices * args.num_nodes
    flops = found.flops.of([tokens], [tokens]) / tokens * args.tokens
    what = f"{args.tokens:,} tokens, all of them learned, in examples of {tokens:,}"
    print(f"{source.folder}: {found.title_line(method.title)}")
    print(f"memory{'' if everywhere == 1 else ' of each'}: {found.memory.line()}")
    print(time_line(flops, fit.slower, what, args.chip, peak, everywhere))
    if moved:
        print(moved.line(args.micro_batches))
