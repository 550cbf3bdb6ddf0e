"""Compare the peak memory that the plan predicts with measured steps, over models, methods, lengths and recomputation.

    python scripts/plan_accuracy.py --checkpoint_dirs llama-1b,llama-3b,llama-8b --out accuracy.json

Each cell runs two steps of two micro-batches on random weights, in its own process, by scripts/benchmark.py. Folders with
only a config.json suffice. Cells that are already in the file are not measured again, so an interrupted grid continues. On
a GPU, `max_memory_allocated` is measured; on a CPU, the memory of the process, of which the plan covers only the tensors.
"""

import itertools
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from litft.args.parser import parse
from litft.atomic import atomic_write
from litft.cli import fail, user_errors

BENCHMARK = Path(__file__).parent / "benchmark.py"
Cells = dict[str, dict[str, Any]]
METHODS = {"full": ("full", "none"), "lora": ("lora", "none"), "qlora": ("lora", "nf4")}  # by name: (method, quantize)


@dataclass
class AccuracyArgs:
    """Compare planned with measured peak memory."""

    checkpoint_dirs: list[str] = field(default_factory=list)
    """Folders with a config.json."""
    methods: list[Literal["full", "lora", "qlora"]] = field(default_factory=lambda: ["full", "lora", "qlora"])
    """The training methods. qlora: LoRA on an NF4-quantized base."""
    lengths: list[int] = field(default_factory=lambda: [512, 2048, 8192])
    """Tokens per row; a micro-batch has one row."""
    activation_checkpointing: list[Literal["none", "selective", "full"]] = field(default_factory=lambda: ["none", "full"])
    """The kinds of activation checkpointing."""
    precision: Literal["bf16", "bf16-true", "fp32"] = "bf16"
    """The dtype of the computation. bf16-true (full fine-tuning only): the weights are bf16 too."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """The device type to run on. auto: cuda if available."""
    out: str = "plan_accuracy.json"
    """The JSON file to write after each cell. Cells already in it are kept."""

    def problems(self) -> list[str]:
        """Return the problems of the flags."""
        problems = [] if self.checkpoint_dirs else ["--checkpoint_dirs is missing: name folders with a config.json"]
        if min(self.lengths, default=0) < 1:
            problems.append(f"--lengths {self.lengths}: name at least one length, each at least 1")
        if self.precision == "bf16-true" and self.methods != ["full"]:
            problems.append("--precision bf16-true applies only to full fine-tuning; add --methods full")
        return problems


def planned_peak(folder: str, kind: str, length: int, recompute: str, precision: str, device: str) -> float:
    """Return the peak memory of the plan, in GiB."""
    from litft.args import FullFinetuneArgs, LoRAFinetuneArgs
    from litft.methods import method_of
    from litft.pretrained import resolve
    from litft.training.memory_plan import Shape, predict

    source = resolve(folder)
    method = method_of(FullFinetuneArgs() if kind == "full" else LoRAFinetuneArgs())
    method.choose(source.meta_model(), source.adapter_rules)
    shape = Shape(1, length, accumulated=True)
    plan = predict(source, method, precision, METHODS[kind][1], shape, recomputed=recompute, device=device)
    return plan.memory.peak / 2**30


def measured_peak(folder: str, kind: str, length: int, recompute: str, precision: str, device: str) -> float | None:
    """Return the measured peak memory of the steps, in GiB, or None if they fail (most likely out of memory)."""
    method, quantize = METHODS[kind]
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "figures.json"
        command = [sys.executable, str(BENCHMARK), "--checkpoint_dir", folder, "--method", method, "--quantize", quantize]
        command += ["--precision", precision, "--accelerator", device, "--data.max_seq_length", str(length)]
        command += ["--train.micro_batch_size", "1", "--train.global_batch_size", "2", "--train.compile", "false"]
        command += ["--train.activation_checkpointing", recompute, "--steps", "1", "--warmup", "1", "--out", str(out)]
        process = subprocess.run(command, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())["figures"]["litft"]["peak_memory_gib"] if process.returncode == 0 else None


def load_cells(path: Path) -> Cells:
    """Return the cells in the file. Write it at once, so that an unwritable path fails before the first measurement.

    Raise ValueError if the file was not written by this script.
    """
    try:
        cells = json.loads(path.read_text("utf-8")) if path.exists() else {}
        is_valid = all(cell.keys() >= {"planned_gib", "measured_gib", "off_by"} for cell in cells.values())
    except (ValueError, AttributeError):
        is_valid = False
    if not is_valid:
        raise ValueError(f"--out {path}: the file was not written by this script; remove it or name another file")
    write(path, cells)
    return cells


def write(path: Path, cells: Cells) -> None:
    """Write all cells atomically: an interrupted write leaves the old file."""
    atomic_write(path, json.dumps(cells, indent=2) + "\n")


def main(args: AccuracyArgs) -> None:
    """Measure the cells that the file lacks, and print the errors of the plan."""
    from litft.distributed.devices import pick_accelerator

    path, device = Path(args.out), pick_accelerator(args.accelerator)
    cells = load_cells(path)
    grid = list(itertools.product(args.checkpoint_dirs, args.methods, args.lengths, args.activation_checkpointing))
    for folder, kind, length, recompute in grid:
        key = f"{folder} {kind} {length} {recompute} {args.precision} {device}"
        if key not in cells:
            cell = (folder, kind, length, recompute, args.precision, device)
            plan, peak = planned_peak(*cell), measured_peak(*cell)
            cells[key] = {"planned_gib": plan, "measured_gib": peak, "off_by": peak and plan / peak - 1}
            write(path, cells)
        row = cells[key]
        measurement = (
            f"{row['measured_gib']:.2f} GiB measured, {row['off_by']:+.1%}" if row["measured_gib"] else "the steps failed"
        )
        print(f"{key}: {row['planned_gib']:.2f} GiB planned, {measurement}", flush=True)
    errors = [abs(row["off_by"]) for row in cells.values() if row["off_by"] is not None]
    if not errors:
        fail("no cell of the grid could be measured; the errors of the steps are above")
    print(f"{len(errors)} cells of {len(cells)} ran; the plan is off by at most {max(errors):.1%}")


if __name__ == "__main__":
    with user_errors():
        main(parse(AccuracyArgs, sys.argv[1:]))
