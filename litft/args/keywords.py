"""The keyword arguments of `litft.finetune`: every flag by a Python name, checked like the command
line."""

import difflib
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_origin

from litft.args.aliases import translate_flag
from litft.args.finetune import FinetuneArgs
from litft.args.finetune_commands import FINETUNE
from litft.args.flag_types import short_name, types_of_flags
from litft.args.parser import parse

# flags with a parameter of their own
PARAMETER_OF_FLAG = {
    "checkpoint_dir": "model",
    "data.path": "data",
    "data.val_path": "val_data",
}
# groups whose names need their prefix to be clear: lora_r
PREFIXED_GROUPS = ("lora", "adapter")


def keyword_names(cls: type[FinetuneArgs]) -> dict[str, str]:
    """Return {keyword: flag}: the flag's last name, or group_name if several groups have it, or if
    it is a method's."""
    flags = [flag for flag in types_of_flags(cls) if flag not in PARAMETER_OF_FLAG]
    leaves = [short_name(flag) for flag in flags]
    names = {}
    for flag, leaf in zip(flags, leaves, strict=True):
        group = flag.rpartition(".")[0]
        # lora_r rather than r, and a leaf alone only if no other group has it
        is_clear = not group or (leaves.count(leaf) == 1 and group not in PREFIXED_GROUPS)
        if is_clear:
            names[leaf] = flag
        else:
            names[flag.replace(".", "_")] = flag
    return names


def from_keywords(method: str, keywords: Mapping[str, Any]) -> FinetuneArgs:
    """Return the arguments of a method from keywords.

    `group_name` is accepted for every flag of a group.

    Raise TypeError for an unknown keyword, and ValueError, with all mistakes, for invalid values.
    """
    if method not in FINETUNE:
        raise ValueError(f"method {method!r} does not exist; use {', '.join(FINETUNE)}")
    types = types_of_flags(FINETUNE[method])
    names = keyword_names(FINETUNE[method])
    # beside the short name, every flag has the name with its group
    for flag in types:
        names[flag.replace(".", "_")] = flag
    names["config"] = "config"
    messages = []
    for name, value in keywords.items():
        if name not in names:
            messages.append(_unknown_keyword(name, value, names))
    if messages:
        raise TypeError("\n".join(messages))
    by_flag: dict[str, str] = {}
    for name in keywords:
        other = by_flag.setdefault(names[name], name)
        if other != name:
            raise TypeError(f"finetune() got two values of one flag: {other} and {name}")
    words = []
    # --config comes first, so that all other keywords override the flags of the file
    for name, value in ({"config": None} | dict(keywords)).items():
        if name == "config" and value is None:
            continue
        flag = names[name]
        # the command line splits texts at commas, which a prompt may contain
        if flag == "eval.prompts" and isinstance(value, str):
            value = [value]
        words.append(f"--{flag}={_as_word(value, types.get(flag))}")
    # as the user has written them, often without a group: `parse` refuses ambiguous ones
    short = [f"--{name}" for name in keywords]
    return parse(FINETUNE[method], words, short=short)


def _unknown_keyword(name: str, value: Any, names: Mapping[str, str]) -> str:
    """Return a message that names the keyword that is meant: of a flag of another program, or the
    nearest name."""
    message = f"finetune() got an unexpected keyword argument {name!r}"
    if value is None:
        text = "null"
    else:
        text = str(value)
    # a translation is written as on the command line; here it is shown as a keyword
    translation = translate_flag(name, text)
    if translation is not None:
        # as on the command line, `--train.epochs 3`; empty for what litft does by itself
        flag_text, note = translation
        if not flag_text:
            return f"{message}; leave it out{note}"
        # several flags have no keyword together
        if flag_text.count("--") > 1:
            return f"{message}; here it is {flag_text}{note}"
        flag, _, setting = flag_text.removeprefix("--").partition(" ")
        # the model and the data have parameters of their own, which `names` does not contain
        keyword = PARAMETER_OF_FLAG.get(flag) or _keyword_of(flag, names)
        # a flag whose keyword has another form is named as the command has it
        if keyword:
            here = f"{keyword}={_literal(setting)}"
        else:
            here = f"--{flag}"
        return f"{message}; here it is {here}{note}"
    matches = difflib.get_close_matches(name, [*names, *PARAMETER_OF_FLAG.values()], n=1)
    if matches:
        return f"{message}; did you mean {matches[0]}?"
    return message


def _keyword_of(flag: str, names: Mapping[str, str]) -> str | None:
    """Return the first keyword of a flag; names: the flags by keyword."""
    for keyword, other in names.items():
        if other == flag:
            return keyword
    return None


def _literal(setting: str) -> str:
    """Return the value of a flag as Python writes it; a flag without a value is True."""
    if setting in ("", "true", "false"):
        return str(setting != "false")
    # or a placeholder such as N
    is_number = re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?|[A-Z]+", setting)
    if is_number:
        return setting
    return repr(setting)


def name_keywords(message: str, method: str) -> str:
    """Return a message with the keywords of `litft.finetune` instead of flags: max_steps for
    --train.max_steps."""
    types = types_of_flags(FINETUNE[method])
    keywords = {flag: name for name, flag in keyword_names(FINETUNE[method]).items()}
    keywords |= PARAMETER_OF_FLAG

    def keyword(match: re.Match) -> str:
        name = keywords.get(match[1], match[0])
        # on the command line, a boolean flag alone means true
        if types.get(match[1]) is bool and not match[2]:
            return f"{name}=True"
        return f"{name}{match[2]}"

    return re.sub(r"--([a-z_]+(?:\.[a-z_]+)?)((?: (?:true|false)\b)?)", keyword, message)


def _as_word(value: Any, flag_type: Any) -> str:
    """Return a value in the form of the command line. A mapping becomes a list of NAME=VALUE."""
    if get_origin(flag_type) is list:
        if isinstance(value, Mapping):
            value = _as_pairs(value)
        # text is divided at its commas, as on the command line; "null" stands for an empty list
        if value is None or isinstance(value, str):
            return value or "null"
        if isinstance(value, Iterable):
            items = list(value)
        else:
            items = [value]
        # a list has floats, also those of numpy and torch, or texts
        if get_args(flag_type) == (float,):
            items = [item.item() if hasattr(item, "item") else item for item in items]
        else:
            items = list(map(str, items))
        return json.dumps(items)
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value)


def _as_pairs(mapping: Mapping[str, Any]) -> list[str]:
    """Return a mapping as NAME=VALUE."""
    pairs = []
    for name, value in mapping.items():
        if not isinstance(value, str):
            value = json.dumps(value)
        pairs.append(f"{name}={value}")
    return pairs


def signature(parameters: list[inspect.Parameter]) -> inspect.Signature:
    """Return the signature of `litft.finetune`: its own parameters and the flags of all methods,
    for completion and help."""
    flags: dict[str, inspect.Parameter] = {}
    for cls in FINETUNE.values():
        types = types_of_flags(cls)
        defaults = cls()
        for name, flag in keyword_names(cls).items():
            default = defaults
            for part in flag.split("."):
                default = getattr(default, part)
            # methods share most flags: the first one's default is shown
            flags.setdefault(
                name,
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=types[flag],
                ),
            )
    return inspect.Signature([*parameters, *flags.values()])
