"""The figures of a day with a GPU: each is a line of results.jsonl, written when it exists."""

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = "results.jsonl"
Values = dict[str, Any]


class Figures:
    """Writes the figures of one process, and keeps to the time that it has."""

    def __init__(self, folder: Path, seconds: float) -> None:
        # folder: where results.jsonl is. seconds: what this process may take.
        self.path = folder / RESULTS
        self.seconds = seconds
        self.start = time.monotonic()

    @property
    def seconds_left(self) -> float:
        """The time that is left, in seconds."""
        return self.seconds - (time.monotonic() - self.start)

    def write(self, part: str, **values: Any) -> None:
        """Append a line, and print it."""
        passed = round(time.monotonic() - self.start, 1)
        line = json.dumps({"part": part, "at": passed, **values}, default=str)
        print(line[:600], flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def measure(self, part: str, function: Callable[[], Values], needs: float = 15) -> bool:
        """Write what a function measures, or its error; nothing is measured if less than `needs`
        seconds are left. Return whether there are figures."""
        if self.seconds_left < needs:
            self.write(
                part, skipped=f"{self.seconds_left:.0f} s were left, {needs:.0f} needed"
            )
            return False
        try:
            values = function()
        except Exception as error:
            # the next part may still succeed
            reason = f"{type(error).__name__}: {str(error)[:400]}"
            self.write(part, error=reason, where=traceback.format_exc()[-700:])
            return False
        self.write(part, **values)
        return True


def read_figures(folder: Path) -> dict[str, Values]:
    """Return the newest line of each part in a folder's results.jsonl; a part that failed later
    keeps its figures."""
    parts: dict[str, Values] = {}
    path = folder / RESULTS
    if not path.is_file():
        return parts
    for line in path.read_text("utf-8").splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            # the process was killed while it wrote
            continue
        earlier = parts.get(values["part"])
        if earlier is not None and has_figures(earlier) and not has_figures(values):
            continue
        parts[values["part"]] = values
    return parts


def has_figures(values: Values) -> bool:
    """Return whether a part was measured."""
    return "error" not in values and "skipped" not in values
