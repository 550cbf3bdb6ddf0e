"""Parse the command line into an arguments dataclass, with jsonargparse's parser of its flags.

In addition to jsonargparse: a boolean flag without a value means true, lists are written `a,b`, and
one message reports all mistakes and suggests the nearest flag name.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

from jsonargparse import ArgumentError, ArgumentParser

from litft import args as flags
from litft import run_dir
from litft.args.aliases import (
    translate_optimizer,
    translate_precision,
)
from litft.args.build_parser import AnyArgs, args_from, is_valid, parser_for_help, parser_of
from litft.args.config_files import DEMO, GRPO_DEMO, read_config
from litft.args.finetune_commands import FINETUNE
from litft.args.flag_names import full_flag, is_former, problem_of_other_group, renamed
from litft.args.flag_types import describe_type, types_of_flags
from litft.args.lists import as_list, next_value, next_values
from litft.args.lost_paths import lost_paths
from litft.args.messages import hint_for, not_a_flag, replaced_list, unknown_flag
from litft.args.recipes import is_recipe


def parse(
    cls: type[AnyArgs],
    argv: list[str],
    prog: str | None = None,
    short: Sequence[str] = (),
) -> AnyArgs:
    """Return an instance of the dataclass `cls` from flags.

    Later flags win, and all win over --config FILE.yaml, and over the recipe of --config NAME.
    short: names as a user has given them, `--name`, for flags that `argv` has with their group.

    Raise ValueError with all mistakes in one message.
    """
    flag_types = types_of_flags(cls)
    values, problems, passthrough = _read_argv(argv, cls)
    if issubclass(cls, flags.FinetuneArgs):
        values, invalid = _for_finetuning(values, cls)
        problems = problems + invalid
    problems = [
        *problems,
        *_names_of_other_groups([*argv, *short], dict(values), flag_types),
    ]
    words = [f"--{name}={value}" for name, value in values]
    # --help would end the process before the problems are shown
    if not problems:
        words += passthrough
    if {"-h", "--help"} & set(words):
        parser = parser_for_help(cls)
    else:
        parser = parser_of(cls)
    parser.prog = prog or Path(sys.argv[0]).name
    try:
        namespace = parser.parse_args(words)
    except (ArgumentError, OverflowError) as error:
        # the error names only the first invalid flag
        problems += _invalid_values(parser, values, flag_types) or [str(error)]
    if problems:
        raise ValueError("\n".join(problems))
    args = args_from(namespace, cls)
    # of a flag that is given several times, the last value
    for name, value in dict(values).items():
        if flag_types[name] in (str, str | None) and value != "null":
            _set_text(args, name, value)
    problems = getattr(args, "problems", list)()
    if problems:
        raise ValueError("\n".join(problems))
    if isinstance(args, flags.RunEvalArgs):
        args.given_flags = frozenset(name for name, _ in values)
    return args


def _set_text(args: Any, name: str, value: str) -> None:
    """Set a flag that is a text to its value as it was written: jsonargparse reads "# a" as
    null."""
    group, _, leaf = name.rpartition(".")
    owner = getattr(args, group) if group else args
    setattr(owner, leaf, value)


def _for_finetuning(
    values: list[tuple[str, str]], cls: type
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the flags of a fine-tuning command with those that are implied, with the names of
    other programs' optimizers and precisions replaced by ours, and the problems."""
    implied, problems = _implied_flags(dict(values), cls)
    renamed = []
    # flags of the resumed run or of the demo come first, so that those on the command line win
    for name, value in implied + values:
        if name == "train.optimizer":
            renamed.append((name, translate_optimizer(value)))
        else:
            renamed.append((name, value))
    values, invalid = _with_our_precision(renamed, is_full=cls is flags.FullFinetuneArgs)
    return values, problems + invalid


def _with_our_precision(
    values: list[tuple[str, str]], is_full: bool
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the flags with Lightning's names of --precision replaced by ours, and the problems."""
    renamed = []
    try:
        for name, value in values:
            if name == "precision":
                renamed.append((name, translate_precision(value, is_full)))
            else:
                renamed.append((name, value))
    except ValueError as error:
        return [pair for pair in values if pair[0] != "precision"], [str(error)]
    return renamed, []


def _invalid_values(
    parser: ArgumentParser, values: list[tuple[str, str]], flag_types: dict[str, Any]
) -> list[str]:
    """Return the problems of all values that are not of their flag's type."""
    problems = []
    for name, value in values:
        if not is_valid(parser, f"--{name}={value}"):
            expected = describe_type(flag_types[name])
            hint = hint_for(name, value, expected)
            problems.append(f"--{name} {value}: expected {expected}{hint}")
    return problems


def _read_argv(
    argv: list[str], cls: type
) -> tuple[list[tuple[str, str]], list[str], list[str]]:
    """Return the (name, value) pairs, the problems with the names, and the words to pass on to
    jsonargparse."""
    flag_types = types_of_flags(cls)
    from_files = []
    values = []
    problems = []
    passthrough = []
    words = list(argv)
    recipe = None
    unknown = {}
    while words:
        word = words.pop(0)
        if word in ("-h", "--help") or word.startswith("--print_config"):
            passthrough.append(word)
            continue
        if not word.startswith("--"):
            problems.append(not_a_flag(word, flag_types))
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        name = full_flag(name, flag_types)
        if is_former(name, flag_types):
            if not equals:
                value = _next_boolean(words)
            values.append(renamed(name, value))
            continue
        if not equals:
            if flag_types.get(name) in (bool, bool | None):
                value = _next_boolean(words)
            elif get_origin(flag_types.get(name)) is list:
                value = next_values(words, flag_types[name], name)
            else:
                value = next_value(words)
        # a flag of `sweep`, for its runs
        if name == "config" and "config" not in flag_types:
            # a file has priority over a recipe of the same name
            if value and is_recipe(value) and not os.path.isfile(value):
                recipe = value
            file_values, file_problems = read_config(value, cls, _objective(argv))
            from_files += file_values
            problems = problems + file_problems
        elif name not in flag_types:
            unknown[name] = value
        elif value is None:
            problems.append(f"--{name} needs a value")
        else:
            if get_origin(flag_types[name]) is list:
                if name in dict(values):
                    print(replaced_list(name), file=sys.stderr)
                value = as_list(value, flag_types[name], name)
            values.append((name, value))
    values = from_files + values
    # the message about one flag may depend on the value of another
    given = dict(values) | unknown
    for name, value in unknown.items():
        problems.append(unknown_flag(name, flag_types, value, given))
    if recipe and not (problems or passthrough or _has_model(dict(values))):
        problems.append(f"--config {recipe} is a recipe; add {_added_to_recipe(cls)}")
    return values, problems, passthrough


def _added_to_recipe(cls: type) -> str:
    """Return what a command needs besides a recipe."""
    if cls is flags.PlanArgs:
        return "the model: --checkpoint_dir"
    return "the model and the data: --checkpoint_dir and --data.path"


def _next_boolean(words: list[str]) -> str:
    """Remove the value of a boolean flag from the words after it, and return it.

    The flag alone means true, unless its value is the next word.
    """
    if words and words[0].lower() in ("true", "false"):
        return words.pop(0)
    return "true"


def _has_model(values: dict[str, str]) -> bool:
    """Return whether flags name a model, or resume a run, which has one."""
    return "checkpoint_dir" in values or _is_on(values.get("resume", ""))


def _is_on(text: str) -> bool:
    """Return whether the text of a boolean flag means true, as YAML 1.1 reads it."""
    return text.lower() in ("true", "yes", "on")


def finetune_args(run: Path) -> flags.FinetuneArgs:
    """Return the flags that a run was started with."""
    return parse(FINETUNE[run_dir.method(run)], ["--config", str(run / run_dir.CONFIG)])


def method_name(cls: type) -> str:
    """Return the name of the method whose arguments class is `cls`."""
    return next(name for name, args in FINETUNE.items() if args is cls)


def _implied_flags(
    values: dict[str, str], cls: type
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the flags that are implied, and problems: those of the resumed run, or the demo's if
    no model is named."""
    method = method_name(cls)
    # --overwrite beside --resume is refused later, by `FinetuneArgs.problems`
    if _is_on(values.get("resume", "")) and not _is_on(values.get("overwrite", "")):
        run = run_dir.named_or_newest(values.get("out_dir"), resume=True)
        if run and run_dir.is_run(run):
            run_method = run_dir.method(run)
            if run_method != method:
                return [], [
                    f"--resume: {run} is a run of another method; continue it with "
                    f"finetune/{run_method}.py"
                ]
            run_values, problems = read_config(run / run_dir.CONFIG, cls)
            lost = lost_paths(run_values, given=values)
            if lost:
                problems.append(
                    f"{run / run_dir.CONFIG}: {' and '.join(lost.values())} are not found from "
                    "this folder; resume in the folder where the run was started, or add "
                    f"{' and '.join(lost)}"
                )
            # litft does not write them: they would continue another run, or delete this one
            for name, value in run_values:
                if name in ("out_dir", "resume", "overwrite", "config"):
                    problems.append(
                        f"{run / run_dir.CONFIG}: {name} {value} is no setting of a run; remove "
                        "the line"
                    )
            # other devices may need another strategy
            if values.keys() & {"devices", "num_nodes"} and "strategy" not in values:
                of_devices = ("strategy", "shard_size")
                run_values = [pair for pair in run_values if pair[0] not in of_devices]
            return run_values, problems
        if "checkpoint_dir" not in values:
            if run:
                reason = f"there is no run in {run}"
            else:
                reason = f"there is no unfinished run under {run_dir.OUT}/"
            return [], [
                f"--resume: {reason}; name it with --out_dir, or start one with --checkpoint_dir "
                "and --data.path"
            ]
    # with --resume, this is the first start of a job that has the flag for when it is queued again
    if "checkpoint_dir" in values:
        folder = values["checkpoint_dir"]
        if _is_on(values.get("resume", "")) and run_dir.is_run(Path(folder)):
            return [], [
                f"--resume continues the run in --out_dir: use --resume --out_dir {folder}"
            ]
        return ([], [])
    # no model is named: the demo
    if values.get("objective") == "grpo":
        method = GRPO_DEMO
    return read_config(DEMO / f"{method}.yaml", cls)


def _objective(words: list[str]) -> str:
    """Return the value of --objective on the command line; empty if it is not there."""
    for index, word in enumerate(words):
        if word == "--objective" and index + 1 < len(words):
            return words[index + 1]
        if word.startswith("--objective="):
            return word.partition("=")[2]
    return ""


def _names_of_other_groups(
    words: list[str], values: Mapping[str, str], flag_types: dict[str, Any]
) -> Iterator[str]:
    """Yield the problems of `problem_of_other_group` with the names on a command line.

    values: also those of a file, and of the run that is resumed, which may name the objective.
    """
    objective = values.get("objective", "")
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--").partition("=")[0]
            yield from problem_of_other_group(name, objective, flag_types)
