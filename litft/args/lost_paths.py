"""Relative paths of a run that is resumed in another folder. Imports no torch."""

import json
import os
from glob import has_magic

from litft.args.data_path import DataPath


def lost_paths(run_values: list[tuple[str, str]], given: dict[str, str]) -> dict[str, str]:
    """Return the flags of a run whose relative paths do not exist here, with the paths. given: the
    flags on the command line."""
    lost = {}
    for name, value in run_values:
        if name in given:
            continue
        if name in ("checkpoint_dir", "teacher") and value != "null" and _is_lost(value):
            lost[f"--{name}"] = value
        if name in ("data.path", "data.val_path"):
            paths = [DataPath.parse(item).path for item in _items_of(value)]
            missing = [path for path in paths if _is_lost(path) and not has_magic(path)]
            if missing:
                lost[f"--{name}"] = ", ".join(missing)
    return lost


def _items_of(value: str) -> list[str]:
    """Return the items of a list in a run's file."""
    try:
        items = json.loads(value)
    except ValueError:
        return []
    return [item if isinstance(item, str) else json.dumps(item) for item in items]


def _is_lost(path: str) -> bool:
    """Return whether a model is a relative path that does not exist; a hub id is none."""
    is_hub_id = path.count("/") == 1 and not path.startswith(".")
    return not is_hub_id and not os.path.isabs(path) and not os.path.exists(path)
