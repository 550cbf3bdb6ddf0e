"""Command lines of random flags and values: they are read, or end in one message."""

import random

from mistakes import failure

from litft.args.flag_types import types_of_flags
from litft.args.parser import parse
from litft.cli import COMMANDS

NUMBERS = [
    "-1",
    "0",
    "1",
    "2147483647",
    "1e400",
    "nan",
    "inf",
    "-inf",
    "0.5",
    "1_000",
    "9" * 400,
]
YAML = [
    "null",
    "true",
    "[",
    "[1]",
    "[a,b]",
    "{}",
    "{a: 1}",
    "{a: {b: [}",
    "2026-11-26",
    "!!binary aGk=",
    "&a [*a]",
    "# a",
]
PATHS = ["../..", "~", "/dev/null", "*", "$HOME", "x" * 5000]
TEXTS = [
    "",
    " ",
    "x",
    "a=b",
    "a=",
    "=",
    "a=1,b=2",
    "a,b",
    "\t",
    "é",
    "\U0001f600",
    "--",
    "-",
    "@x",
]
WORDS = NUMBERS + YAML + PATHS + TEXTS


def command_line(flags, generator):
    """Return one to five flags with values; some misspelled, some without a value."""
    words = []
    for _ in range(generator.randint(1, 5)):
        flag = generator.choice(flags)
        if generator.random() < 0.1:
            flag = generator.choice(
                (f"{flag}s", flag[:-1], flag.replace(".", "-"), flag.upper(), f"{flag}.x")
            )
        value = generator.choice(WORDS)
        form = generator.random()
        if form < 0.1:
            words.append(f"--{flag}")
        elif form < 0.3:
            words.append(f"--{flag}={value}")
        else:
            words += [f"--{flag}", value]
    return words


def test_random_command_lines(cases, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    flags = {
        name: sorted(types_of_flags(command.args)) for name, command in COMMANDS.items()
    }
    failures = []
    for number in range(cases(60)):
        generator = random.Random(number)
        name = generator.choice(sorted(COMMANDS))
        words = command_line(flags[name], generator)
        problem = failure(lambda name=name, words=words: parse(COMMANDS[name].args, words))
        if problem:
            failures.append(f"{number}: litft {name} {words!r:.300}: {problem:.300}")
    assert not failures, "\n".join(failures)
    assert not list(tmp_path.iterdir())
