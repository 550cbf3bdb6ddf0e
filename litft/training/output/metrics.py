"""metrics.csv: one row per step. Values stay on the device until the next flush writes them."""

import csv
import io
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from litft import run_dir
from litft.atomic import atomic_write
from litft.distributed.devices import peak_memory

COLUMNS = "step epoch samples tokens loss val_loss val_perplexity exact_match".split()
# in fp16: the factor of the loss, and the updates left out so far
FP16_COLUMNS = ("loss_scale", "skipped_updates")
COLUMNS += (
    "learning_rate grad_norm tokens_per_second mfu memory_gib data_share seconds".split()
)
INTERNAL = ("flops", "fed")  # of a row until it is written

Row = dict[str, float]


class Metrics:
    """Collects one row per step.

    `seconds` is time spent in training steps, without validation and saving.

    Every row that is written is also passed to `send`.
    """

    def __init__(
        self,
        path: Path | None,
        peak_flops: float | None,
        scores: Sequence[str] = (),
        send: Callable[[Row], None] = lambda row: None,
    ) -> None:
        # scores: further columns, next to those of the loss
        self.path = path
        self.peak = peak_flops
        position = COLUMNS.index("exact_match") + 1
        self.scores = list(scores)
        self.columns = [*COLUMNS[:position], *self.scores, *COLUMNS[position:]]
        self.send = send
        self.rows: list[dict[str, Any]] = []
        # rows already in the file when a run resumes
        self.resumed_rows: list[Row] = []
        self.seconds = 0.0  # of all flushed steps
        self.tokens = 0
        # FLOPs of this process, and seconds of the run before this process
        self._flops = 0.0
        self._resumed_seconds = 0.0
        self._step_start = 0.0  # `time.perf_counter` at the beginning of the step
        # seconds since the last flush: in steps, and of these waiting for data
        self._window_seconds = 0.0
        self._data_seconds = 0.0
        self._waits_for_data = False
        # the newest written row of a training step
        self.last: Row = {}
        self.newest: Row = {}  # the newest value of every column
        self._first: Row = {}

    def truncate(self, step: int) -> None:
        """Continue an existing file after `step`: rows of later steps are removed."""
        if self.path is None:
            return
        rows = []
        self.resumed_rows = []
        for row in run_dir.metrics_rows(self.path):
            # metrics that only the run's beginning has, from Python
            for name in row:
                if name not in self.columns:
                    self.columns.append(name)
            if int(row["step"]) > step:
                continue
            rows.append(row)
            self.resumed_rows.append({name: float(value) for name, value in row.items()})
        self._rewrite(rows)
        # the values so far, for the report and for the totals
        for row in self.resumed_rows:
            self.newest |= row
        if rows:
            self.seconds, self.tokens = (
                self.resumed_rows[-1].get("seconds", 0.0),
                int(self.resumed_rows[-1].get("tokens", 0)),
            )
            self._resumed_seconds = self.seconds

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        """Replace the file atomically by these rows."""
        if self.path is None:
            return
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns)
        writer.writeheader()
        writer.writerows(rows)
        atomic_write(self.path, text.getvalue())

    def start(self) -> None:
        """Start the clock of a step."""
        self._step_start = time.perf_counter()
        self._waits_for_data = True

    def data_ready(self) -> None:
        """Count the step's time so far as waiting for data, at the first call of the step."""
        if self._waits_for_data:
            self._data_seconds += time.perf_counter() - self._step_start
        self._waits_for_data = False

    def stop(self) -> None:
        """Stop the clock of a step; also call `add` with the step's values."""
        self._window_seconds += time.perf_counter() - self._step_start

    def add(self, tokens: int, **row: Any) -> None:
        """Add a step's row, with its `flops` and the `tokens` fed; tensors are read at the next
        `flush`."""
        self.tokens += tokens
        self.rows.append({**row, "tokens": self.tokens, "fed": tokens})

    def note(self, step: int, **values: Any) -> None:
        """Add values to the row of `step` if it is the last one, otherwise append a new row."""
        if self.rows and self.rows[-1]["step"] == step:
            self.rows[-1].update(values)
        elif self.resumed_rows and self.resumed_rows[-1]["step"] == step:
            # the run was interrupted in this validation
            self.resumed_rows[-1] |= values
            self.newest |= values
            if self.path is not None:
                self._rewrite(list(map(_texts, self.resumed_rows)))
                self.send(self.resumed_rows[-1])
        else:
            row = {
                "step": step,
                "epoch": 0.0,
                "samples": 0,
                "tokens": self.tokens,
                "seconds": self.seconds,
            }
            self.rows.append({**row, **values})

    def synchronize(self, device: torch.device) -> None:
        """Wait until the GPU has finished the queued steps, and count the wait as step time, not as
        part of what follows."""
        if device.type == "cuda":
            self.start()
            torch.cuda.synchronize(device)
            self.stop()

    def flush(self, device: torch.device) -> list[Row]:
        """Write the collected rows, and return them; their speed is the mean over the window since
        the last flush."""
        self.synchronize(device)
        # rows of validations alone have no loss
        steps = [row for row in self.rows if "loss" in row]
        if steps:
            # the window's time includes the wait for its last step
            self.seconds += self._window_seconds
            speed = sum(row.pop("fed") for row in steps) / self._window_seconds
            flops = sum(row.pop("flops") for row in steps)
            if self.peak:
                mfu = flops / self._window_seconds / self.peak
            else:
                mfu = None
            self._flops += flops
        for row in steps:
            row |= {
                "tokens_per_second": speed,
                "mfu": mfu,
                "data_share": self._data_seconds / self._window_seconds,
            }
        for row in self.rows:
            row["memory_gib"] = peak_memory(device)
            # a row of a validation alone has its time already
            row.setdefault("seconds", self.seconds)
        written = list(map(self._written, self.rows))
        # the newest and the first values, for the report and the divergence guard
        for row in written:
            self.newest |= row
        steps = [row for row in written if "loss" in row]
        self.last = (steps or [self.last])[-1]
        self._first = self._first or (steps or [{}])[0]
        self._window_seconds = 0.0
        self._data_seconds = 0.0
        self.rows = []
        self._write(written)
        return written

    def _written(self, row: dict[str, Any]) -> Row:
        """Return the values of a row that are written, as numbers."""
        written = {}
        for name in self.columns:
            if row.get(name) is None:
                continue
            value = _number(row[name])
            # NaN: a step without desirable, or undesirable, answers
            if name in self.scores and math.isnan(value):
                continue
            written[name] = value
        return written

    @property
    def first(self) -> Row:
        """Return the row of the run's first step."""
        for row in self.resumed_rows:
            if "loss" in row:
                return row
        return self._first

    def summary(self, device: torch.device) -> str:
        """Describe the speed over all steps, and the MFU over the steps of this process, whose chip
        is known."""
        seconds = self.seconds - self._resumed_seconds
        speed = 0.0
        if self.seconds:
            speed = self.tokens / self.seconds
        parts = [f"{speed:,.0f} tokens/s"]
        if self.peak and seconds:
            mfu = self._flops / seconds / self.peak
            if mfu:
                parts.append(f"MFU {mfu:.0%}")
        memory = "peak memory"
        # on a CPU, memory is that of the whole process
        if device.type == "cpu":
            memory = "peak memory of the process"
        # that of a resumed run may have been before it was interrupted
        peaks = [row.get("memory_gib", 0.0) for row in self.resumed_rows]
        peaks.append(peak_memory(device))
        parts.append(f"{memory} {max(peaks):.2f} GiB")
        return ", ".join(parts)

    def _write(self, rows: list[Row]) -> None:
        if self.path is None or not rows:
            return
        is_new = not self.path.is_file()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            if is_new:
                writer.writeheader()
            writer.writerows(map(_texts, rows))
        for row in rows:
            self.send(row)


def _number(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return value.item()
    return value


def _texts(row: Row) -> dict[str, str]:
    return {name: _text(value) for name, value in row.items()}


def as_written(value: float) -> float:
    """Return a value as it is read from the file."""
    return float(_text(value))


def _text(value: float) -> str:
    # a count, which was read from the file
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, float):
        return f"{value:.9g}"
    return str(value)
