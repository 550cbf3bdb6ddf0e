"""From the command line to an instance of `args.py`: jsonargparse in one place, and what it lacks.

A bare boolean flag means true, lists are `a,b`, and everything wrong comes in one message with the nearest name.
Nothing heavy is imported before the arguments are parsed, so any --help answers at once.
"""

import dataclasses
import difflib
import json
import os
import sys
import time
from argparse import SUPPRESS
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from litft import args as flags
from litft import run_dir
from litft.args.processes import global_rank, local_rank

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # gloo's C++ frames are no message; read when torch is imported
DEMO = Path(__file__).parent / "demo"

set_parsing_settings(docstring_parse_attribute_docstrings=True)


class Command(NamedTuple):
    """The arguments a command takes, and the function (module:name) that gets them."""

    args: type
    function: str
    # threads that spin while they wait halve training's speed where other programs run, and gain 3 % where none does;
    # the short products of decoding take twice the time where threads sleep between them
    spins: str = "1000"


COMMANDS = {
    "finetune lora": Command(flags.LoRAFinetuneArgs, "litft.training.trainer:finetune"),
    "finetune adapter": Command(flags.AdapterFinetuneArgs, "litft.training.trainer:finetune"),
    "finetune adapter_v2": Command(flags.AdapterV2FinetuneArgs, "litft.training.trainer:finetune"),
    "finetune full": Command(flags.FullFinetuneArgs, "litft.training.trainer:finetune"),
    "generate": Command(flags.GenerateArgs, "litft.inference.generate:generate", spins="100000"),
    "chat": Command(flags.ChatArgs, "litft.inference.chat:chat", spins="100000"),
    "serve": Command(flags.ServeArgs, "litft.serving.server:serve", spins="100000"),
    "merge_lora": Command(flags.MergeArgs, "litft.export.convert:merge"),
    "run_eval": Command(flags.RunEvalArgs, "litft.evaluation.run_eval:run_eval"),
    "prepare_data": Command(flags.PrepareArgs, "litft.training.schedule:prepare_data"),
    "plan": Command(flags.PlanArgs, "litft.training.schedule:plan"),
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
    args = parse(entry.args, sys.argv[1:], None) if argv is None else parse(entry.args, argv, f"litft {command}")
    module, _, name = entry.function.partition(":")
    with user_errors():
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
        fail(str(error), alone=isinstance(error, run_dir.Alone))
    except run_dir.Stopped as stopped:
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


def parse(cls: type, argv: list[str], prog: str | None = None) -> Any:
    """An instance of the dataclass `cls` from flags, the later winning; --config FILE.yaml stands for its contents.

    Exits with code 2 and every mistake listed at once.
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
        fail("\n".join(problems))
    namespace.pop("config", None)
    args = cls(**vars(parser.instantiate(namespace)))
    for name, value in given:
        if known[name] in (str, str | None) and value != "null":
            group, _, leaf = name.rpartition(".")
            setattr(getattr(args, group) if group else args, leaf, value)  # as typed: jsonargparse reads "# a" as null
    if problems := getattr(args, "problems", list)():
        fail("\n".join(problems))
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
    return parse(COMMANDS[f"finetune {run_dir.method(run)}"].args, ["--config", str(run / run_dir.CONFIG)])


def _method(cls: type) -> str:
    """The method whose arguments `cls` holds."""
    return next(name.split()[1] for name, entry in COMMANDS.items() if entry.args is cls)


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
