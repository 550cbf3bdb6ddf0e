"""What `--reward` names: functions, their weights and the columns of metrics.csv."""

import importlib.util
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from litft.args.lists import whole_patterns
from litft.evaluation.rewards.builtin import EXAMPLES, MADE, PLAIN, RewardFunction

# before the name of a function from Python, which no --reward can name
FROM_PYTHON = "python:"
# columns of metrics.csv begin with reward_, and two of them are no function's
TAKEN_NAMES = ("std", "seconds")
_LOADED: list[Path] = []  # the files of rewards of this process


@dataclass(frozen=True)
class Reward:
    """A reward function and what its value counts in the sum."""

    # as it is named in messages and, with reward_ before it, in metrics.csv
    name: str
    # built in: number, brief:200; of a file: its path, with the function after a colon
    source: str
    weight: float = 1.0
    # from Python; None: `source` names it
    function: Callable | None = None


def parse_rewards(items: Sequence[str]) -> list[Reward]:
    """Return the functions that --reward names; raise ValueError for one that is not known."""
    rewards = []
    for item in whole_patterns(items):
        source, weight = _weight(item)
        if not math.isfinite(weight):
            raise ValueError(
                f"--reward {item}: the weight {weight} is not finite; give a number"
            )
        # an equals sign after neither a bracket nor the end of a text: regex:answer=42
        is_pattern = source.startswith("regex:") and not source.endswith(
            (")", "]", "}", "$")
        )
        if source != item and is_pattern:
            pattern = source.removeprefix("regex:")
            raise ValueError(
                f"--reward {item}: its end may be a weight or a part of the pattern; write "
                f"{item}=1 for the pattern, or regex:({pattern})={weight:g} for the weight"
            )
        name = re.sub(r"\W", "_", _check_source(source))
        rewards.append(Reward(name, source, weight))
    return _with_unique_names(rewards)


def of_functions(functions: Sequence[Callable]) -> list[Reward]:
    """Return the rewards of functions from Python, each with weight 1."""
    rewards = []
    for function in functions:
        name = getattr(function, "__name__", type(function).__name__)
        source = f"{FROM_PYTHON}{name}"
        rewards.append(Reward(re.sub(r"\W", "_", name), source, function=function))
    return _with_unique_names(rewards)


def _weight(item: str) -> tuple[str, float]:
    """Return what --reward names, and its weight: the number after the last equals sign."""
    source, equals, text = item.rpartition("=")
    try:
        return (source, float(text)) if equals else (item, 1.0)
    except ValueError:
        # the sign belongs to a pattern
        return item, 1.0


def _check_source(source: str) -> str:
    """Return the name of a function; raise ValueError if there is none."""
    if is_file(source):
        path, _, function = source.rpartition(":")
        if not Path(path).is_file():
            raise ValueError(f"--reward {source}: there is no file {path}")
        if not function.isidentifier():
            raise ValueError(f"--reward {source}: {function!r} is no name of a function")
        return function
    if source.startswith(FROM_PYTHON):
        raise ValueError(
            f"--reward {source}: a function that was given in Python; go on there, with "
            "litft.finetune(rewards=[...], resume=True)"
        )
    name, _, argument = source.partition(":")
    if name in MADE:
        try:
            MADE[name](argument)
        except ValueError as error:
            raise ValueError(f"--reward {source}: {error}") from None
        return name
    if source not in PLAIN:
        close = get_close_matches(name, (*PLAIN, *MADE), n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"--reward {source}: not known; {hint}use {', '.join(EXAMPLES)}")
    if source == "math" and importlib.util.find_spec("math_verify") is None:
        raise ValueError(
            "--reward math: needs the package math-verify; pip install 'litft[math]'"
        )
    return source


def is_file(source: str) -> bool:
    """Return whether --reward names a function of a file."""
    return ".py:" in source or source.endswith(".py")


def _with_unique_names(rewards: list[Reward]) -> list[Reward]:
    """Number the second and further functions of a name."""
    named: list[Reward] = []
    for reward in rewards:
        taken = {*TAKEN_NAMES, *(other.name for other in named)}
        name = reward.name
        number = 2
        while name in taken:
            name = f"{reward.name}_{number}"
            number += 1
        named.append(replace(reward, name=name))
    return named


def _check_imported(path: Path) -> None:
    """Raise ValueError if a file of rewards would import what another one has imported under the
    same name from its own folder."""
    others = {loaded.parent for loaded in _LOADED} - {path.parent}
    for name, module in sys.modules.items():
        file = Path(getattr(module, "__file__", None) or "")
        if file.parent not in others or file in _LOADED:
            continue
        if (path.parent / f"{name}.py").is_file():
            raise ValueError(
                f"--reward {path}: {name}.py beside it has the name of {file}, which another "
                "reward imports; rename one of the two"
            )


def load_function(source: str) -> RewardFunction:
    """Return the function that a source names; of a file, this executes the file."""
    if not is_file(source):
        name, _, argument = source.partition(":")
        if name in MADE:
            return MADE[name](argument)
        return PLAIN[source]
    path, _, name = source.rpartition(":")
    # as Python runs a script: imports look into its folder, and classes find their module
    folder = str(Path(path).resolve().parent)
    _check_imported(Path(path).resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    _LOADED.append(Path(path).resolve())
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    spec.loader.exec_module(module)
    function: RewardFunction | None = getattr(module, name, None)
    if function is None or not callable(function):
        raise ValueError(f"{path} has no function {name}")
    return function
