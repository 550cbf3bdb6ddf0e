"""Training steps of random models: seconds, FLOPs, memory against the plan, kernels."""

import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils
from benchmark import BenchmarkArgs, write_setup
from decode_speed import copy_speed, timed
from figures import Figures, Values
from plan_accuracy import RANK, Cell, planned_peak
from profile_step import PRETENDED, kernels_of, profiled
from run_litft import Litft, batch_layout

from litft.args import DataArgs, LoRAArgs, TrainArgs
from litft.training.memory.flops import peak_flops
from litft.training.memory_saving.compile import run_uncompiled

WARMUP_STEPS = 2
SHOWN_KERNELS = 60
# of the products that measure the largest speed
PRODUCT_SIZE = 8192


@dataclass(frozen=True)
class Setting:
    """A training step to measure."""

    rows: int
    tokens: int  # of a row
    document: int  # tokens of each document in it

    def __str__(self) -> str:
        text = f"{self.rows} x {self.tokens:,}"
        if self.document != self.tokens:
            text += f", documents of {self.document}"
        return text


@dataclass(frozen=True)
class Trained:
    """A model that is trained with LoRA, and how it is trained."""

    model: str  # a folder of scripts/configs
    quantize: str
    compiled: bool
    contender: Litft
    device: torch.device
    recomputed: str = "none"

    @property
    def title(self) -> str:
        """The model and the way it is trained."""
        method = "LoRA" if self.quantize == "none" else f"QLoRA {self.quantize}"
        return f"{self.model} {method} {'compiled' if self.compiled else 'eager'}"


def prepare(
    model: str, quantize: str, device: torch.device, recomputed: str = "none"
) -> Trained:
    """Return a compiled model with random weights and a new adapter. model: a folder of
    scripts/configs."""
    configs = Path(__file__).resolve().parent.parent / "configs"
    train = TrainArgs(compile=True, micro_batch_size=1, activation_checkpointing=recomputed)
    precision = "bf16" if device.type == "cuda" else "fp32"
    args = BenchmarkArgs(
        str(configs / model),
        precision=precision,
        quantize=quantize,
        train=train,
        lora=LoRAArgs(r=RANK),
        data=DataArgs(max_seq_length=64),  # the samples are made here
    )
    with tempfile.TemporaryDirectory() as folder:
        contender = Litft(write_setup(args, device.type, Path(folder)))
    return Trained(model, quantize, True, contender, device, recomputed)


def measure_steps(trained: Trained, setting: Setting, steps: int = 6) -> Values:
    """Return the figures of steps of one setting: median times, the measured and the planned
    peak."""
    contender = trained.contender
    device = trained.device
    samples, num_targets = _samples(contender, setting)
    host_seconds = []
    losses = []

    def step() -> None:
        start = time.perf_counter()
        losses.append(contender.accumulate(samples, num_targets))
        torch.nn.utils.clip_grad_norm_(contender.parameters, 1.0)
        contender.optimizer.step()
        contender.optimizer.zero_grad(set_to_none=True)
        # launching alone: what a step would take whose kernels took no time
        host_seconds.append(time.perf_counter() - start)

    # with the host's clock, since compiling is the host's work
    start = time.perf_counter()
    step()
    float(losses[0])
    first_step = time.perf_counter() - start
    for _ in range(WARMUP_STEPS - 1):
        timed(step, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = [timed(step, device) for _ in range(steps)]
    median = statistics.median(seconds)
    # the pretended GPU's clock stands still
    if PRETENDED:
        median = 1.0
    values = {
        "tokens_per_second": round(num_targets / median),
        "seconds": median,
        "spread": [min(seconds), max(seconds)],
        "host_seconds": statistics.median(host_seconds[-steps:]),
        "first_step": first_step,
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "losses": [float(losses[0]), float(losses[-1])],
    }
    peak = peak_flops(device, "bf16")
    if peak:
        values["mfu"] = contender.flops(samples) / median / peak
    if device.type == "cuda":
        values["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        values["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        values["planned_gib"] = _planned(trained, setting)
    return values


def kernel_table(step: Callable[[], Any], name: str, folder: Path) -> Values:
    """Run a step under the profiler; return its launches and milliseconds, and append the table of
    its kernels to kernels.txt."""
    on_gpu = torch.cuda.is_available() and not PRETENDED
    microseconds: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    starts = []
    ends = []
    for event in kernels_of(profiled(step, on_gpu), on_gpu):
        kernel = event.name[:110]
        microseconds[kernel] += event.time_range.elapsed_us()
        launches[kernel] += 1
        starts.append(event.time_range.start)
        ends.append(event.time_range.end)
    total = sum(microseconds.values()) or 1
    span = max(ends, default=0) - min(starts, default=0)
    count = sum(launches.values())

    lines = [
        f"\n== {name}: {count} launches, {total / 1000:.1f} ms in {span / 1000:.1f} ms"
    ]
    for kernel, time_of in microseconds.most_common(SHOWN_KERNELS):
        share = f"{time_of / total:6.2%} {time_of / 1000:9.2f} ms"
        lines.append(f"{share} {launches[kernel]:6} x {kernel}")
    with (folder / "kernels.txt").open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return {"launches": count, "kernel_ms": total / 1000, "span_ms": span / 1000}


def measure_kernels(
    figures: Figures, title: str, step: Callable[[], Any], folder: Path
) -> None:
    """Write the kernels of a step; title: that of its other figures."""
    figures.measure(f"kernels of {title}", lambda: kernel_table(step, title, folder))


def measure_lora(figures: Figures, model: str, device: torch.device, folder: Path) -> None:
    """LoRA steps: compiled over long and short documents, then eager."""
    measure_ceilings(figures, device)
    trained = prepare(model, "none", device)
    first = Setting(4, 2048, 2048) if device.type == "cuda" else Setting(1, 64, 64)
    title = f"{trained.title} {first}"
    # the kernels of a first step would be those of compiling, too
    if figures.measure(title, lambda: measure_steps(trained, first), needs=30):
        measure_kernels(figures, title, _step(trained, first), folder)
    if device.type != "cuda":  # a CPU only tries the command
        return

    settings = (
        Setting(1, 2048, 2048),
        Setting(4, 2048, 64),
        Setting(1, 8192, 8192),
        Setting(1, 8192, 64),
    )
    for setting in settings:
        _measure(figures, trained, setting)
    run_uncompiled(_network(trained), "it is measured eager, too")
    eager = Trained(model, "none", False, trained.contender, device)
    for setting in (Setting(4, 2048, 2048), Setting(1, 2048, 2048)):
        _measure(figures, eager, setting)


def measure_qlora(figures: Figures, model: str, device: torch.device, folder: Path) -> None:
    """QLoRA steps on a base in nf4."""
    trained = prepare(model, "nf4", device)
    if device.type != "cuda":
        _measure(figures, trained, Setting(1, 64, 64))
        return
    for rows in (4, 1):
        setting = Setting(rows, 2048, 2048)
        if _measure(figures, trained, setting):
            title = f"{trained.title} {setting}"
            measure_kernels(figures, title, _step(trained, setting), folder)


def measure_recomputation(
    figures: Figures, model: str, device: torch.device, folder: Path
) -> None:
    """The first LoRA step, with gates and norms recomputed in the backward pass."""
    trained = prepare(model, "none", device, "elementwise")
    setting = Setting(4, 2048, 2048) if device.type == "cuda" else Setting(1, 64, 64)
    figures.measure(
        f"{trained.title} {setting}, gates and norms recomputed",
        lambda: measure_steps(trained, setting),
        needs=25,
    )


def measure_ceilings(figures: Figures, device: torch.device) -> None:
    """The copy bandwidth and the speed of a large product, which bound everything else."""

    def bandwidth() -> Values:
        return {"tb_per_second": copy_speed(device) / 1e12}

    def product() -> Values:
        size = PRODUCT_SIZE if device.type == "cuda" else 256
        a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        b = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        seconds = [timed(lambda: a @ b, device) for _ in range(15)]
        median = max(statistics.median(seconds[5:]), 1e-9)
        return {"tflops": 2 * size**3 / median / 1e12}

    figures.measure("copy bandwidth", bandwidth)
    figures.measure("matrix product in bf16", product)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _measure(figures: Figures, trained: Trained, setting: Setting) -> bool:
    return figures.measure(
        f"{trained.title} {setting}", lambda: measure_steps(trained, setting)
    )


def _step(trained: Trained, setting: Setting) -> Callable[[], float]:
    """Return a function that takes one step."""
    samples, num_targets = _samples(trained.contender, setting)
    return lambda: trained.contender.step(samples, num_targets)


def _samples(contender: Litft, setting: Setting) -> tuple[list[Any], int]:
    """Return the random samples of a step, and the number of their targets."""
    contender.layout = batch_layout(setting.rows, setting.tokens)
    rng = random.Random(0)
    vocab_size = contender.model.module.config.vocab_size
    count = setting.rows * setting.tokens // setting.document
    samples = []
    for _ in range(count):
        ids = [rng.randrange(vocab_size) for _ in range(setting.document + 1)]
        samples.append((ids[:-1], ids[1:]))
    return contender.samples(samples), count * setting.document


def _planned(trained: Trained, setting: Setting) -> float:
    """Return the planned peak in GiB."""
    cell = Cell(
        model=trained.model,
        method="lora",
        precision="bf16",
        quantize=trained.quantize,
        rows=setting.rows,
        tokens=setting.tokens,
        recomputed=trained.recomputed,
        compiled=trained.compiled,
        micro_batches=1,
    )
    return planned_peak(cell, trained.device.type)


def _network(trained: Trained) -> Any:
    """Return the network inside of Fabric's module."""
    return trained.contender.model.module
