"""The table of commands, and error handling: the only module that ends the process.

Nothing heavy is imported before the arguments are parsed, so that --help is fast.
"""

import difflib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from typing import Any, NamedTuple, NoReturn, get_args

from litft import __version__
from litft import args as flags
from litft.args.parser import parse
from litft.args.processes import global_rank, is_first_on_node, local_rank
from litft.environment import DECODING_SPINS, TRAINING_SPINS, set_defaults, system_problem
from litft.errors import (
    Interrupted,
    PeerLost,
    RankError,
    is_host_memory_error,
    memory_message,
)

# hides gloo's C++ stack traces; torch reads it on import
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


class Command(NamedTuple):
    """The arguments class of a command, and the function (module:name) that runs it."""

    args: type
    function: str
    spin_count: str


FUNCTIONS = {
    **dict.fromkeys(
        (f"finetune {method}" for method in flags.FINETUNE), "finetune:run_finetuning"
    ),
    "generate": "generate:run_generation",
    "chat": "chat:chat",
    "serve": "serve:serve",
    "merge_lora": "merge_lora:merge",
    "run_eval": "run_eval:run_eval",
    "prepare_data": "prepare_data:prepare_data",
    "runs": "runs:list_runs",
    "sweep": "sweep:sweep",
    "recipes": "recipes:list_recipes",
    "schema": "schema:print_schema",
    "plan": "plan:plan",
    "convert_hf_checkpoint": "convert_hf_checkpoint:convert",
    "convert_to_hf": "convert_to_hf:export",
    "download": "download:download",
    "upload": "upload:upload",
    "convert_gguf_checkpoint": "convert_gguf_checkpoint:read",
    "convert_to_gguf": "convert_to_gguf:write",
}
DECODING = ("generate", "chat", "serve")
COMMANDS = {
    name: Command(
        flags.ARGS[name],
        f"litft.commands.{function}",
        DECODING_SPINS if name in DECODING else TRAINING_SPINS,
    )
    for name, function in FUNCTIONS.items()
}


# commands of axolotl, LLaMA-Factory and litgpt
FOREIGN_COMMANDS = {
    "train": "finetune lora",
    "sft": "finetune lora",
    "inference": "chat",
    "preprocess": "prepare_data",
}
FOREIGN_COMMANDS |= {
    "evaluate": "run_eval",
    "eval": "run_eval",
    "merge-lora": "merge_lora",
    "export": "merge_lora",
    "api": "serve",
}


def run(command: str, argv: list[str] | None = None) -> Any:
    """Parse the flags and run one command.

    A user error ends with exit code 2 and a message on stderr.
    """
    problem = system_problem()
    if problem:
        fail(problem)
    entry = COMMANDS[command]
    set_defaults(entry.spin_count)
    argv_flags, prog = (sys.argv[1:], None) if argv is None else (argv, f"litft {command}")
    module, _, name = entry.function.partition(":")
    with user_errors(_memory_remedy(command)):
        args = parse(entry.args, argv_flags, prog)
        return getattr(import_module(module), name)(args)


def _memory_remedy(command: str) -> str:
    """Return what a command offers to need less memory."""
    if command == "finetune full":
        return "choose a smaller model or LoRA (litft finetune lora)"
    names = {item.name for item in fields(COMMANDS[command].args)}
    if "shard_gb" in names:
        return "choose a smaller --shard_gb, such as 1"
    if "quantize" in names:
        return "choose a smaller model or --quantize nf4"
    return "choose a smaller model"


@contextmanager
def user_errors(memory_remedy: str = "choose a smaller model") -> Iterator[None]:
    """Within the context, user errors, file errors and Ctrl-C end the process without a traceback.

    memory_remedy: what to do if the memory is too small.
    """
    try:
        yield
    except BrokenPipeError:
        # the reader of stdout has exited; avoid a second error when stdout is flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        fail(
            f"{error.filename}: {error.strerror}" if error.filename else str(error),
            any_rank=True,
        )
    except ValueError as error:
        fail(str(error), any_rank=isinstance(error, RankError))
    except PeerLost as error:
        fail(str(error), any_rank=True)
    except (MemoryError, RuntimeError) as error:
        if not is_host_memory_error(error):
            raise
        fail(memory_message(error, memory_remedy), any_rank=True)
    except Interrupted as interrupted:
        # only the first process prints, and only its exit code reports the signal
        is_first = is_first_on_node()
        if is_first:
            print(interrupted, file=sys.stderr)
        sys.exit(interrupted.code if is_first else 0)
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or "interrupted", file=sys.stderr)
        sys.exit(130)


def main() -> None:
    """Run the `litft` command: `litft finetune lora ...`, `litft chat ...`."""
    if sys.argv[1:] in (["--version"], ["-V"]):
        print(f"litft {__version__}")
        return
    # the name of a command may have two words
    for name in COMMANDS:
        words = name.split()
        if sys.argv[1 : 1 + len(words)] == words:
            run(name, sys.argv[1 + len(words) :])
            return
    width = max(map(len, COMMANDS))
    lines = []
    for name, entry in COMMANDS.items():
        # the first paragraph of the description
        summary = " ".join((entry.args.__doc__ or "").partition("\n\n")[0].split())
        lines.append(f"litft {name:<{width}} {summary}")
    commands = "\n  ".join(lines)
    usage = (
        "usage: litft COMMAND [flags]\n"
        "\n"
        f"  {commands}\n"
        "\n"
        "`litft COMMAND --help` lists a command's flags."
    )

    # `litft finetune --help`: the first word of commands that have two
    asks_for_help = sys.argv[-1] in ("-h", "--help")
    if asks_for_help and sys.argv[1:-1] == ["finetune"]:
        print(_finetune_usage())
        return

    # an unknown command, with the nearest one that there is
    if sys.argv[1:] and sys.argv[1] not in ("-h", "--help"):
        typed = " ".join(word for word in sys.argv[1:3] if not word.startswith("-"))
        hint = _command_hint(typed)
        # a question ends its sentence
        separator = "" if hint.endswith("?") else ";"
        fail(
            f"no command {typed or sys.argv[1]!r}{hint}{separator} `litft --help` lists all"
        )
    # `litft | head -1` closes the pipe early
    with user_errors():
        print(usage, flush=True)


def _finetune_usage() -> str:
    """Return the usage of the commands that train, a line for each method."""
    lines = [
        "usage: litft finetune METHOD --checkpoint_dir DIR --data.path FILE [flags]",
        "",
    ]
    for name in flags.FINETUNE:
        lines.append(f"  litft finetune {name}")
    lines += ["", "`litft finetune METHOD --help` lists a method's flags."]
    return "\n".join(lines)


def _command_hint(typed: str) -> str:
    """Return which command is meant by what was typed instead of one."""
    # the first word of commands that have two
    methods = [f"litft {name}" for name in COMMANDS if name.startswith(f"{typed} ")]
    if methods:
        return f": it needs a method: {', '.join(methods)}"
    # an objective in place of the method
    words = typed.split()
    if words[:1] == ["finetune"] and words[1:] and words[1] in get_args(flags.Objectives):
        return f"; use litft finetune lora --objective {words[1]}"
    if words == ["finetune", "qlora"]:
        return "; use litft finetune lora --quantize nf4"
    matches = [name for name in COMMANDS if typed in name.split()]
    # a command of another program
    first_word = typed.partition(" ")[0]
    if not matches and first_word in FOREIGN_COMMANDS:
        matches = [FOREIGN_COMMANDS[first_word]]
    if not matches:
        matches = difflib.get_close_matches(typed, COMMANDS, n=1)
    if matches:
        return f"; did you mean litft {matches[0]}?"
    return ""


def fail(message: str, any_rank: bool = False) -> NoReturn:
    """Print an error and exit with code 2.

    Of several processes only local rank 0 prints. any_rank: print from this process too, because
    only it may have the error.
    """
    rank = local_rank()
    if rank != "0" and not any_rank and "TORCHELASTIC_RUN_ID" in os.environ:
        # if rank 0 had the same error, torchrun has ended this process by then
        time.sleep(5)
        any_rank = True
    if rank == "0" or any_rank:
        prefix = "" if rank == "0" else f"process {global_rank()}: "
        print(
            f"{prefix}error: {message}".encode(errors="backslashreplace").decode(),
            file=sys.stderr,
        )
    # a normal exit may abort in gloo's threads, which still wait for other processes
    if any_rank and ("LOCAL_RANK" in os.environ or rank != "0"):
        sys.stdout.flush()
        os._exit(2)
    sys.exit(2)
