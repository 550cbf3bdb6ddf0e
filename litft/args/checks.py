"""What no flag may hold, whatever it means."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

LARGEST_SIZE = 2**14  # of a rank or a prefix: beyond it memory would run out before a message
LARGEST = 2**31 - 1  # of any whole number here: beyond it seeds overflow, and nothing else is meant


def _numbers(args: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every flag that holds a number, by its dotted name."""
    for item in dataclasses.fields(args):
        value = getattr(args, item.name)
        if dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{prefix}{item.name}.")
        elif isinstance(value, (int, float)):
            yield prefix + item.name, value


def impossible_numbers(args: Any) -> list[str]:
    """Problems with numbers that no flag may hold."""
    found = []
    for name, value in _numbers(args):
        if isinstance(value, float) and not math.isfinite(value):
            found.append(f"--{name} {value}: must be a finite number")
        elif abs(value) > LARGEST:
            found.append(f"--{name} {value}: must be at most {LARGEST:,}")
        elif name.endswith("seed") and value < 0:
            found.append(f"--{name} {value}: must not be negative")
    return found
