"""Messages about flags that do not exist, and about values of another type."""

import difflib
import os
import re
from typing import Any

from litft.args.aliases import hint_for_flag, translate_flag
from litft.args.finetune_commands import FINETUNE
from litft.args.flag_types import is_finetuning, types_of_flags

# of the commands that merge: what an adapter, its base and the result are called elsewhere
MERGED_FOLDERS = {
    "adapter": "checkpoint_dir",
    "lora_path": "checkpoint_dir",
    "peft_model": "checkpoint_dir",
    "base": "base_dir",
    "base_model": "base_dir",
    "out": "out_dir",
    "output": "out_dir",
    "export_dir": "out_dir",
}

# llama.cpp's other names of mixtures
OUTTYPES_ELSEWHERE = {"q4_k": "q4_k_m", "q5_k": "q5_k_m", "mxfp4_moe": "mxfp4"}
# methods that are a method and its flags here
METHODS_ELSEWHERE = {
    "qlora": "--method lora --quantize nf4",
    "dora": "--method lora --lora.dora true",
    "rslora": "--method lora --lora.rslora true",
}


def unknown_flag(
    name: str, flag_types: dict[str, Any], value: str | None, given: dict[str, str | None]
) -> str:
    """Return a message about a flag that does not exist: what another program's is called here, or
    the nearest name."""
    # a flag of another program, or one whose value changes nothing
    if is_finetuning(flag_types) and (message := hint_for_flag(name, value, given)):
        return message
    if is_finetuning(flag_types) and value in ("false", "null", "[]", "{}"):
        # of a switch that is off, the name may be a typing error
        nearest = _nearest(name, flag_types) if value == "false" else None
        return nearest or f"--{name} does not exist; leave it out"
    # PEFT's and axolotl's names of what is merged, and where to; elsewhere they mean something else
    if "dequantized_base" in flag_types and name in MERGED_FOLDERS:
        return f"--{name} does not exist; use --{MERGED_FOLDERS[name]} {value}"
    # also for other commands, if they have what another program's flag is called here
    if not is_finetuning(flag_types) and (translated := translate_flag(name, value)):
        ours = translated[0].partition(" ")[0].removeprefix("--")
        if ours in flag_types:
            return f"--{name} does not exist; use {translated[0]}"
    # the runs of a folder
    if "folder" in flag_types and name in ("dir", "out_dir"):
        return f"--{name} does not exist; use --folder {value}"
    # `plan` has some of the flags of fine-tuning without their group
    leaf = name.rpartition(".")[2]
    if "budget" in flag_types and leaf in flag_types:
        return f"--{name} does not exist here; use --{leaf} {value or ''}".rstrip()
    # a flag of fine-tuning that was given to another command
    if name in types_of_flags(FINETUNE["lora"]):
        return (
            f"--{name} does not exist here; it is a flag of the fine-tuning scripts, such as "
            "finetune/lora.py"
        )
    return _nearest(name, flag_types) or f"--{name} does not exist; --help lists all flags"


def _nearest(name: str, flag_types: dict[str, Any]) -> str | None:
    """Return a message with the flag whose name is the most like an unknown one; None if none is
    like it."""
    # reversed, so that of several flags with this last name, the first is suggested
    leaves = {}
    for flag in reversed(flag_types):
        leaves[flag.rpartition(".")[2]] = flag
    last_names = difflib.get_close_matches(
        name.rpartition(".")[2], leaves, n=1, cutoff=0.75
    )
    if last_names:
        return f"--{name} does not exist; did you mean --{leaves[last_names[0]]}?"
    full_names = difflib.get_close_matches(name, flag_types, n=1, cutoff=0.75)
    if full_names:
        return f"--{name} does not exist; did you mean --{full_names[0]}?"
    return None


def not_a_flag(word: str, flag_types: dict[str, Any]) -> str:
    """Return a message about a word without --, which may be the value of a flag."""
    flag = None
    if word.endswith((".yaml", ".yml")):
        flag = "config"
    # unlike Path.is_dir, false for a word that is too long for a path
    elif os.path.isdir(word):
        # of a run that may go on
        is_run = os.path.isdir(os.path.join(word, "checkpoints"))
        if is_run and "resume" in flag_types:
            return (
                f"{word!r} is no flag: flags start with --; use --resume --out_dir {word}"
            )
        if "folder" in flag_types:
            flag = "folder"
        elif "checkpoint_dir" in flag_types:
            flag = "checkpoint_dir"
    elif "prompt" in flag_types and not os.path.exists(word):
        return f"{word!r} is no flag: flags start with --; did you mean --prompt {word!r}?"
    message = f"{word!r} is no flag: flags start with --"
    if flag:
        return f"{message}; did you mean --{flag} {word}?"
    return message


def hint_for(name: str, value: str, expected: str) -> str:
    """Return how to write a number with a comma, where the type of a GGUF file comes from, or what
    another program's name of a method is here; otherwise nothing."""
    if "whole" in expected and re.fullmatch(r"\d{1,3}(,\d{3})+", value):
        return f"; write {value.replace(',', '')}"
    if "whole" not in expected and re.fullmatch(r"\d+,\d+", value):
        return f"; write {value.replace(',', '.')}"
    # the names of llama.cpp's programs, which are in capitals
    written = OUTTYPES_ELSEWHERE.get(value.lower(), value.lower())
    if name == "outtype" and written in expected.split():
        return f"; write {written}"
    # types of llama.cpp's files that its own program makes
    if name == "outtype" and re.fullmatch(r"i?q[2-6]_\w+", value, re.IGNORECASE):
        return f"; write f16, then run llama.cpp's llama-quantize with {value.upper()}"
    if name == "method" and value.lower() in METHODS_ELSEWHERE:
        return f"; write {METHODS_ELSEWHERE[value.lower()]}"
    return ""


def replaced_list(name: str) -> str:
    """Return the note about a list that is given twice: the second replaces the first."""
    return f"note: --{name} is given twice: the last one counts; give several values at once: A,B"
