"""Run the fine-tuning scripts over a grid of flags, one process per run, and print a Markdown
table.

    python scripts/method_table.py --grid methods --checkpoint_dir DIR --data.path FILE
    --flags="--train.epochs 1"

Finished runs are not repeated, so an interrupted sweep continues where it stopped. Without
--checkpoint_dir, the runs train the embedded demo with its recipes.
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
    """Return a cell for every method and every variant of LoRA, with default flags."""
    variants = {
        "rsLoRA": "--lora.rslora --lora.alpha 16",
        "DoRA": "--lora.dora",
        "PiSSA": "--lora.init pissa",
        "OLoRA": "--lora.init olora",
    }
    variants |= {
        "LoRA+ (ratio 16)": "--lora.lr_ratio 16",
        "LoRA on nf4": "--quantize nf4",
        "LoRA on int8": "--quantize int8",
    }
    cells = [
        Cell("full", "full", ""),
        Cell("LoRA", "lora", ""),
        *(Cell(label, "lora", flags) for label, flags in variants.items()),
    ]
    return [
        *cells,
        Cell("LLaMA-Adapter v1", "adapter", ""),
        Cell("LLaMA-Adapter v2", "adapter_v2", ""),
    ]


def rates() -> list[Cell]:
    """Return four learning rates per method, each about three times the one before."""
    grid = {"full": (1e-5, 3e-5, 1e-4, 3e-4), "lora": (1e-4, 3e-4, 1e-3, 3e-3)}
    grid |= {"adapter": (1e-3, 3e-3, 1e-2, 3e-2), "adapter_v2": (3e-4, 1e-3, 3e-3, 1e-2)}
    return [
        Cell(f"{m} {rate:g}", m, f"--train.learning_rate {rate}")
        for m, values in grid.items()
        for rate in values
    ]


def halves() -> list[Cell]:
    """Return three cells per method: half, once and twice its default learning rate."""
    cells = []
    for method, args in METHODS.items():
        rate = args.default_learning_rate
        cells += [
            Cell(
                f"{method} {part:g} x {rate:g}",
                method,
                f"--train.learning_rate {rate * part}",
            )
            for part in (0.5, 1, 2)
        ]
    return cells


def shapes() -> list[Cell]:
    """Return cells for the rank, targets and batch size of LoRA and for the prefix of
    LLaMA-Adapter."""
    cells = [
        Cell(f"lora, r {r}", "lora", f"--lora.r {r} --lora.alpha {2 * r}")
        for r in (4, 8, 16, 32)
    ]
    cells += [
        Cell(f"lora, {t}", "lora", f"--lora.targets {t}")
        for t in ("q_proj,v_proj", "q_proj,k_proj,v_proj,o_proj")
    ]
    cells += [
        Cell(f"lora, batch {b}", "lora", f"--train.global_batch_size {b}")
        for b in (8, 16, 32)
    ]
    cells += [
        Cell(f"adapter, {n} prompts", "adapter", f"--adapter.prompt_length {n}")
        for n in (5, 10, 20)
    ]
    return cells + [
        Cell(f"adapter, from layer {n}", "adapter", f"--adapter.start_layer {n}")
        for n in (0, 2)
    ]


GRIDS = {"methods": methods, "rates": rates, "halves": halves, "shapes": shapes}


@dataclass
class MethodTableArgs:
    """Run the fine-tuning scripts over a grid."""

    grid: Literal["methods", "rates", "halves", "shapes"] = "methods"
    """methods: each method once. rates: four learning rates per method. halves: half, once and
    twice the default learning rate. shapes: LoRA ranks, targets and batch sizes, adapter
    prefixes."""
    checkpoint_dir: str | None = None
    """The folder of the model. Default: the embedded demo."""
    flags: str = ""
    """Flags for every run, as one string after an =: --flags="--train.epochs 1"."""
    out_dir: str = "out/methods"
    """The folder to write the runs to."""
    data: DataArgs = field(default_factory=DataArgs)

    def problems(self) -> list[str]:
        """Return the problems of the flags."""
        missing = self.checkpoint_dir and not self.data.path
        return impossible_numbers(self) + (
            ["--data.path is missing: name the file of training examples"]
            if missing
            else []
        )


class Figures(NamedTuple):
    """The results of a run: trained parameters, peak memory in GiB, tokens/s, first and last
    validation loss."""

    trained: int
    memory: float
    speed: float
    before: float
    after: float


def run(cell: Cell, args: MethodTableArgs, number: int) -> Figures:
    """Run one cell, or read the results of its finished run."""
    folder = (
        Path(args.out_dir)
        / f"{number:02d}-{re.sub(r'[^a-z0-9.]+', '-', cell.label.lower())}"
    )
    log = folder.with_suffix(folder.suffix + ".log")
    if not (run_dir.is_run(folder) and run_dir.finished(folder) and log.is_file()):
        if args.checkpoint_dir:
            model_flags = [
                "--checkpoint_dir",
                args.checkpoint_dir,
                "--data.path",
                ",".join(args.data.path),
            ]
        else:
            model_flags = []
        words = [
            *model_flags,
            "--out_dir",
            str(folder),
            "--overwrite",
            *shlex.split(args.flags),
            *shlex.split(cell.flags),
        ]
        command = [sys.executable, str(ROOT / "finetune" / f"{cell.method}.py"), *words]
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            fail(f"{cell.label}: {shlex.join(command)}\n{process.stderr[-2000:]}")
        log.write_text(process.stdout, "utf-8")
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses = []
    for row in rows:
        if row["val_loss"]:
            losses.append(float(row["val_loss"]))
    trained = re.search(r" trains ([\d,]+)", log.read_text("utf-8"))[1]
    speed = statistics.median(float(row["tokens_per_second"]) for row in rows[1:])
    return Figures(
        int(trained.replace(",", "")),
        float(rows[-1]["memory_gib"]),
        speed,
        losses[0],
        losses[-1],
    )


def main(args: MethodTableArgs) -> None:
    """Run every cell and print its row of the table."""
    Path(args.out_dir).mkdir(parents=True, exist_ok=True)
    print(
        "| | trained parameters | peak memory, GiB | tokens/s | validation loss |\n"
        "|---|---|---|---|---|"
    )
    for number, cell in enumerate(GRIDS[args.grid]()):
        figures = run(cell, args, number)
        sizes = f"{figures.trained:,} | {figures.memory:.2f} | {figures.speed:,.0f}"
        print(
            f"| {cell.label} | {sizes} | {figures.before:.4f} → {figures.after:.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    with user_errors():
        main(parse(MethodTableArgs, sys.argv[1:]))
