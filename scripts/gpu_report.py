"""Everything that only a GPU can show, in one command: call it again until it says that it is done.

    python scripts/gpu_report.py --minutes 8 --out report.json

Needs a GPU, and no other file than this repository: weights are random. Parts run in order of
worth, each within its own limit; each result is written at once, and what is in the file is not
measured again. The page is written next to it (report.md). `--models tiny --accelerator cpu` tries
the command itself on a CPU.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal, NamedTuple

from litft.args.parser import parse
from litft.atomic import atomic_write
from litft.cli import user_errors

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
CELL_MINUTES = 2  # of the plan's cells in one part
CELL_PARTS = 4


@dataclass
class ReportArgs:
    """Measure on a GPU what only a GPU can show."""

    minutes: float = 8.0
    """Begin no part whose limit could end after this time, but at least one: an answer may take 8
    minutes."""
    out: str = "report.json"
    """The JSON file of the results; the Markdown page has the same name."""
    models: list[str] = field(
        default_factory=lambda: ["llama-3.1-8b", "llama-3.2-3b", "llama-3.2-1b"]
    )
    """Names of folders in scripts/configs, the largest first."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """The device type to run on. auto: cuda if available."""
    tokens: int = 2048
    """Tokens of a row in training."""

    def problems(self) -> list[str]:
        """Return the problems of the flags."""
        missing = []
        for name in self.models:
            if not (SCRIPTS / "configs" / name).is_dir():
                missing.append(name)
        return [f"--models {name}: no folder of scripts/configs has this name" for name in missing]


class Part(NamedTuple):
    """One measurement: a command that writes its result to a file."""

    name: str
    command: list[str]  # OUT stands for the file
    limit: int  # seconds


def training(args: ReportArgs, device: str) -> list[Part]:
    """Return the parts about training steps: LoRA beside transformers and peft, then QLoRA and full
    fine-tuning."""
    common = [
        "scripts/benchmark.py",
        "--accelerator",
        device,
        "--precision",
        "bf16",
        "--steps",
        "6",
        "--warmup",
        "2",
    ]
    common += ["--data.max_seq_length", str(args.tokens), "--out", "OUT"]
    parts = []
    for name in args.models:
        model = ["--checkpoint_dir", f"scripts/configs/{name}"]
        for rows in (1, 4):
            shape = [
                "--train.micro_batch_size",
                str(rows),
                "--train.global_batch_size",
                str(2 * rows),
            ]
            peers = ["--peer", "peft" + ("" if rows == 4 else ",eager")]
            parts.append(
                Part(
                    f"{name}: LoRA, {rows} x {args.tokens}", [*common, *model, *shape, *peers], 150
                )
            )
        quantized = [
            "--quantize",
            "nf4",
            "--train.micro_batch_size",
            "1",
            "--train.global_batch_size",
            "2",
        ]
        parts.append(Part(f"{name}: QLoRA, 1 x {args.tokens}", [*common, *model, *quantized], 120))
    full = ["--method", "full", "--train.micro_batch_size", "1", "--train.global_batch_size", "2"]
    model = ["--checkpoint_dir", f"scripts/configs/{args.models[-1]}"]
    return [
        *parts,
        Part(f"{args.models[-1]}: full, 1 x {args.tokens}", [*common, *model, *full], 120),
    ]


def decoding(args: ReportArgs, device: str) -> list[Part]:
    """Return the parts about decoding: short and long prompts, one row and eight."""
    common = [
        "scripts/decode_speed.py",
        "--only_litft",
        "--compile",
        "true",
        "--new_tokens",
        "48",
        "--rounds",
        "3",
    ]
    common += ["--accelerator", device, "--out", "OUT"]
    shapes = [(32, 1), (32, 8), (2000, 1), (2000, 8)]
    if device == "cpu":  # which only tries the command; each part takes half a minute to compile
        shapes = [(32, 8)]
    parts = []
    for name in dict.fromkeys((args.models[0], args.models[-1])):
        for prompt, rows in shapes:
            shape = ["--prompt_tokens", str(prompt), "--rows", str(rows)]
            command = [*common, "--checkpoint_dir", f"scripts/configs/{name}", *shape]
            parts.append(Part(f"{name}: decode, {rows} x {prompt} + 48 tokens", command, 150))
    return parts


def parts(args: ReportArgs, device: str) -> list[Part]:
    """Return all parts in order of worth."""
    tests = [
        "-m",
        "pytest",
        "tests/gpu",
        "-m",
        "quick",
        "-q",
        "--junitxml",
        "OUT",
        "-p",
        "no:cacheprovider",
    ]
    tests += ["-n", "4" if device == "cuda" else "0"]
    cells = [
        "scripts/plan_accuracy.py",
        "--accelerator",
        device,
        "--minutes",
        str(CELL_MINUTES),
        "--out",
        "CELLS",
    ]
    if device == "cpu":
        tests += ["--deselect", "tests/gpu"]  # all of them need a GPU
        cells += ["--cells", f"{args.models[0]} lora fp32 none 1 64 none eager 1"]
    profile = [
        "scripts/profile_step.py",
        "--accelerator",
        device,
        "--precision",
        "bf16",
        "--out",
        "OUT",
    ]
    profile += [
        "--checkpoint_dir",
        f"scripts/configs/{args.models[0]}",
        "--data.max_seq_length",
        str(args.tokens),
    ]
    profile += ["--train.micro_batch_size", "1", "--train.global_batch_size", "1"]
    all_parts = [Part("quick half of tests/gpu", tests, 450), *training(args, device)]
    all_parts += [
        Part(f"plan, part {number + 1}", cells, 60 * CELL_MINUTES + 120)
        for number in range(CELL_PARTS)
    ]
    all_parts += [
        *decoding(args, device),
        Part(f"{args.models[0]}: kernels of a step", profile, 150),
    ]
    if device == "cuda":
        all_parts.append(
            Part("attention on packed rows", ["scripts/attention_speed.py", "--out", "OUT"], 120)
        )
        all_parts += several_gpus(args)
    return all_parts


def several_gpus(args: ReportArgs) -> list[Part]:
    """Return the parts that need several GPUs: the largest model's step on 1, 2, 4 and 8, with DDP
    and FSDP2."""
    import torch

    counts = []
    for count in (1, 2, 4, 8):
        if 1 < torch.cuda.device_count() >= count:
            counts.append(count)
    parts = []
    for devices, strategy in [(1, "single")] * bool(counts) + [
        (n, name) for n in counts for name in ("ddp", "fsdp")
    ]:
        command = [
            "scripts/scaling_step.py",
            "--devices",
            str(devices),
            "--strategy",
            strategy,
            "--model",
            args.models[0],
        ]
        parts.append(
            Part(
                f"{args.models[0]}: {strategy} on {devices}",
                [*command, "--tokens", str(args.tokens), "--out", "OUT"],
                240,
            )
        )
    return parts


def measure(part: Part, cells: Path) -> dict[str, Any]:
    """Run a part; return its result, or what went wrong, with the seconds that it took."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        words = [{"OUT": str(out), "CELLS": str(cells)}.get(word, word) for word in part.command]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, start_new_session=True, **pipes
        )
        try:
            stdout, stderr = process.communicate(timeout=part.limit)
            result: dict[str, Any] = {"exit": process.returncode, "tail": stdout[-2500:]}
            if process.returncode:
                result["error"] = stderr[-2500:].strip() or stdout[-2500:]
        except subprocess.TimeoutExpired:
            # its children too: they would disturb the next part
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            result = {"error": f"ended after its limit of {part.limit} s"}
        if out.is_file():
            text = out.read_text("utf-8")
            if text.startswith("{"):
                result["result"] = json.loads(text)
            else:
                result["result"] = text[:300]
            if isinstance(result["result"], dict):
                result["result"].pop("steps", None)
                result["result"].pop("args", None)
    return {**result, "seconds": round(time.monotonic() - start, 1)}


def page(report: dict[str, Any]) -> str:
    """Return the Markdown page of a report."""
    lines = [
        f"# litft on {report['hardware']}",
        "",
        f"torch {report['torch']}, {report['date']}, `scripts/gpu_report.py`",
        "",
    ]
    for name, part in report["parts"].items():
        if part.get("error"):
            state = f"failed: {part['error'].strip().splitlines()[-1][:200]}"
        else:
            state = "done"
        lines += [
            f"## {name}",
            "",
            f"{state} ({part['seconds']} s)",
            "",
            "```text",
            part.get("tail", "").strip(),
            "```",
            "",
        ]
    return "\n".join(lines)


def main(args: ReportArgs) -> None:
    """Run the parts that the file lacks until the time is over."""
    import torch

    from litft.distributed.devices import machine_lines, pick_accelerator

    start = time.monotonic()
    path = Path(args.out)
    device = pick_accelerator(args.accelerator)
    hardware, _ = machine_lines(torch.device(device), 1)
    fresh = {
        "hardware": hardware,
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "parts": {},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        report = json.loads(path.read_text("utf-8"))
    else:
        report = fresh
    every_part = parts(args, device)
    remaining = [part for part in every_part if part.name not in report["parts"]]
    for number, part in enumerate(remaining):
        # the first part always begins
        if number and time.monotonic() - start + part.limit > 60 * args.minutes:
            print(f"{len(remaining) - number} of {len(every_part)} parts are left; call it again")
            return
        result = measure(part, path.with_suffix(".cells.json").resolve())
        report["parts"][part.name] = result
        atomic_write(path, json.dumps(report, indent=2) + "\n")
        atomic_write(path.with_suffix(".md"), page(report))
        print(
            f"{part.name}: {'failed' if result.get('error') else 'done'} in {result['seconds']} s",
            flush=True,
        )
    print(f"done: {path.with_suffix('.md')}")


if __name__ == "__main__":
    with user_errors():
        main(parse(ReportArgs, sys.argv[1:]))
