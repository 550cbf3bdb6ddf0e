"""Names of flags as users write them: short, former, or of another group."""

from collections.abc import Iterator
from typing import Any

from litft.args.aliases import FORMER_FLAGS
from litft.args.flag_types import short_name


def full_flag(name: str, flag_types: dict[str, Any]) -> str:
    """Return the dotted name of a flag that is given without its group, if only one group has it,
    or as group_name."""
    if name in flag_types:
        return name
    for former in FORMER_FLAGS:
        if name in (former, former.rpartition(".")[2]):
            return former
    matches = []
    for flag in flag_types:
        if name in (short_name(flag), flag.replace(".", "_")):
            matches.append(flag)
    if len(matches) == 1:
        return matches[0]
    return name


def is_former(name: str, flag_types: dict[str, Any]) -> bool:
    """Return whether a name is the former one of a flag that the command has."""
    return name in FORMER_FLAGS and FORMER_FLAGS[name][0] in flag_types


def renamed(name: str, value: str) -> tuple[str, str]:
    """Return the name and the value of the flag that has taken the place of another."""
    new_name, new_values = FORMER_FLAGS[name]
    return new_name, new_values.get(value.lower(), value)


def problem_of_other_group(
    name: str, objective: str, flag_types: dict[str, Any]
) -> Iterator[str]:
    """Yield the problem of a name without its group that stands for the flag of another group than
    the objective's, which has one of that name, too."""
    meant = f"{objective}.{name}"
    full_name = full_flag(name, flag_types)
    if name not in flag_types and meant in flag_types and full_name in flag_types:
        yield (
            f"--{name} stands for --{full_name}, but --objective {objective} has --{meant}, too; "
            "write the one that is meant"
        )
