"""Parse the command line into an arguments dataclass, with jsonargparse's parser of its flags.

In addition to jsonargparse: a boolean flag without a value means true, lists are written `a,b`, and
one message reports all mistakes and suggests the nearest flag name.
"""

import difflib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from litft import args as flags
from litft import run_dir
from litft.args.aliases import (
    FORMER_FLAGS,
    translate_flag,
    translate_optimizer,
    translate_precision,
)
from litft.args.build_parser import AnyArgs, args_from, parser_for_help, parser_of
from litft.args.finetune_methods import FINETUNE
from litft.args.flag_types import describe_type, is_finetuning, short_name, types_of_flags
from litft.args.foreign_config import translate_config
from litft.args.lists import as_list, item_texts, next_value, next_values
from litft.args.lost_paths import lost_paths
from litft.args.messages import hint_for, not_a_flag, replaced_list, unknown_flag
from litft.args.recipes import KEY, is_recipe, names, recipe_file
from litft.args.yaml_files import as_text, flatten, read_texts, read_yaml

DEMO = Path(__file__).parent.parent / "demo"
# the demo of learning from rewards, for --config
GRPO_DEMO = "grpo-demo"

# settings of a recipe that memory depends on and `plan` does not have, with the values that change
# nothing
NOT_PLANNED: dict[str, tuple[Any, ...]] = {
    "objective": ("sft",),
    "train.freeze": ([], None),
    "train.optimizer_in_backward": (False,),
    "data.new_tokens": ([], None),
}


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
        if not _is_valid(parser, f"--{name}={value}"):
            expected = describe_type(flag_types[name])
            hint = hint_for(name, value, expected)
            problems.append(f"--{name} {value}: expected {expected}{hint}")
    return problems


def _is_valid(parser: ArgumentParser, word: str) -> bool:
    """Return whether `word`, one --flag=value, has a value of the flag's type."""
    try:
        parser.parse_args([word])
    except (ArgumentError, OverflowError):
        # a whole number beyond the range of floats
        return False
    return True


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
        name = _full_name(name, flag_types)
        if _is_former(name, flag_types):
            if not equals:
                value = _next_boolean(words)
            values.append(_renamed(name, value))
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
            file_values, file_problems = _read_config(value, cls, _objective(argv))
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
    if _is_on(values.get("resume", "")) and not _is_on(values.get("overwrite", "")):
        run = run_dir.from_flags(values.get("out_dir"), resume=True)
        if run and run_dir.is_run(run):
            run_method = run_dir.method(run)
            if run_method != method:
                return [], [
                    f"--resume: {run} is a run of another method; continue it with "
                    f"finetune/{run_method}.py"
                ]
            run_values, problems = _read_config(run / run_dir.CONFIG, cls)
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
    if "checkpoint_dir" in values:
        folder = values["checkpoint_dir"]
        if values.get("resume", "").lower() == "true" and run_dir.is_run(Path(folder)):
            return [], [
                f"--resume continues the run in --out_dir: use --resume --out_dir {folder}"
            ]
        return ([], [])
    if values.get("objective") == "grpo":
        method = GRPO_DEMO
    return _read_config(DEMO / f"{method}.yaml", cls)


def _read_config(
    path: str | Path | None, cls: type, objective: str = ""
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the (name, value) pairs of a YAML file or of a recipe, and its problems. objective: of
    the command line, if it has one."""
    if path is None:
        return [], ["--config needs a value: a YAML file of flags"]
    if not os.path.isfile(path):
        problem = _problem_of_recipe(str(path), cls)
        if problem:
            return [], [problem]
        path = DEMO / f"{path}.yaml" if path == GRPO_DEMO else recipe_file(str(path))
    flag_types = types_of_flags(cls)
    try:
        text = Path(path).read_text("utf-8")
        content = read_yaml(text) or {}
        if not isinstance(content, dict):
            raise ValueError(f"expected a mapping of flags, found {type(content).__name__}")
        recipe = content.pop(KEY, None)
        method = None
        if isinstance(recipe, dict):
            method = recipe.get("method")
        if method and cls is flags.PlanArgs:
            return _planned_settings(path, content, method)
        if method and cls is not FINETUNE.get(method):
            return [], [
                f"--config {Path(path).stem} is a recipe of finetune/{method}.py; use that command"
            ]
        entries = _entries(content, flag_types)
        written = _entries(read_texts(text), flag_types)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return [], [
            f"--config {path}: no valid YAML of flags ({' '.join(str(error).split())[:200]})"
        ]
    all_texts = _texts(entries, written, flag_types)
    problems = _config_problems(path, cls, entries, all_texts)
    objective = objective or all_texts.get("objective", "")
    for name in content:
        for problem in _other_group(str(name), objective, flag_types):
            problems.append(f"{path}: {problem}")
    texts = {}
    for name, text in all_texts.items():
        if name not in flag_types:
            continue
        if get_origin(flag_types[name]) is list:
            text = _list_text(entries[name], text, name, flag_types)
        texts[name] = text
    return list(texts.items()), problems


def _texts(
    entries: dict[str, Any], written: dict[str, Any], flag_types: dict[str, Any]
) -> dict[str, str]:
    """Return the values of a YAML file in the form of the command line. written: the same values
    before YAML has read numbers, dates and truth values in them."""
    texts = {}
    for name, value in entries.items():
        flag_type = flag_types.get(name)
        if _is_empty(value, flag_type):
            continue
        # a text such as 010 or no stays what it is
        is_text = flag_type is str or str in get_args(flag_type)
        if is_text and not isinstance(value, str | list | dict | None):
            texts[name] = written[name]
        else:
            texts[name] = as_text(value)
    return texts


def _planned_settings(
    path: str | Path, content: dict, method: str
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the flags of `plan` for a recipe, its settings that memory and time depend on, and the
    problems of the recipe."""
    plan_flags = types_of_flags(flags.PlanArgs)
    run_flags = types_of_flags(FINETUNE[method])
    values = [("method", method)]
    problems = []
    for name, value in flatten(content, set(), flags.GROUPS):
        if name not in run_flags:
            problems.append(f"{path}: {unknown_flag(name, run_flags, as_text(value), {})}")
            continue
        if name in NOT_PLANNED and value not in NOT_PLANNED[name]:
            problems.append(
                f"{path}: plan does not know {name} {as_text(value)}; --dry_run of the run does"
            )
        # what a run chooses by itself, `plan` does too
        if value == "auto":
            continue
        # `plan` has the flags of data and training without their groups
        for plan_name in (name, name.rpartition(".")[2]):
            if plan_name in plan_flags:
                values.append((plan_name, as_text(value)))
                break
    return values, problems


def _entries(content: dict, flag_types: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a YAML file by the full names of their flags."""
    list_flags = set()
    for name, flag_type in flag_types.items():
        if get_origin(flag_type) is list:
            list_flags.add(name)
    entries = {}
    for name, value in flatten(content, list_flags, flags.GROUPS):
        full_name = _full_name(name, flag_types)
        if full_name in entries:
            raise ValueError(f"{full_name} is there twice, also as {name}; write it once")
        entries[full_name] = value
    for name in list(entries):
        if _is_former(name, flag_types):
            new_name, value = _renamed(name, as_text(entries.pop(name)))
            entries.setdefault(new_name, value)
    return entries


def _config_problems(
    path: str | Path, cls: type, entries: dict[str, Any], all_texts: dict[str, str]
) -> list[str]:
    """Return the problems of a YAML file's flags.

    entries, all_texts: its values, and their form on the command line, by flag.
    """
    flag_types = types_of_flags(cls)
    unknown = [name for name in all_texts if name not in flag_types]
    if unknown and cls not in FINETUNE.values() and _is_litfts(all_texts):
        return [
            f"{path}: these are flags of finetune/lora.py; use finetune/lora.py --config {path} "
            "--dry_run"
        ]
    # neither long values nor mappings, whose fields have other names here
    brief = {}
    for name, text in all_texts.items():
        if len(text) > 80 or "{" in text:
            brief[name] = "..."
        else:
            brief[name] = text
    problems = []
    for name in unknown:
        problems.append(f"{path}: {unknown_flag(name, flag_types, brief[name], brief)}")
    # a file of another program: show all of it in litft's terms
    if is_finetuning(flag_types) and any(
        translate_flag(name, all_texts[name]) for name in unknown
    ):
        parser = parser_of(cls)

        def accepts(name: str, text: str) -> bool:
            return _accepts(parser, name, text, flag_types)

        terms, notes = translate_config(entries, all_texts, flag_types, accepts)
        problems += [f"{path}: {note}" for note in notes]
        problems.append(
            f"{path} in litft's terms, without what has no counterpart:\n\n{terms}\n"
        )
    if all_texts.get("resume") == "true" and "out_dir" not in entries:
        problems.append(f"{path}: resume continues the run in out_dir, which is missing")
    return problems


def _list_text(value: Any, text: str, name: str, flag_types: dict[str, Any]) -> str:
    """Return the value of a list's flag in a YAML file as JSON; `text` is its form on the command
    line."""
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, list):
        return json.dumps(item_texts(value), ensure_ascii=False, default=str)
    return as_list(text, flag_types[name], name)


def _problem_of_recipe(name: str, cls: type) -> str:
    """Return why a name that is no file is no recipe for a command; empty if it is one."""
    takes_recipes = cls in FINETUNE.values() or cls is flags.PlanArgs
    if not takes_recipes:
        return f"--config {name}: no such file"
    if is_recipe(name) or (name == GRPO_DEMO and cls is flags.LoRAFinetuneArgs):
        return ""
    matches = difflib.get_close_matches(name, names(), n=1)
    remedy = "`litft recipes` lists the recipes"
    if matches:
        remedy = f"did you mean {matches[0]}?"
    return f"--config {name}: no such file or recipe; {remedy}"


def _full_name(name: str, flag_types: dict[str, Any]) -> str:
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
    """Yield the problems of `_other_group` of the names on a command line.

    values: also those of a file, and of the run that is resumed, which may name the objective.
    """
    objective = values.get("objective", "")
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--").partition("=")[0]
            yield from _other_group(name, objective, flag_types)


def _other_group(name: str, objective: str, flag_types: dict[str, Any]) -> Iterator[str]:
    """Yield the problem of a name without its group that stands for the flag of another group than
    the objective's, which has one of that name, too."""
    meant = f"{objective}.{name}"
    full_name = _full_name(name, flag_types)
    if name not in flag_types and meant in flag_types and full_name in flag_types:
        yield (
            f"--{name} stands for --{full_name}, but --objective {objective} has --{meant}, too; "
            "write the one that is meant"
        )


def _is_former(name: str, flag_types: dict[str, Any]) -> bool:
    """Return whether a name is the former one of a flag that the command has."""
    return name in FORMER_FLAGS and FORMER_FLAGS[name][0] in flag_types


def _renamed(name: str, value: str) -> tuple[str, str]:
    """Return the name and the value of the flag that has taken the place of another."""
    new_name, new_values = FORMER_FLAGS[name]
    return new_name, new_values.get(value.lower(), value)


def _is_empty(value: Any, flag_type: Any) -> bool:
    """Return whether a flag has no value in a file, although it needs one: then its default is
    used."""
    return (
        value is None
        and flag_type is not None
        and not (type(None) in get_args(flag_type) or get_origin(flag_type) is list)
    )


def _accepts(
    parser: ArgumentParser, name: str, text: str, flag_types: dict[str, Any]
) -> bool:
    """Return whether a flag accepts a value."""
    if get_origin(flag_types[name]) is list:
        word = as_list(text, flag_types[name], name)
    elif name == "train.optimizer":
        word = translate_optimizer(text)
    else:
        word = text
    return _is_valid(parser, f"--{name}={word}")


def _is_litfts(texts: dict[str, str]) -> bool:
    """Return whether a file has flags of fine-tuning, by their full names."""
    return any(name.startswith(("train.", "lora.", "adapter.", "save.")) for name in texts)
