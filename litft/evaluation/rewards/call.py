"""How a reward function is called with completions, and what it may return."""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Completed:
    """A completion to rate."""

    completion: str
    completion_tokens: int
    prompt: list[dict[str, Any]]  # messages
    columns: dict[str, Any]

    def values(self) -> dict[str, Any]:
        """Return what a function may take by name."""
        return {
            **self.columns,
            "completion": self.completion,
            "completion_tokens": self.completion_tokens,
            "prompt": self.prompt,
        }


def takes_lists(function: Callable) -> bool:
    """Return whether a function rates many completions in one call."""
    return "completions" in inspect.signature(function).parameters


def call_with_one(function: Callable, item: Completed) -> float | None:
    """Return the reward of a completion; None: the function does not apply to it."""
    return checked(function(**_chosen(function, item.values())))


def call_with_lists(function: Callable, items: Sequence[Completed]) -> list[float | None]:
    """Return the rewards of completions, by one call."""
    names = {"completions": "completion", "prompts": "prompt"}
    values = [item.values() for item in items]
    known: dict[str, Any] = {}
    # a column may be missing in some records, the first one among them
    for of_item in values:
        for name in of_item:
            if name not in known:
                known[name] = [other.get(name) for other in values]
    for plural, name in names.items():
        known[plural] = known.pop(name)
    returned = function(**_chosen(function, known))
    if not isinstance(returned, Sequence) or isinstance(returned, str):
        raise ValueError(f"returned {_shown(returned)}; it must return a list of numbers")
    if len(returned) != len(items):
        raise ValueError(f"returned {len(returned)} rewards for {len(items)} completions")
    return [checked(value) for value in returned]


def checked(value: Any) -> float | None:
    """Return a reward as a number; raise ValueError for anything else."""
    if value is None:
        return None
    # numbers of numpy and torch
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (bool, int, float)):
        raise ValueError(f"returned {_shown(value)}; it must return a number or None")
    if not math.isfinite(value):
        raise ValueError(f"returned {value}; it must return a finite number or None")
    return float(value)


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"


def _chosen(function: Callable, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that a function takes; raise ValueError for one that there is not."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        chosen = dict(values)
    else:
        chosen = {}
        for parameter in parameters:
            if parameter.name in values:
                chosen[parameter.name] = values[parameter.name]
    for parameter in parameters:
        is_needed = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if is_needed and parameter.name not in chosen:
            raise ValueError(
                f"takes {parameter.name!r}, which the record does not have (it has "
                f"{', '.join(values)})"
            )
    return chosen
