"""Random mistakes in JSON objects, and a check that reading them succeeds or ends in one
message."""

import json
import random
import resource
import time
from collections.abc import Callable

MIB = 2**20
VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    7,
    10**9,
    2**31,
    10**30,
    1.5,
    -0.5,
    float("nan"),
    float("inf"),
]
VALUES += [
    "",
    "x",
    "(",
    "auto",
    "{{",
    "a" * 5000,
    [],
    [1],
    [[1]],
    [None],
    ["a"],
    {},
    {"a": 1},
    {"a": {"a": []}},
]


def mutated(content: dict, generator: random.Random, most: int = 3) -> dict:
    """Return an object with one to `most` mistakes in it, at any depth."""
    content = json.loads(json.dumps(content))
    for _ in range(generator.randint(1, most)):
        _change(content, generator)
    return content


def _change(place: dict | list, generator: random.Random) -> None:
    while place:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = generator.choice(keys)
        inner = place[key]
        if isinstance(inner, dict | list) and inner and generator.random() < 0.75:
            place = inner
            continue
        kind = generator.choice(("delete", "rename", "copy", "value", "value", "value"))
        if kind == "delete":
            del place[key]
        elif kind == "rename" and isinstance(place, dict):
            place[generator.choice(("", "x", f"{key}s"))] = place.pop(key)
        elif kind == "copy":
            place[key] = place[generator.choice(keys)]
        else:
            place[key] = generator.choice(VALUES)
        return


def failure(
    attempt: Callable[[], object], most_seconds: float = 10, most_memory: int = 1024 * MIB
) -> str | None:
    """Return how an attempt failed; None if it succeeded, or raised ValueError with a text."""
    start = time.monotonic()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        attempt()
    except ValueError as error:
        if not str(error).strip():
            return "a message without text"
        if isinstance(error, UnicodeError):
            return f"an error of Python: {error}"
    except BaseException as error:  # also a panic of a library in Rust
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    if seconds > most_seconds:
        return f"{seconds:.0f} s"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024
    return f"{grown / MIB:.0f} MiB" if grown > most_memory else None
