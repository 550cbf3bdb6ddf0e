"""The fine-tuning scripts over a grid of flags, each run in a process of its own; prints a Markdown table.

    python scripts/sweep.py --grid methods --checkpoint_dir DIR --data.path FILE --flags="--train.epochs 1"

A run that is finished is not repeated, so that a sweep goes on where it was stopped. Without --checkpoint_dir the embedded
demo is trained by its recipes.
"""

import csv
import re
import shlex
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from litft import run_dir
from litft.args import (
    AdapterFinetuneArgs,
    AdapterV2FinetuneArgs,
    DataArgs,
    FullFinetuneArgs,
    LoRAFinetuneArgs,
    impossible_numbers,
)
from litft.args.parser import parse
from litft.cli import fail, user_errors

ROOT = Path(__file__).parent.parent
METHODS = {
    "full": FullFinetuneArgs,
    "lora": LoRAFinetuneArgs,
    "adapter": AdapterFinetuneArgs,
    "adapter_v2": AdapterV2FinetuneArgs,
}


class Cell(NamedTuple):
    """One run of the grid."""

    label: str
    method: str
    flags: str


def methods() -> list[Cell]:
    """Every method and every kin of LoRA once, as the defaults have it."""
    kin = {"rsLoRA": "--lora.rslora", "DoRA": "--lora.dora", "PiSSA": "--lora.init pissa", "OLoRA": "--lora.init olora"}
    kin |= {"LoRA+ (ratio 16)": "--lora.lr_ratio 16", "LoRA on nf4": "--quantize nf4", "LoRA on int8": "--quantize int8"}
    cells = [
        Cell("full", "full", ""),
        Cell("LoRA", "lora", ""),
        *(Cell(label, "lora", flags) for label, flags in kin.items()),
    ]
    return [*cells, Cell("LLaMA-Adapter v1", "adapter", ""), Cell("LLaMA-Adapter v2", "adapter_v2", "")]


def rates() -> list[Cell]:
    """Learning rates three apart, four of each method."""
    grid = {"full": (1e-5, 3e-5, 1e-4, 3e-4), "lora": (1e-4, 3e-4, 1e-3, 3e-3)}
    grid |= {"adapter": (1e-3, 3e-3, 1e-2, 3e-2), "adapter_v2": (3e-4, 1e-3, 3e-3, 1e-2)}
    return [Cell(f"{m} {rate:g}", m, f"--train.learning_rate {rate}") for m, values in grid.items() for rate in values]


def halves() -> list[Cell]:
    """Each method at half, once and double its default rate."""
    cells = []
    for method, args in METHODS.items():
        rate = args().train.learning_rate
        cells += [
            Cell(f"{method} {part:g} x {rate:g}", method, f"--train.learning_rate {rate * part}") for part in (0.5, 1, 2)
        ]
    return cells


def shapes() -> list[Cell]:
    """LoRA's rank, targets and batch, and the adapters' sizes."""
    cells = [Cell(f"lora, r {r}", "lora", f"--lora.r {r} --lora.alpha {2 * r}") for r in (4, 8, 16, 32)]
    cells += [Cell(f"lora, {t}", "lora", f"--lora.targets {t}") for t in ("q_proj,v_proj", "q_proj,k_proj,v_proj,o_proj")]
    cells += [Cell(f"lora, batch {b}", "lora", f"--train.global_batch_size {b}") for b in (8, 16, 32)]
    cells += [Cell(f"adapter, {n} prompts", "adapter", f"--adapter.prompt_length {n}") for n in (5, 10, 20)]
    return cells + [Cell(f"adapter, from layer {n}", "adapter", f"--adapter.start_layer {n}") for n in (0, 2)]


GRIDS = {"methods": methods, "rates": rates, "halves": halves, "shapes": shapes}


@dataclass
class SweepArgs:
    """Run the fine-tuning scripts over a grid."""

    grid: Literal["methods", "rates", "halves", "shapes"] = "methods"
    """methods: each once. rates: four of each method. halves: each at half, once and double its default. shapes: ranks,
    targets, batches, prefixes."""
    checkpoint_dir: str | None = None
    """The model's folder. Default: the embedded demo."""
    flags: str = ""
    """Flags of every run, as one text behind a =: --flags="--train.epochs 1"."""
    out_dir: str = "out/sweep"
    """The folder of the runs."""
    data: DataArgs = field(default_factory=DataArgs)

    def problems(self) -> list[str]:
        """What is missing."""
        missing = self.checkpoint_dir and not self.data.path
        return impossible_numbers(self) + (["--data.path is missing: name the file of examples"] if missing else [])


class Figures(NamedTuple):
    """What a run has shown."""

    trained: int
    memory: float
    speed: float
    before: float
    after: float


def run(cell: Cell, args: SweepArgs, number: int) -> Figures:
    """Run one cell, or read what its finished run has left."""
    folder = Path(args.out_dir) / f"{number:02d}-{re.sub(r'[^a-z0-9.]+', '-', cell.label.lower())}"
    log = folder.with_suffix(folder.suffix + ".log")
    if not (run_dir.is_run(folder) and run_dir.finished(folder) and log.is_file()):
        where = (
            ["--checkpoint_dir", args.checkpoint_dir, "--data.path", ",".join(args.data.path)] if args.checkpoint_dir else []
        )
        words = [*where, "--out_dir", str(folder), "--overwrite", *shlex.split(args.flags), *shlex.split(cell.flags)]
        command = [sys.executable, str(ROOT / "finetune" / f"{cell.method}.py"), *words]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            fail(f"{cell.label}: {shlex.join(command)}\n{done.stderr[-2000:]}")
        log.write_text(done.stdout, "utf-8")
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["val_loss"]) for row in rows if row["val_loss"]]
    trained = re.search(r" trains ([\d,]+)", log.read_text("utf-8"))[1]
    speed = statistics.median(float(row["tokens_per_second"]) for row in rows[1:])
    return Figures(int(trained.replace(",", "")), float(rows[-1]["memory_gib"]), speed, losses[0], losses[-1])


def main(args: SweepArgs) -> None:
    """Run every cell, and print a line of the table after each."""
    Path(args.out_dir).mkdir(parents=True, exist_ok=True)
    print("| | trained parameters | peak memory, GiB | tokens/s | validation loss |\n|---|---|---|---|---|")
    for number, cell in enumerate(GRIDS[args.grid]()):
        found = run(cell, args, number)
        sizes = f"{found.trained:,} | {found.memory:.2f} | {found.speed:,.0f}"
        print(f"| {cell.label} | {sizes} | {found.before:.4f} → {found.after:.4f} |", flush=True)


if __name__ == "__main__":
    with user_errors():
        main(parse(SweepArgs, sys.argv[1:]))
