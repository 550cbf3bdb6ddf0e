"""metrics.csv: one row a step. Values stay on the device and are written every so many steps."""

import csv
import time
from pathlib import Path
from typing import Any

import torch

from litft.parallel import peak_memory

COLUMNS = (
    "step epoch samples tokens loss val_loss exact_match learning_rate grad_norm tokens_per_second mfu memory_gib seconds"
).split()


class Metrics:
    """Collects a row a step; `seconds` is time spent in training steps, validation and saving left out."""

    def __init__(self, path: Path | None, peak_flops: float | None) -> None:
        self.path, self.peak = path, peak_flops
        self.rows: list[dict[str, Any]] = []
        self.before: list[dict[str, float]] = []  # the rows that a resumed run found
        self.seconds = 0.0  # of all flushed steps
        self.tokens = 0
        self._flops, self._earlier = 0.0, 0.0  # of this process; the seconds that a resumed run took before it
        self._mark: float | None = None
        self._window = 0.0
        self._last: dict[str, Any] = {}

    def cut(self, step: int) -> None:
        """Continue an older file after `step`: what was written beyond it never happened."""
        if self.path is None or not self.path.is_file():
            return
        with self.path.open(newline="") as file:
            kept = [row for row in csv.DictReader(file) if (row.get("step") or "").isdigit() and int(row["step"]) <= step]
        with self.path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(kept)
        self.before = [{name: float(value) for name, value in row.items() if value} for row in kept]
        if kept:
            self.seconds, self.tokens = float(kept[-1]["seconds"] or 0), int(kept[-1]["tokens"] or 0)
            self._earlier = self.seconds

    def start(self) -> None:
        """The clock of a step begins."""
        self._mark = time.perf_counter()

    def stop(self) -> None:
        """The clock of a step ends; call `add` with the step's values too."""
        self._window += time.perf_counter() - self._mark

    def add(self, tokens: int, **row: Any) -> None:
        """A step's row, with `flops` and the `tokens` fed; its tensors are read at the next `flush`."""
        self.tokens += tokens
        self.rows.append({**row, "tokens": self.tokens, "fed": tokens})

    def note(self, step: int, **values: Any) -> None:
        """Add values to the row of `step` if it is not written yet, or make it a row of its own."""
        if self.rows and self.rows[-1]["step"] == step:
            self.rows[-1].update(values)
        else:
            row = {"step": step, "epoch": 0.0, "samples": 0, "tokens": self.tokens, "seconds": self.seconds}
            self.rows.append({**row, **values})

    def settle(self, device: torch.device) -> None:
        """Wait for the steps a GPU still works on, within their time: what follows must not count as theirs."""
        if device.type == "cuda":
            self.start()
            torch.cuda.synchronize(device)
            self.stop()

    def flush(self, device: torch.device) -> None:
        """Write the rows collected; their speed is that of the whole window since the last flush."""
        self.settle(device)
        steps = [row for row in self.rows if "loss" in row]
        if steps:
            self.seconds += self._window
            speed = sum(row.pop("fed") for row in steps) / self._window
            flops = sum(row.pop("flops") for row in steps)
            mfu = flops / self._window / self.peak if self.peak else None
            self._flops += flops
        for row in steps:
            row |= {"tokens_per_second": speed, "mfu": mfu}
        for row in self.rows:
            row["memory_gib"] = peak_memory(device)
            row.setdefault("seconds", self.seconds)
        self._last = self.rows[-1]
        self._write()
        self._window, self.rows = 0.0, []

    @property
    def loss(self) -> float:
        """The newest step's that is written."""
        return float(self._last["loss"])

    def line(self) -> str:
        """Loss and speed of the last window, for the progress bar."""
        row = self._last
        return f"loss {self.loss:.3f}, {_speeds(row['tokens_per_second'], row['mfu'], row['memory_gib'])}"

    def summary(self, device: torch.device) -> str:
        """Speed over all steps; MFU over those of this process, which alone knows what chip they ran on."""
        spent = self.seconds - self._earlier
        mfu = self._flops / spent / self.peak if self.peak and spent else None
        return _speeds(self.tokens / self.seconds if self.seconds else 0.0, mfu, peak_memory(device))

    def _write(self) -> None:
        if self.path is None or not self.rows:
            return
        fresh = not self.path.is_file()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if fresh:
                writer.writeheader()
            for row in self.rows:
                writer.writerow({name: _number(row.get(name)) for name in COLUMNS})


def _speeds(tokens_per_second: float, mfu: float | None, memory_gib: float) -> str:
    """In words; MFU is left out where the chip is not known."""
    parts = [f"{tokens_per_second:,.0f} tokens/s", f"MFU {mfu:.0%}" if mfu else "", f"peak memory {memory_gib:.2f} GiB"]
    return ", ".join(part for part in parts if part)


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.item()
    return f"{value:.9g}" if isinstance(value, float) else value
