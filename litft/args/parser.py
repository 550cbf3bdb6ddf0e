"""From the command line to an instance of the arguments: jsonargparse in one place, and what it lacks.

A bare boolean flag means true, lists are `a,b`, and everything wrong comes in one message with the nearest name.
"""

import dataclasses
import difflib
import json
from argparse import SUPPRESS
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from litft import args as flags
from litft import run_dir
from litft.args.finetune import FINETUNE

DEMO = Path(__file__).parent.parent / "demo"

set_parsing_settings(docstring_parse_attribute_docstrings=True)


def parse(cls: type, argv: list[str], prog: str | None = None) -> Any:
    """An instance of the dataclass `cls` from flags, the later winning; --config FILE.yaml stands for its contents.

    ValueError with every mistake in it.
    """
    known = _flags(cls)
    given, problems, passed = _read(argv, known)
    if issubclass(cls, flags.FinetuneArgs):
        implied, wrong = _implied(dict(given), known, _method(cls))
        given, problems = implied + given, problems + wrong
    parser, words = _parser(cls, prog=prog, exit_on_error=False), [f"--{name}={value}" for name, value in given]
    try:
        namespace = parser.parse_args(words + (passed if not problems else []))
    except ArgumentError as error:  # of one flag; the others may be wrong too
        wrong = [pair for pair, word in zip(given, words, strict=True) if not _parses(parser, word)]
        problems += [f"--{name} {value}: expected {_describe(known[name])}" for name, value in wrong] or [str(error)]
    if problems:
        raise ValueError("\n".join(problems))
    namespace.pop("config", None)
    args = cls(**vars(parser.instantiate(namespace)))
    for name, value in given:
        if known[name] in (str, str | None) and value != "null":
            group, _, leaf = name.rpartition(".")
            setattr(getattr(args, group) if group else args, leaf, value)  # as typed: jsonargparse reads "# a" as null
    if problems := getattr(args, "problems", list)():
        raise ValueError("\n".join(problems))
    return args


def _parses(parser: ArgumentParser, word: str) -> bool:
    """Whether one flag's value is of its type."""
    try:
        parser.parse_args([word])
    except ArgumentError:
        return False
    return True


def _parser(cls: type, **settings: Any) -> ArgumentParser:
    parser = ArgumentParser(description=cls.__doc__, usage="%(prog)s [flags]", **settings)
    parser.add_argument("--config", action="config", help="A YAML file of flags, such as a run's config.yaml.")
    parser.add_class_arguments(cls, as_group=False)
    groups = [item.name for item in dataclasses.fields(cls) if dataclasses.is_dataclass(item.type)]
    for action in parser._actions:
        if action.dest in groups:  # jsonargparse would take a file for each group: --config is the one way here
            action.help = SUPPRESS
        action.option_strings = [option for option in action.option_strings if not option.endswith("+")]
    return parser


def _flags(cls: type, prefix: str = "") -> dict[str, Any]:
    """Every flag's dotted name and type."""
    found = {}
    for item in dataclasses.fields(cls):
        if dataclasses.is_dataclass(item.type):
            found |= _flags(item.type, f"{prefix}{item.name}.")
        else:
            found[prefix + item.name] = item.type
    return found


def _read(argv: list[str], known: dict[str, Any]) -> tuple[list[tuple[str, str]], list[str], list[str]]:
    """Names and values as given, what is wrong with the names, and the words that are jsonargparse's own."""
    given, problems, passed, words = [], [], [], list(argv)
    while words:
        word = words.pop(0)
        if word in ("-h", "--help") or word.startswith("--print_config"):
            passed.append(word)
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            problems.append(f"{word!r} is no flag: flags begin with --")
            continue
        if not equals:
            bare = known.get(name) in (bool, bool | None) and (not words or words[0].lower() not in ("true", "false"))
            value = "true" if bare else words.pop(0) if words and not words[0].startswith("--") else None
        if name == "config":
            given_there, problems_there = _read_config(value, known)
            given, problems = given + given_there, problems + problems_there
        elif name not in known:
            problems.append(_unknown(name, known))
        elif value is None:
            problems.append(f"--{name} needs a value")
        else:
            given.append((name, _as_list(value, known[name]) if get_origin(known[name]) is list else value))
    return given, problems, passed


def finetune_args(run: Path) -> flags.FinetuneArgs:
    """What a run was begun with."""
    return parse(FINETUNE[run_dir.method(run)], ["--config", str(run / run_dir.CONFIG)])


def _method(cls: type) -> str:
    """The method whose arguments `cls` holds."""
    return next(name for name, args in FINETUNE.items() if args is cls)


def _implied(given: dict[str, str], known: dict[str, Any], method: str) -> tuple[list[tuple[str, str]], list[str]]:
    """What the flags need not repeat: those a resumed run began with, or the demo's recipe where there is no model."""
    if given.get("resume", "").lower() == "true" and "overwrite" not in given:
        run = run_dir.named(given.get("out_dir"), resume=True)
        if run and run_dir.is_run(run):
            if (other := run_dir.method(run)) != method:
                return [], [f"--resume: {run} is a run of another method; continue it with finetune/{other}.py"]
            stored, wrong = _read_config(run / run_dir.CONFIG, known)
            others = given.keys() & {"devices", "num_nodes"} and "strategy" not in given  # which may want another strategy
            return [pair for pair in stored if not (others and pair[0] in ("strategy", "shard_size"))], wrong
        if "checkpoint_dir" not in given:
            reason = f"there is no run in {run}" if run else f"there is no unfinished run under {run_dir.OUT}/"
            return [], [f"--resume: {reason}; to begin one, pass --checkpoint_dir and --data.path"]
    return ([], []) if "checkpoint_dir" in given else _read_config(DEMO / f"{method}.yaml", known)


def _as_list(value: str, kind: Any) -> str:
    """a,b as ["a", "b"]; what is JSON stays, for texts with a comma in them. Numbers get no quotes."""
    if kind == list[float]:
        return f"[{value.strip('[]')}]"
    try:
        items = json.loads(value)
    except ValueError:
        items = None
    is_list = isinstance(items, list) and all(isinstance(item, str) for item in items)
    items = items if is_list else [item.strip() for item in value.split(",") if item.strip()]
    return json.dumps(items, ensure_ascii=False)  # YAML, which reads this, knows no escapes of surrogate pairs


def _read_config(path: str | Path | None, known: dict[str, Any]) -> tuple[list[tuple[str, str]], list[str]]:
    """A YAML file's entries as flags."""
    if path is None or not Path(path).is_file():
        return [], [f"--config {path}: no such file"]
    try:
        content = yaml.safe_load(Path(path).read_text("utf-8")) or {}
        if not isinstance(content, dict):
            raise ValueError(f"it holds {type(content).__name__}, not flags")
        entries = dict(_flatten(content))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return [], [f"--config {path}: no valid YAML of flags ({' '.join(str(error).split())[:200]})"]
    problems = [f"{path}: {_unknown(name, known)}" for name in entries if name not in known]
    words = {name: _as_word(value) for name, value in entries.items() if name in known}
    lists = {name: value for name, value in entries.items() if name in words and get_origin(known[name]) is list}
    for name, value in lists.items():
        words[name] = (
            json.dumps(value, ensure_ascii=False) if isinstance(value, list) else _as_list(words[name], known[name])
        )
    return list(words.items()), problems


def _flatten(content: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested entries under dotted names; an empty group has none."""
    for name, value in content.items():
        if value is None and name in flags.GROUPS:
            continue
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + str(name), value


def _as_word(value: Any) -> str:
    """A YAML value as it would stand on the command line."""
    if isinstance(value, str):
        return value
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


def _unknown(name: str, known: dict[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    near = near or [k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2]][:1]
    return f"--{name} does not exist" + (f"; did you mean --{near[0]}?" if near else "; --help lists all flags")


def _describe(kind: Any) -> str:
    """A type in words."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if kind in words:
        return words[kind]
    if get_origin(kind) is list:
        return "a list a,b,c"
    if get_origin(kind) is Literal:
        return " or ".join(get_args(kind))
    return " or ".join(words.get(part) or _describe(part) for part in get_args(kind))
