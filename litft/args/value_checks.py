"""Checks that apply to all flags: value ranges and types; and parsers of sizes and durations."""

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

# of a LoRA rank or a prefix: larger values would run out of memory before any message
LARGEST_SIZE = 2**14
# of any number: seeds beyond it overflow, and no flag needs more
LARGEST = 2**31 - 1


def _numbers(args: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (dotted name, value) of every flag that has a number."""
    for item in dataclasses.fields(args):
        value = getattr(args, item.name)
        if dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{prefix}{item.name}.")
        elif isinstance(value, (int, float)):
            yield prefix + item.name, value


def impossible_numbers(args: Any) -> list[str]:
    """Return the problems of numbers that no flag allows: not finite, too large, or a negative
    seed."""
    problems = []
    for name, value in _numbers(args):
        if isinstance(value, float) and not math.isfinite(value):
            problems.append(f"--{name} {value}: must be a finite number")
        elif abs(value) > LARGEST:
            problems.append(f"--{name} {value}: must be at most {LARGEST:,}")
        elif name.endswith("seed") and value < 0:
            problems.append(f"--{name} {value}: must not be negative")
    return problems


def wrong_types(args: Any, group: str = "") -> list[str]:
    """Return the problems of values whose type does not match their field.

    Only callers from Python can pass such values. group: what precedes the flags' names in
    messages: nothing, or a group with its dot, `data.`.
    """
    problems = []
    types = get_type_hints(type(args))
    for item in dataclasses.fields(args):
        name = item.name
        value = getattr(args, name)
        expected = types[name]
        flag = f"{group}{name}"
        if isinstance(expected, type) and is_dataclass(expected):
            # a value that is no such group has no fields to check
            is_wrong = not isinstance(value, expected)
            if not is_wrong:
                problems += wrong_types(value, f"{flag}.")
        else:
            is_wrong = not _matches_type(value, expected)
        if is_wrong:
            if get_origin(expected) is list and isinstance(value, str):
                remedy = f"; give a list, [{value!r}]"
            else:
                remedy = ""
            problems.append(
                f"--{flag} {value!r}: expected {_type_name(expected)}, found "
                f"{type(value).__name__}{remedy}"
            )
    return problems


def _matches_type(value: Any, expected: Any) -> bool:
    origin = get_origin(expected)
    type_args = get_args(expected)
    # 1 == True in Python, so the types are compared, too
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in type_args)
    if origin in (Union, UnionType):
        return any(_matches_type(value, option) for option in type_args)
    if origin is list:
        return isinstance(value, list) and all(
            _matches_type(item, type_args[0]) for item in value
        )
    # a whole number is a valid float, and bool is a subclass of int
    if expected is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, origin or expected) and not (
        expected is int and isinstance(value, bool)
    )


def _type_name(expected: Any) -> str:
    """Return a readable name of a type, for messages."""
    if get_origin(expected) is Literal:
        return f"one of {', '.join(map(str, get_args(expected)))}"
    if get_origin(expected) in (Union, UnionType):
        return " or ".join(map(_type_name, get_args(expected)))
    if expected is type(None):
        return "nothing"
    if get_origin(expected):
        return str(expected)
    return expected.__name__


def below_minimum(args: Any, group: str, minimum: int, *names: str) -> list[str]:
    """Return the problems of the named flags whose value is less than `minimum`.

    None values (defaults) pass.
    """
    if minimum:
        reason = f"must be at least {minimum}"
    else:
        reason = "must not be negative"
    problems = []
    for name in names:
        value = getattr(args, name)
        if value is not None and value < minimum:
            flag = ".".join(filter(None, (group, name)))
            problems.append(f"--{flag} {value}: {reason}")
    return problems


def unused_group(args: Any, objective: str) -> list[str]:
    """Return the problems of flags that were set in the group of another objective, which has its
    name."""
    problems = []
    default = type(args)()
    for item in dataclasses.fields(args):
        if getattr(args, item.name) != getattr(default, item.name):
            problems.append(
                f"--{objective}.{item.name} applies only to --objective {objective}; leave it out"
            )
    return problems


def sharding_problems(
    strategy: str, shard_size: int | None, devices: int, num_nodes: int
) -> list[str]:
    """Return the problems of sharding over these devices; the rules of training and of its plan."""
    num_devices = devices * num_nodes
    group_size = shard_size or devices
    if shard_size and strategy != "hsdp":
        return [
            f"--shard_size {shard_size} applies only to --strategy hsdp; add that, or leave it out"
        ]
    if strategy in ("fsdp", "hsdp") and num_devices == 1:
        return [
            f"--strategy {strategy}: weights cannot be sharded over one device; give --devices"
        ]
    # groups of one device would share nothing, and a single group of all devices is fsdp
    if strategy == "hsdp" and (num_devices % group_size or group_size in (1, num_devices)):
        reason = f"{num_devices} devices cannot be split into several equal groups of {group_size}"
        return [f"--strategy hsdp: {reason}; give another --shard_size, or use fsdp"]
    return []


def parse_size(text: str) -> int | None:
    """Parse a size (24GiB, 80GB, 500MB) to bytes; return None for other text."""
    match = re.fullmatch(r"([\d.]+)\s*([KMGT])(i?)B", text.strip())
    if not match:
        return None
    # GiB counts in powers of 1024, GB in powers of 1000
    if match[3]:
        base = 1024
    else:
        base = 1000
    power = "KMGT".index(match[2]) + 1
    try:
        return round(float(match[1]) * base**power)
    except ValueError:
        return None


def parse_duration(text: str) -> float | None:
    """Parse a duration (1h30m, 90m, 45s, 2d) to seconds; return None for other text."""
    match = re.fullmatch(
        r"(?:([\d.]+)d)?(?:([\d.]+)h)?(?:([\d.]+)m)?(?:([\d.]+)s)?", text.strip()
    )
    if not match:
        return None
    parts = []
    try:
        # days, hours, minutes and seconds
        for amount, unit in zip(match.groups(), (86400, 3600, 60, 1), strict=True):
            parts.append(float(amount or 0) * unit)
    except ValueError:
        return None
    # text without any amount matches, too, and its sum of 0 is no duration
    return sum(parts) or None
