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
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmark import BenchmarkArgs, write_setup

from litft.args.parser import parse
from litft.cli import user_errors

TOP = 15


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


def main(args: BenchmarkArgs) -> None:
    """Profile the third step and print the table."""
    import torch
    from torch.profiler import DeviceType, ProfilerActivity, profile

    from litft.distributed.devices import pick_accelerator, pick_precision

    device = pick_accelerator(args.accelerator)
    args.precision = pick_precision(args.precision, torch.device(device))
    contender, samples, count = first_step(args, device)
    for _ in range(2):
        contender.step(samples, count)
    # tests/gpu/README.md; its kernels take no time
    on_gpu = device == "cuda" and "LITFT_PRETENDED_GPU" not in os.environ
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    ) as profiler:
        contender.step(samples, count)
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    kernels = []
    for event in profiler.events():
        # annotations span kernels, and would be counted as one more
        if event.device_type == wanted and not getattr(event, "is_user_annotation", False):
            kernels.append(event)
    microseconds = Counter()
    launches = Counter()
    for event in kernels:
        name = event.name[:70]
        microseconds[name] += event.self_device_time_total if on_gpu else event.self_cpu_time_total
        launches[name] += 1
    total = sum(microseconds.values()) or 1
    host = Counter(event.name for event in profiler.events() if event.device_type == DeviceType.CPU)
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
