"""How a checkpoint's tensor names map to ours and back: a list of rules a family, each knowing both directions.

A pattern is a tensor name in which `{}` stands for a number. Imports no torch: a rule only moves what it is given.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rename:
    """One tensor here is one tensor there."""

    theirs: str
    ours: str


@dataclass(frozen=True)
class Drop:
    """A tensor of the checkpoint that the network recomputes or shares, such as rotary tables or a tied head."""

    theirs: str


Rule = Rename | Drop


@dataclass(frozen=True)
class Move:
    """Tensors to read, how to turn them into those to write, and the names to write them under."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    convert: Callable[[list[Any]], list[Any]] = list


def importing(rules: Iterable[Rule], names: Iterable[str]) -> tuple[list[Move], list[str]]:
    """The moves from a checkpoint's tensors to ours, and the names that no rule knows."""
    moves, unknown = [], []
    for name in names:
        rule = next((r for r in rules if _match(r.theirs, name)), None)
        if rule is None:
            unknown.append(name)
        elif isinstance(rule, Rename):
            moves.append(Move((name,), (_fill(rule.ours, _match(rule.theirs, name)),)))
    return moves, unknown


def exporting(rules: Iterable[Rule], names: Iterable[str]) -> list[Move]:
    """The moves from our tensors to the checkpoint's; a name without a rule is a mistake of ours."""
    renames = [r for r in rules if isinstance(r, Rename)]
    moves = []
    for name in names:
        rule = next((r for r in renames if _match(r.ours, name)), None)
        assert rule is not None, f"no rule exports {name}"
        moves.append(Move((name,), (_fill(rule.theirs, _match(rule.ours, name)),)))
    return moves


def _match(pattern: str, name: str) -> re.Match | None:
    return re.fullmatch(re.escape(pattern).replace(r"\{\}", r"(\d+)"), name)


def _fill(pattern: str, match: re.Match) -> str:
    return pattern.format(*match.groups())
