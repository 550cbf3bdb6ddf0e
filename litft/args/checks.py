"""What no flag may hold, whatever it means."""

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

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


def wrong_types(args: Any, group: str = "") -> list[str]:
    """Problems with values that are not of their fields' types, which Python's callers may give."""
    found, kinds = [], get_type_hints(type(args))
    for name in (item.name for item in dataclasses.fields(args)):
        value, kind, flag = getattr(args, name), kinds[name], f"{group}{name}"
        if is_dataclass(kind):
            wrong = not isinstance(value, kind)
            found += wrong_types(value, f"{flag}.") if not wrong else []
        else:
            wrong = not _fits(value, kind)
        if wrong:
            remedy = f"; give a list, [{value!r}]" if get_origin(kind) is list and isinstance(value, str) else ""
            found.append(f"--{flag} {value!r}: expected {_named(kind)}, found {type(value).__name__}{remedy}")
    return found


def _fits(value: Any, kind: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in inner)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, origin or kind) and not (kind is int and isinstance(value, bool))


def _named(kind: Any) -> str:
    """A type in words."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_named, get_args(kind)))
    return "nothing" if kind is type(None) else str(kind) if get_origin(kind) else kind.__name__


def below(args: Any, group: str, least: int, *names: str) -> list[str]:
    """Problems with those of a group's numbers that are less than `least`; what is None has a default."""
    reason = f"must be at least {least}" if least else "must not be negative"
    values = {".".join(filter(None, (group, name))): getattr(args, name) for name in names}
    return [f"--{name} {value}: {reason}" for name, value in values.items() if value is not None and value < least]


def size(text: str) -> int | None:
    """Bytes in words (24GiB, 80GB, 500MB); None for what is no size."""
    found = re.fullmatch(r"([\d.]+)\s*([KMGT])(i?)B", text.strip())
    try:
        return round(float(found[1]) * (1024 if found[3] else 1000) ** ("KMGT".index(found[2]) + 1)) if found else None
    except ValueError:
        return None


def seconds(text: str) -> float | None:
    """A time in words (1h30m, 90m, 45s, 2d), in seconds; None for what is no time."""
    found = re.fullmatch(r"(?:([\d.]+)d)?(?:([\d.]+)h)?(?:([\d.]+)m)?(?:([\d.]+)s)?", text.strip())
    try:
        parts = [float(part or 0) for part in found.groups()] if found else []
    except ValueError:
        return None
    return sum(part * size for part, size in zip(parts, (86400, 3600, 60, 1), strict=False)) or None
