"""The flags of `sweep`."""

import shlex
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from itertools import product

from litft.args.finetune_commands import FINETUNE
from litft.args.flag_types import types_of_flags
from litft.args.messages import unknown_flag
from litft.args.value_checks import below_minimum

# flags that the sweep sets itself
OWN_FLAGS = ("out_dir", "seed", "config", "resume", "overwrite")
# of these, what no run of a sweep may be given, either
SET_BY_THE_SWEEP = ("out_dir", "seed", "resume", "overwrite")

# one setting of a grid: values by flag
Setting = dict[str, str]


@dataclass
class SweepArgs:
    """Run a grid of settings with several seeds, and say which differences are real."""

    config: str | None = None
    """A YAML file of flags, or a recipe, that all runs share. Default: the embedded demo."""
    method: str = "lora"
    """The method of the runs: lora, adapter, adapter_v2 or full."""
    grid: list[str] = field(default_factory=list)
    """The values to try, FLAG=VALUE,VALUE for each flag: lora.r=8,32 train.learning_rate=1e-4,3e-4.
    All combinations are run. Values that have commas themselves: FLAG=A,B|C,D. Flags that change
    together: lora.r+lora.alpha=8+16,32+64."""
    seeds: int = 1
    """The number of runs of each setting, with --seed 1, 2, ..."""
    flags: str = ""
    """Other flags of all runs, as one text after an =: --flags="--train.max_steps 50"."""
    out_dir: str = "out/sweep"
    """The folder of the runs, the table and the page. What is finished there is not run again."""

    def problems(self) -> list[str]:
        """Return every problem with the values that can be found before anything is run."""
        problems = below_minimum(self, "", 1, "seeds")
        try:
            words = shlex.split(self.flags)
        except ValueError as error:
            words = []
            problems.append(f"--flags {self.flags}: {error}; close the quotation")
        for word in words:
            name = word.removeprefix("--").partition("=")[0]
            if word.startswith("--") and name in SET_BY_THE_SWEEP:
                problems.append(f"--flags {word}: the sweep sets it itself; leave it out")
        if self.method not in FINETUNE:
            methods = ", ".join(FINETUNE)
            return [*problems, f"--method {self.method}: expected one of {methods}"]
        if not self.grid:
            problems.append(
                "--grid is missing: name flags with values, such as lora.r=8,32"
            )
        elif not self.grid[0].partition("=")[0] or "=" not in self.grid[0]:
            problems.append(
                f"--grid {self.grid[0]}: expected FLAG=VALUE,VALUE, such as lora.r=8,32"
            )
        else:
            problems += self._axis_problems()
        return problems

    def _axis_problems(self) -> list[str]:
        """Return the problems of the flags and the values of the grid."""
        problems = []
        known = types_of_flags(FINETUNE[self.method])
        seen: set[str] = set()
        for name, values in self.axes().items():
            flags = _together(name)
            for flag in flags:
                if flag in OWN_FLAGS:
                    problems.append(
                        f"--grid {flag}: the sweep sets it itself; leave it out"
                    )
                elif flag not in known:
                    value = values[0] if values else ""
                    problems.append(f"--grid: {unknown_flag(flag, known, value, {})}")
                elif flag in seen:
                    problems.append(
                        f"--grid {flag}: the flag is there twice; leave one out"
                    )
                seen.add(flag)
            problems += _value_problems(name, flags, values)
        return problems

    def axes(self) -> dict[str, list[str]]:
        """Return the values of each flag of the grid, or of flags that change together."""
        texts: dict[str, str] = {}
        name = ""
        # commas divide the items of a list on the command line, also those of a flag's values
        for item in self.grid:
            if "=" in item:
                name, _, value = item.partition("=")
                name = name.removeprefix("--").strip()
                # a flag may be there several times
                texts[name] = f"{texts[name]},{value}" if name in texts else value
            else:
                texts[name] += f",{item}"
        axes = {}
        for flag, text in texts.items():
            separator = "|" if "|" in text else ","
            axes[flag] = [value.strip() for value in text.split(separator)]
        return axes

    def settings(self) -> list[Setting]:
        """Return all combinations of the values."""
        axes = self.axes()
        settings = []
        for values in product(*axes.values()):
            setting: Setting = {}
            for name, value in zip(axes, values, strict=True):
                flags = _together(name)
                setting.update(zip(flags, _divided(value, flags), strict=True))
            settings.append(setting)
        return settings


def _value_problems(name: str, flags: list[str], values: list[str]) -> list[str]:
    """Return the problems of the values of a flag, or of flags that change together."""
    problems = []
    divided = []
    for value in values:
        parts = _divided(value, flags)
        if len(parts) != len(flags):
            problems.append(
                f"--grid {name}: {value} has {len(parts)} of {len(flags)} values; write one for "
                "each flag, with a + between them"
            )
        elif not all(parts):
            problems.append(f"--grid {name}=: a value is empty; write FLAG=VALUE,VALUE")
        elif parts in divided:
            problems.append(f"--grid {name}: a value is there twice; leave one out")
        divided.append(parts)
    return problems


def _together(name: str) -> list[str]:
    """Return the flags that change together, which have a + between them."""
    return [flag.strip().removeprefix("--") for flag in name.split("+")]


def _divided(value: str, flags: list[str]) -> list[str]:
    """Return the value of each flag. A + in the value of a single flag belongs to it."""
    if len(flags) == 1:
        return [value]
    return [part.strip() for part in value.split("+")]


def setting_name(setting: Setting) -> str:
    """Return a short name for a setting: each flag by its last word, unless several groups have
    it."""
    parts = []
    for name, value in setting.items():
        word = name.rpartition(".")[2]
        if word in _shared_words():
            word = name
        parts.append(f"{word}={value}")
    return ", ".join(parts)


@cache
def _shared_words() -> set[str]:
    """Return the last words of flags that several groups have, such as alpha."""
    flags = types_of_flags(FINETUNE["lora"])
    words = Counter(name.rpartition(".")[2] for name in flags)
    return {word for word, count in words.items() if count > 1}
