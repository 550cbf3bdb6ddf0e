"""metrics.csv: one row a step. Values stay on the device and are written every so many steps."""

import csv
import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from litft.distributed.devices import peak_memory
from litft.run_dir import write_whole

COLUMNS = "step epoch samples tokens loss val_loss val_perplexity exact_match learning_rate grad_norm".split()
COLUMNS += "tokens_per_second mfu memory_gib data_share seconds".split()

Row = dict[str, float]


class Metrics:
    """Collects a row a step; `seconds` is time spent in training steps, validation and saving left out.

    Every row that is written goes to each of the `sinks` too.
    """

    def __init__(self, path: Path | None, peak_flops: float | None) -> None:
        self.path, self.peak = path, peak_flops
        self.sinks: list[Callable[[Row], None]] = []
        self.rows: list[dict[str, Any]] = []
        self.before: list[Row] = []  # the rows that a resumed run found
        self.seconds = 0.0  # of all flushed steps
        self.tokens = 0
        self._flops, self._earlier = 0.0, 0.0  # of this process; the seconds that a resumed run took before it
        self._mark: float | None = None
        self._window, self._waited = 0.0, 0.0
        self.last: Row = {}  # the newest row of a step that is written
        self.newest: Row = {}  # of every column
        self._first: Row = {}
        self._on_cpu = False

    def cut(self, step: int) -> None:
        """Continue an older file after `step`: what was written beyond it never happened."""
        if self.path is None:
            return
        kept = [row for row in self._rows_there() if int(row["step"]) <= step]
        self._rewrite(kept)
        self.before = [{name: float(value) for name, value in row.items()} for row in kept]
        for row in self.before:
            self.newest |= row
        if kept:
            self.seconds, self.tokens = self.before[-1].get("seconds", 0.0), int(self.before[-1].get("tokens", 0))
            self._earlier = self.seconds

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        """Have the file hold these rows, or the old ones."""
        if self.path is None:
            return
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
        write_whole(self.path, text.getvalue())

    def _rows_there(self) -> Iterator[dict[str, str]]:
        """The rows of an older file, without what a crash has made of some; ValueError for a file of another kind."""
        if not self.path.is_file():
            return
        with self.path.open(newline="", encoding="utf-8", errors="replace") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames and "step" not in reader.fieldnames:
                raise ValueError(f"{self.path} does not begin with the names of its columns; mend it, or move it away")
            for row in reader:
                found = {name: value for name, value in row.items() if name in COLUMNS and value}
                try:
                    if int(found["step"]) >= 0 and [float(value) for value in found.values()]:
                        yield found
                except (KeyError, ValueError, TypeError):
                    continue

    def start(self) -> None:
        """The clock of a step begins."""
        self._mark = time.perf_counter()

    def data_ready(self) -> None:
        """What passed of the step went by waiting for its data."""
        self._waited += time.perf_counter() - self._mark

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
        elif self.before and self.before[-1]["step"] == step:  # a run was interrupted in this validation
            self.before[-1] |= values
            self.newest |= values
            self._rewrite([{name: _text(value) for name, value in row.items()} for row in self.before])
            for sink in self.sinks:
                sink(self.before[-1])
        else:
            row = {"step": step, "epoch": 0.0, "samples": 0, "tokens": self.tokens, "seconds": self.seconds}
            self.rows.append({**row, **values})

    def settle(self, device: torch.device) -> None:
        """Wait for the steps a GPU still works on, within their time: what follows must not count as theirs."""
        if device.type == "cuda":
            self.start()
            torch.cuda.synchronize(device)
            self.stop()

    def flush(self, device: torch.device) -> list[Row]:
        """Write the rows collected, and return them; their speed is that of the whole window since the last flush."""
        self.settle(device)
        self._on_cpu = device.type == "cpu"
        steps = [row for row in self.rows if "loss" in row]
        if steps:
            self.seconds += self._window
            speed = sum(row.pop("fed") for row in steps) / self._window
            flops = sum(row.pop("flops") for row in steps)
            mfu = flops / self._window / self.peak if self.peak else None
            self._flops += flops
        for row in steps:
            row |= {"tokens_per_second": speed, "mfu": mfu, "data_share": self._waited / self._window}
        for row in self.rows:
            row["memory_gib"] = peak_memory(device)
            row.setdefault("seconds", self.seconds)
        written = [{name: _number(row[name]) for name in COLUMNS if row.get(name) is not None} for row in self.rows]
        for row in written:
            self.newest |= row
        steps = [row for row in written if "loss" in row]
        self.last, self._first = (steps or [self.last])[-1], self._first or (steps or [{}])[0]
        self._window, self._waited, self.rows = 0.0, 0.0, []
        self._write(written)
        return written

    @property
    def first(self) -> Row:
        """The row of the run's first step."""
        return next((row for row in self.before if "loss" in row), self._first)

    def line(self) -> str:
        """The last window in words."""
        row = self.last
        parts = [f"loss {row['loss']:.4g}", f"norm {row['grad_norm']:.3g}", f"rate {row['learning_rate']:.3g}"]
        parts.append(self._speeds(row["tokens_per_second"], row.get("mfu"), row["memory_gib"]))
        return ", ".join([*parts, f"waiting for data {row['data_share']:.1%}"])

    def summary(self, device: torch.device) -> str:
        """Speed over all steps; MFU over those of this process, which alone knows what chip they ran on."""
        spent = self.seconds - self._earlier
        mfu = self._flops / spent / self.peak if self.peak and spent else None
        self._on_cpu = device.type == "cpu"
        return self._speeds(self.tokens / self.seconds if self.seconds else 0.0, mfu, peak_memory(device))

    def _speeds(self, tokens_per_second: float, mfu: float | None, memory_gib: float) -> str:
        """In words; MFU is left out where the chip is not known. On a CPU memory is the process's, Python's own with it."""
        whose = " of the process" if self._on_cpu else ""
        memory = f"peak memory{whose} {memory_gib:.2f} GiB"
        return ", ".join(filter(None, [f"{tokens_per_second:,.0f} tokens/s", f"MFU {mfu:.0%}" if mfu else "", memory]))

    def _write(self, rows: list[Row]) -> None:
        if self.path is None or not rows:
            return
        fresh = not self.path.is_file()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if fresh:
                writer.writeheader()
            writer.writerows({name: _text(value) for name, value in row.items()} for row in rows)
        for sink in self.sinks:
            for row in rows:
                sink(row)


def _number(value: Any) -> float:
    return value.item() if isinstance(value, torch.Tensor) else value


def _text(value: float) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)
