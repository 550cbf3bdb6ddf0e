"""The table of commands, and how one ends: the only place that ends the process.

Nothing heavy is imported before the arguments are parsed, so any --help answers at once.
"""

import difflib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from litft import args as flags
from litft.args.parser import parse
from litft.args.processes import global_rank, local_rank
from litft.errors import Interrupted, PeerLost, RankError

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # gloo's C++ frames are no message; read when torch is imported


class Command(NamedTuple):
    """The arguments a command takes, and the function (module:name) that gets them."""

    args: type
    function: str
    # threads that spin while they wait halve training's speed where other programs run, and gain 3 % where none does;
    # the short products of decoding take twice the time where threads sleep between them
    spins: str = "1000"


COMMANDS = {
    **{f"finetune {method}": Command(args, "litft.training.trainer:finetune") for method, args in flags.FINETUNE.items()},
    "generate": Command(flags.GenerateArgs, "litft.inference.generate:generate", spins="100000"),
    "chat": Command(flags.ChatArgs, "litft.inference.chat:chat", spins="100000"),
    "serve": Command(flags.ServeArgs, "litft.serving.server:serve", spins="100000"),
    "merge_lora": Command(flags.MergeArgs, "litft.export.convert:merge"),
    "run_eval": Command(flags.RunEvalArgs, "litft.evaluation.run_eval:run_eval"),
    "prepare_data": Command(flags.PrepareArgs, "litft.training.dry_run:prepare_data"),
    "plan": Command(flags.PlanArgs, "litft.training.plan_command:plan"),
    "convert_hf_checkpoint": Command(flags.ConvertArgs, "litft.export.convert:convert"),
    "convert_to_hf": Command(flags.ExportArgs, "litft.export.convert:export"),
    "download": Command(flags.DownloadArgs, "litft.export.publish:download"),
    "upload": Command(flags.UploadArgs, "litft.export.publish:upload"),
    "convert_gguf_checkpoint": Command(flags.GgufConvertArgs, "litft.export.gguf.convert:read"),
    "convert_to_gguf": Command(flags.GgufExportArgs, "litft.export.gguf.convert:write"),
}


def run(command: str, argv: list[str] | None = None) -> Any:
    """Parse and run one command; a user's mistake ends with exit code 2 and a message on stderr."""
    entry = COMMANDS[command]
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", entry.spins)
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its older name
        # batches of many sizes leave fewer gaps in a GPU's memory
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    words, prog = (sys.argv[1:], None) if argv is None else (argv, f"litft {command}")
    module, _, name = entry.function.partition(":")
    with user_errors():
        args = parse(entry.args, words, prog)
        return getattr(import_module(module), name)(args)


@contextmanager
def user_errors() -> Iterator[None]:
    """Inside, a user's mistake, a file that cannot be read or written, and Ctrl-C end without a traceback."""
    try:
        yield
    except BrokenPipeError:  # whoever read stdout has gone; nothing more can be said there, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), alone=True)
    except ValueError as error:
        fail(str(error), alone=isinstance(error, RankError))
    except PeerLost as error:
        fail(str(error), alone=True)
    except Interrupted as stopped:
        # of several processes the first one speaks, and the others' ends are no failures
        first = local_rank() == "0"
        if first:
            print(stopped, file=sys.stderr)
        sys.exit(stopped.code if first else 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def main() -> None:
    """The `litft` command: `litft finetune lora ...`, `litft chat ...`."""
    for name in COMMANDS:
        words = name.split()
        if sys.argv[1 : 1 + len(words)] == words:
            run(name, sys.argv[1 + len(words) :])
            return
    listed = "\n  ".join(f"litft {name:<22} {entry.args.__doc__}" for name, entry in COMMANDS.items())
    usage = f"usage: litft COMMAND [flags]\n\n  {listed}\n\n`litft COMMAND --help` lists a command's flags."
    if sys.argv[1:] and sys.argv[1] not in ("-h", "--help"):
        asked = " ".join(word for word in sys.argv[1:3] if not word.startswith("-"))
        near = difflib.get_close_matches(asked, COMMANDS, n=1) or [name for name in COMMANDS if asked in name.split()]
        fail(f"no command {asked!r}{f'; did you mean litft {near[0]}?' if near else ''}\n{usage}")
    print(usage)


def fail(message: str, alone: bool = False) -> NoReturn:
    """End as a user's mistake does; of several processes the first one speaks, and one whose own the mistake is."""
    local = local_rank()
    if local != "0" and not alone and "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(5)  # where the first has made the same mistake torchrun has ended this process by then
        alone = True
    if local == "0" or alone:
        who = "" if local == "0" else f"process {global_rank()}: "
        print(f"{who}error: {message}".encode(errors="backslashreplace").decode(), file=sys.stderr)
    # at a usual exit gloo's threads, which wait for the others, may abort
    if alone and ("LOCAL_RANK" in os.environ or local != "0"):
        sys.stdout.flush()
        os._exit(2)
    sys.exit(2)
