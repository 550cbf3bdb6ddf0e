"""How near the plan's memory is to what steps really take, over a grid of models, methods, lengths and recomputation.

    python scripts/plan_accuracy.py --checkpoint_dirs llama-1b,llama-3b,llama-8b --out accuracy.json

Each cell is two steps of two micro-batches on random weights, by scripts/benchmark.py in a process of its own; folders with
a config.json suffice. Cells that are in the file already are not measured again, so that a grid may be interrupted. On a GPU
what is measured is `max_memory_allocated`; on a CPU it is the process's memory, of which the plan knows only the tensors.
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
from litft.cli import fail, user_errors
from litft.run_dir import atomic_write

BENCHMARK = Path(__file__).parent / "benchmark.py"
Cells = dict[str, dict[str, Any]]
METHODS = {"full": ("full", "none"), "lora": ("lora", "none"), "qlora": ("lora", "nf4")}  # (method, quantize)


@dataclass
class AccuracyArgs:
    """Compare planned with measured memory."""

    checkpoint_dirs: list[str] = field(default_factory=list)
    """Folders with a config.json."""
    methods: list[Literal["full", "lora", "qlora"]] = field(default_factory=lambda: ["full", "lora", "qlora"])
    """What is trained; qlora: LoRA on weights in NF4."""
    lengths: list[int] = field(default_factory=lambda: [512, 2048, 8192])
    """Tokens of a row; a micro-batch is one."""
    activation_checkpointing: list[Literal["none", "selective", "full"]] = field(default_factory=lambda: ["none", "full"])
    """What is recomputed."""
    precision: Literal["bf16", "bf16-true", "fp32"] = "bf16"
    """What the network computes in."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""
    out: str = "plan_accuracy.json"
    """The file that is written after each cell, and gone on with."""

    def problems(self) -> list[str]:
        """What is missing."""
        found = [] if self.checkpoint_dirs else ["--checkpoint_dirs is missing: name folders with a config.json"]
        if min(self.lengths, default=0) < 1:
            found.append(f"--lengths {self.lengths}: name at least one, each at least 1")
        if self.precision == "bf16-true" and self.methods != ["full"]:
            found.append("--precision bf16-true: of full fine-tuning; add --methods full")
        return found


def planned(folder: str, kind: str, length: int, recomputed: str, precision: str, device: str) -> float:
    """The plan's peak, in GiB."""
    from litft.args import FullFinetuneArgs, LoRAFinetuneArgs
    from litft.methods import method_of
    from litft.pretrained import resolve
    from litft.training.memory_plan import Shape, predict

    source = resolve(folder)
    method = method_of(FullFinetuneArgs() if kind == "full" else LoRAFinetuneArgs())
    method.choose(source.meta_model(), source.adapter_rules)
    shape = Shape(1, length, accumulated=True)
    found = predict(source, method, precision, METHODS[kind][1], shape, recomputed=recomputed, device=device)
    return found.memory.peak / 2**30


def measured(folder: str, kind: str, length: int, recomputed: str, precision: str, device: str) -> float | None:
    """What steps take at their peak, in GiB; None where they fail, most likely for want of memory."""
    method, quantize = METHODS[kind]
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "figures.json"
        command = [sys.executable, str(BENCHMARK), "--checkpoint_dir", folder, "--method", method, "--quantize", quantize]
        command += ["--precision", precision, "--accelerator", device, "--data.max_seq_length", str(length)]
        command += ["--train.micro_batch_size", "1", "--train.global_batch_size", "2", "--train.compile", "false"]
        command += ["--train.activation_checkpointing", recomputed, "--steps", "1", "--warmup", "1", "--out", str(out)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())["figures"]["litft"]["peak_memory_gib"] if done.returncode == 0 else None


def begun(path: Path) -> Cells:
    """What the file holds; it is written at once, so that what cannot be written is told before anything is measured."""
    try:
        cells = json.loads(path.read_text("utf-8")) if path.exists() else {}
        known = all(cell.keys() >= {"planned_gib", "measured_gib", "off_by"} for cell in cells.values())
    except (ValueError, AttributeError):
        known = False
    if not known:
        raise ValueError(f"{path} is not what this script writes; remove it, or name another --out")
    write(path, cells)
    return cells


def write(path: Path, cells: Cells) -> None:
    """All cells, or the file as it was."""
    atomic_write(path, json.dumps(cells, indent=2) + "\n")


def main(args: AccuracyArgs) -> None:
    """Measure what the file lacks, and say how far the plan is off."""
    from litft.distributed.devices import pick_accelerator

    path, device = Path(args.out), pick_accelerator(args.accelerator)
    cells = begun(path)
    grid = list(itertools.product(args.checkpoint_dirs, args.methods, args.lengths, args.activation_checkpointing))
    for folder, kind, length, recomputed in grid:
        key = f"{folder} {kind} {length} {recomputed} {args.precision} {device}"
        if key not in cells:
            cell = (folder, kind, length, recomputed, args.precision, device)
            plan, peak = planned(*cell), measured(*cell)
            cells[key] = {"planned_gib": plan, "measured_gib": peak, "off_by": peak and plan / peak - 1}
            write(path, cells)
        row = cells[key]
        off = f"{row['measured_gib']:.2f} GiB measured, {row['off_by']:+.1%}" if row["measured_gib"] else "did not run"
        print(f"{key}: {row['planned_gib']:.2f} GiB planned, {off}", flush=True)
    off = [abs(row["off_by"]) for row in cells.values() if row["off_by"] is not None]
    if not off:
        fail("no cell of the grid has run")
    print(f"{len(off)} cells of {len(cells)} ran; the plan is off by {max(off):.1%} at most")


if __name__ == "__main__":
    with user_errors():
        main(parse(AccuracyArgs, sys.argv[1:]))
