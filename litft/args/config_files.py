"""Read the flags of --config: a YAML file, a recipe, or settings of another program."""

import difflib
import json
import os
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from jsonargparse import ArgumentParser

from litft import args as flags
from litft.args.aliases import translate_flag, translate_optimizer
from litft.args.build_parser import is_valid, parser_of
from litft.args.finetune_commands import FINETUNE
from litft.args.flag_names import full_flag, is_former, problem_of_other_group, renamed
from litft.args.flag_types import is_finetuning, types_of_flags
from litft.args.foreign_config import translate_config
from litft.args.lists import as_list, item_texts
from litft.args.messages import unknown_flag
from litft.args.recipes import KEY, is_recipe, names, recipe_file
from litft.args.yaml_files import as_text, flatten, read_texts, read_yaml

DEMO = Path(__file__).parent.parent / "demo"
# the demo of learning from rewards, for --config
GRPO_DEMO = "grpo-demo"

# settings of TRL that are a list, mostly of one value
LISTS_OF_TRL = ("loss_type",)

# settings of a recipe that memory depends on and `plan` does not have, with the values that change
# nothing
NOT_PLANNED: dict[str, tuple[Any, ...]] = {
    "objective": ("sft",),
    "train.freeze": ([], None),
    "train.optimizer_in_backward": (False,),
    "data.new_tokens": ([], None),
}


def read_config(
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
        # from here on, the file of the recipe
        if path == GRPO_DEMO:
            path = DEMO / f"{path}.yaml"
        else:
            path = recipe_file(str(path))
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
        # a list, since the file may have anything here
        if method is not None and method not in list(FINETUNE):
            raise ValueError(
                f"{KEY}: method {method!r} does not exist; use {', '.join(FINETUNE)}"
            )
        if method and cls is flags.PlanArgs:
            return _planned_settings(path, content, method)
        if method and cls is not FINETUNE.get(method):
            return [], [
                f"--config {Path(path).stem} is a recipe of finetune/{method}.py; use that command"
            ]
        # read twice: as values, and as they are written, for flags that are texts (010)
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
        for problem in problem_of_other_group(str(name), objective, flag_types):
            problems.append(f"{path}: {problem}")
    texts = {}
    for name, text in all_texts.items():
        if name not in flag_types:
            continue
        if get_origin(flag_types[name]) is list:
            text = _list_text(entries[name], text, name, flag_types)
        texts[name] = text
    return list(texts.items()), problems


def _entries(content: dict, flag_types: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a YAML file by the full names of their flags."""
    list_flags = set()
    for name, flag_type in flag_types.items():
        if get_origin(flag_type) is list:
            list_flags.add(name)
    entries = {}
    for name, value in flatten(content, list_flags, flags.GROUPS):
        full_name = full_flag(name, flag_types)
        if full_name in LISTS_OF_TRL and isinstance(value, list) and len(value) == 1:
            value = value[0]
        if full_name in entries:
            raise ValueError(f"{full_name} is there twice, also as {name}; write it once")
        entries[full_name] = value
    for name in list(entries):
        if is_former(name, flag_types):
            new_name, value = renamed(name, as_text(entries.pop(name)))
            entries.setdefault(new_name, value)
    return entries


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


def _is_empty(value: Any, flag_type: Any) -> bool:
    """Return whether a flag has no value in a file, although it needs one: then its default is
    used."""
    return (
        value is None
        and flag_type is not None
        and not (type(None) in get_args(flag_type) or get_origin(flag_type) is list)
    )


def _list_text(value: Any, text: str, name: str, flag_types: dict[str, Any]) -> str:
    """Return the value of a list's flag in a YAML file as JSON; `text` is its form on the command
    line."""
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, list):
        return json.dumps(item_texts(value), ensure_ascii=False, default=str)
    return as_list(text, flag_types[name], name)


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
    return is_valid(parser, f"--{name}={word}")


def _is_litfts(texts: dict[str, str]) -> bool:
    """Return whether a file has flags of fine-tuning, by their full names."""
    return any(name.startswith(("train.", "lora.", "adapter.", "save.")) for name in texts)


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
