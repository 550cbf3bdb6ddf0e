"""Compare the peak memory that the plan predicts with measured steps, on a GPU.

    # all cells: models, methods, lengths, settings
    python scripts/plan_accuracy.py --out accuracy.json
    python scripts/plan_accuracy.py --only llama-3.2-1b,512 --out accuracy.json

Each cell runs two steps on random weights in its own process, by scripts/benchmark.py; no file is
needed besides this repository. Cells that are already in the file are not measured again, so an
interrupted grid continues. On a GPU, `max_memory_allocated` is measured; on a CPU, the memory of
the process, of which the plan covers only the tensors.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from litft.args import LoRAArgs, PlanArgs
from litft.args.parser import parse
from litft.atomic import atomic_write
from litft.cli import fail, user_errors

SCRIPTS = Path(__file__).parent
# of LoRA: the figures of earlier days stay comparable
RANK = 8
Cells = dict[str, dict[str, Any]]


class Cell(NamedTuple):
    """One setting of a training step."""

    model: str  # a folder in scripts/configs, or a path
    method: str  # lora or full
    precision: str
    quantize: str
    rows: int
    tokens: int  # per row
    recomputed: str
    compiled: bool
    micro_batches: int
    offload: str = "none"  # what --train.cpu_offload moves to the host

    def __str__(self) -> str:
        batches = f"{self.micro_batches} x {self.rows} x {self.tokens:,} tokens"
        if self.quantize == "none":
            weights = self.precision
        else:
            weights = f"{self.precision} on {self.quantize}"
        text = f"{self.model}, {self.method}, {weights}, {batches}, {self.recomputed}"
        if self.offload != "none":
            text += f", offloaded {self.offload}"
        mode = "compiled" if self.compiled else "eager"
        return f"{text}, {mode}"

    @property
    def folder(self) -> str:
        """Return the folder with the config.json."""
        folder = SCRIPTS / "configs" / self.model
        if folder.is_dir():
            return str(folder)
        return self.model


# model, method, precision, quantize, rows, tokens, recomputed, compiled, micro-batches, offload
GRID = """
llama-3.2-1b lora bf16 none 1 512 none eager 1
llama-3.2-1b lora bf16 none 1 512 full eager 2
llama-3.2-1b lora bf16 none 1 2048 none eager 1
llama-3.2-1b lora bf16 none 1 2048 none compiled 2
llama-3.2-1b lora bf16 none 4 2048 selective compiled 1
llama-3.2-1b lora bf16 none 1 8192 full eager 1
llama-3.2-1b lora bf16 none 1 8192 none compiled 1
llama-3.2-1b lora bf16 nf4 1 2048 none eager 1
llama-3.2-1b lora fp32 none 1 2048 none eager 1
llama-3.2-1b full bf16 none 1 512 none eager 2
llama-3.2-1b full bf16 none 1 2048 selective compiled 1
llama-3.2-1b full bf16 none 1 8192 full eager 2
llama-3.2-1b full bf16 none 1 2048 elementwise compiled 2
llama-3.2-1b full bf16-true none 1 2048 none eager 1
llama-3.2-1b full bf16-true none 1 2048 full compiled 2
gemma-2-2b lora bf16 none 1 512 none eager 1
gemma-2-2b lora bf16 none 1 512 full eager 1
gemma-2-2b lora bf16 none 1 2048 none eager 2
gemma-2-2b lora bf16 none 1 2048 full eager 1
gemma-2-2b lora bf16 none 1 2048 selective compiled 1
gemma-2-2b lora bf16 none 1 2048 elementwise eager 1
gemma-2-2b full bf16 none 1 2048 full eager 1
llama-3.1-8b lora bf16 none 1 512 none eager 2
llama-3.1-8b lora bf16 none 1 2048 none eager 1
llama-3.1-8b lora bf16 none 1 2048 none compiled 2
llama-3.1-8b lora bf16 none 1 2048 selective eager 1
llama-3.1-8b lora bf16 none 4 2048 elementwise compiled 1
llama-3.1-8b lora bf16 none 4 2048 elementwise eager 1
llama-3.1-8b lora bf16 nf4 1 2048 elementwise compiled 1
llama-3.1-8b lora bf16 none 1 8192 full eager 1
llama-3.1-8b lora bf16 none 1 8192 full compiled 1
llama-3.1-8b lora bf16 nf4 1 2048 full eager 1
qwen3-30b-a3b lora bf16 none 1 512 none eager 1
qwen3-30b-a3b lora bf16 none 1 2048 full eager 2
qwen3-30b-a3b lora bf16 none 1 2048 elementwise eager 1
llama-3.1-8b lora bf16 nf4 1 33920 tiled eager 1 activations
llama-3.1-8b lora bf16 nf4 1 66304 tiled eager 1 activations
llama-3.1-8b lora bf16 nf4 1 131072 tiled eager 1 activations
llama-3.1-8b lora bf16 nf4 1 16384 full compiled 1 activations
llama-3.1-8b lora bf16 none 1 8192 none compiled 1 activations
llama-3.1-8b lora bf16 none 1 8192 none eager 1 activations
"""
# what scripts/plan.py --budget chooses: model, method, tokens, budget
BUDGETS = """
llama-3.1-8b lora 2048 40GB
llama-3.2-1b full 2048 32GB
"""


@dataclass
class AccuracyArgs:
    """Compare planned with measured peak memory."""

    only: list[str] = field(default_factory=list)
    """Measure only the cells whose description contains all of these texts."""
    cells: list[str] = field(default_factory=list)
    """Cells to measure instead: 'model method precision quantize rows tokens recomputed
    eager|compiled micro_batches [activations]', where the model is a name in scripts/configs or a
    folder with a config.json, and the last word offloads activations."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """The device type to run on. auto: cuda if available."""
    minutes: float | None = None
    """Begin no cell after this time. Default: no limit."""
    out: str = "plan_accuracy.json"
    """The JSON file to write after each cell. Cells already in it are kept."""

    def problems(self) -> list[str]:
        """Return the problems of the flags."""
        return [
            f"--cells {line!r}: expected nine or ten values; see --help"
            for line in self.cells
            if len(line.split()) not in (9, 10)
        ]


def parse_cell(line: str) -> Cell:
    """Return the cell that a line describes."""
    words = line.split()
    model, method, precision, quantize, rows, tokens, recomputed, mode, micro_batches = (
        words[:9]
    )
    return Cell(
        model=model,
        method=method,
        precision=precision,
        quantize=quantize,
        rows=int(rows),
        tokens=int(tokens),
        recomputed=recomputed,
        compiled=mode == "compiled",
        micro_batches=int(micro_batches),
        offload=words[9] if len(words) == 10 else "none",
    )


def chosen_by_budget(line: str) -> Cell:
    """Return the cell with the settings that `plan --budget` chooses."""
    from litft.commands.plan import plan_on_paper

    model, method, tokens, budget = line.split()
    args = PlanArgs(
        str(SCRIPTS / "configs" / model),
        method=method,
        max_seq_length=int(tokens),
        budget=budget,
        lora=LoRAArgs(r=RANK),
    )
    fit = plan_on_paper(args).fit
    return Cell(
        model, method, "bf16", fit.quantize, fit.rows, int(tokens), fit.recomputed, False, 1
    )


def planned_peak(cell: Cell, device: str) -> float:
    """Return the peak memory of the plan, in GiB."""
    from litft.args import FullFinetuneArgs, LoRAFinetuneArgs
    from litft.methods import method_of
    from litft.pretrained.folder import resolve
    from litft.training.memory.activations import Shape
    from litft.training.memory.plan import predict

    source = resolve(cell.folder)
    lora = LoRAFinetuneArgs(lora=LoRAArgs(r=RANK))
    method = method_of(FullFinetuneArgs() if cell.method == "full" else lora)
    method.select_targets(source.meta_model(), source.adapter_rules)
    shape = Shape(cell.rows, cell.tokens, accumulated=cell.micro_batches > 1)
    plan = predict(
        source,
        method,
        cell.precision,
        cell.quantize,
        shape,
        recomputed=cell.recomputed,
        device=device,
        compiled=cell.compiled,
        cpu_offload=cell.offload,
    )
    return plan.memory.peak / 2**30


def measured_peak(cell: Cell, device: str) -> float | None:
    """Return the measured peak memory of the steps, in GiB, or None if they fail (most likely out
    of memory)."""
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "figures.json"
        command = [
            sys.executable,
            str(SCRIPTS / "benchmark.py"),
            "--checkpoint_dir",
            cell.folder,
            "--method",
            cell.method,
            "--lora.r",
            str(RANK),
        ]
        command += [
            "--quantize",
            cell.quantize,
            "--precision",
            cell.precision,
            "--accelerator",
            device,
        ]
        command += [
            "--data.max_seq_length",
            str(cell.tokens),
            "--train.micro_batch_size",
            str(cell.rows),
        ]
        command += ["--train.global_batch_size", str(cell.rows * cell.micro_batches)]
        command += [
            "--train.compile",
            str(cell.compiled).lower(),
            "--train.activation_checkpointing",
            cell.recomputed,
            "--train.cpu_offload",
            cell.offload,
        ]
        process = subprocess.run(
            [*command, "--steps", "1", "--warmup", "1", "--out", str(out)],
            stdout=subprocess.DEVNULL,
        )
        if process.returncode == 0:
            return json.loads(out.read_text())["figures"]["litft"]["peak_memory_gib"]
        return None


def load_cells(path: Path) -> Cells:
    """Return the cells in the file.

    Write it at once, so that an unwritable path fails before the first measurement.

    Raise ValueError if the file was not written by this script.
    """
    try:
        cells = json.loads(path.read_text("utf-8")) if path.exists() else {}
        is_valid = all(
            cell.keys() >= {"planned_gib", "measured_gib", "off_by"}
            for cell in cells.values()
        )
    except (ValueError, AttributeError):
        is_valid = False
    if not is_valid:
        raise ValueError(
            f"--out {path}: the file was not written by this script; remove it or name another file"
        )
    write(path, cells)
    return cells


def write(path: Path, cells: Cells) -> None:
    """Write all cells atomically: an interrupted write leaves the old file."""
    atomic_write(path, json.dumps(cells, indent=2) + "\n")


def main(args: AccuracyArgs) -> None:
    """Measure the cells that the file lacks, and print the errors of the plan."""
    from litft.distributed.devices import pick_accelerator

    path = Path(args.out)
    device = pick_accelerator(args.accelerator)
    start = time.monotonic()
    measured = load_cells(path)
    cells = [parse_cell(line) for line in args.cells or GRID.strip().split("\n")]
    cells += (
        []
        if args.cells
        else [chosen_by_budget(line) for line in BUDGETS.strip().split("\n")]
    )
    cells = [cell for cell in cells if all(part in str(cell) for part in args.only)]
    for cell in cells:
        key = f"{cell}, {device}"
        if key not in measured:
            if args.minutes is not None and time.monotonic() - start > 60 * args.minutes:
                break
            plan = planned_peak(cell, device)
            peak = measured_peak(cell, device)
            measured[key] = {
                "planned_gib": plan,
                "measured_gib": peak,
                "off_by": peak and plan / peak - 1,
            }
            write(path, measured)
        row = measured[key]
        if row["measured_gib"]:
            result = f"{row['measured_gib']:.2f} GiB measured, {row['off_by']:+.1%}"
        else:
            result = "the steps failed"
        print(f"{key}: {row['planned_gib']:.2f} GiB planned, {result}", flush=True)
    errors = [row["off_by"] for row in measured.values() if row["off_by"] is not None]
    if not errors:
        fail("no cell of the grid could be measured; the errors of the steps are above")
    print(
        f"{len(errors)} of {len(measured)} cells ran; the plan is off by {min(errors):+.1%} to "
        f"{max(errors):+.1%}"
    )


if __name__ == "__main__":
    with user_errors():
        main(parse(AccuracyArgs, sys.argv[1:]))
