"""The launches of a training step, and the kernels' shares of its time, from torch's profiler.

    python scripts/profile_step.py --checkpoint_dir scripts/configs/llama-3.1-8b
    --data.max_seq_length 2048

Takes the flags of scripts/benchmark.py. Weights are random. On a CPU, operators are counted instead
of kernels.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmark import BenchmarkArgs, write_setup

from litft.args.parser import parse
from litft.cli import user_errors

TOP = 15
# tests/gpu/README.md: its kernels take no time
PRETENDED = "LITFT_PRETENDED_GPU" in os.environ


def first_step(args: BenchmarkArgs, device: str) -> tuple[Any, list[Any], int]:
    """Return the litft contender of the benchmark, the samples of a step, and their number of
    targets."""
    sys.path.insert(0, str(Path(__file__).parent / "peers"))
    from run_litft import Litft

    with TemporaryDirectory() as folder:
        contender = Litft(write_setup(args, device, Path(folder)))
        raw = json.loads((Path(folder) / "samples.json").read_text())[
            : args.train.global_batch_size
        ]
    return (
        contender,
        contender.samples(raw),
        sum(target >= 0 for _, targets in raw for target in targets),
    )


def profiled(step: Callable[[], Any], on_gpu: bool) -> list[Any]:
    """Run a step under the profiler, and return its events."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return list(profiler.events())


def kernels_of(events: list[Any], on_gpu: bool) -> list[Any]:
    """Return the events that are kernels, or on a CPU operators.

    Annotations span kernels, and would be counted as more of them.
    """
    from torch.profiler import DeviceType

    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    kernels = []
    for event in events:
        if event.device_type == wanted and not getattr(event, "is_user_annotation", False):
            kernels.append(event)
    return kernels


def main(args: BenchmarkArgs) -> None:
    """Profile the third step and print the table."""
    import torch
    from torch.profiler import DeviceType

    from litft.distributed.devices import pick_accelerator, pick_precision

    device = pick_accelerator(args.accelerator)
    args.precision = pick_precision(args.precision, torch.device(device))
    contender, samples, count = first_step(args, device)
    for _ in range(2):
        contender.step(samples, count)
    on_gpu = device == "cuda" and not PRETENDED
    events = profiled(lambda: contender.step(samples, count), on_gpu)
    kernels = kernels_of(events, on_gpu)
    microseconds = Counter()
    launches = Counter()
    for event in kernels:
        name = event.name[:70]
        microseconds[name] += (
            event.self_device_time_total if on_gpu else event.self_cpu_time_total
        )
        launches[name] += 1
    total = sum(microseconds.values()) or 1
    host = Counter(event.name for event in events if event.device_type == DeviceType.CPU)
    waits = sum(
        count
        for name, count in host.items()
        if name in ("cudaStreamSynchronize", "cudaDeviceSynchronize")
    )
    figures = {
        "launches": sum(launches.values()),
        "waits": waits,
        "milliseconds": total / 1000,
        "shares": {
            name: [round(time / total, 4), launches[name]]
            for name, time in microseconds.most_common(TOP)
        },
    }
    print(f"{figures['launches']} launches, {waits} waits, {total / 1000:.1f} ms")
    for name, (share, count) in figures["shares"].items():
        print(f"{share:6.1%} {count:5} x {name}")
    if args.out:
        Path(args.out).write_text(json.dumps(figures), "utf-8")


if __name__ == "__main__":
    with user_errors():
        main(parse(BenchmarkArgs, sys.argv[1:]))
