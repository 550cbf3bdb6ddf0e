"""Which examples a model is scored on: those that its run held out, or a file's; of these, what every model can read."""

import sys
from dataclasses import asdict, replace
from pathlib import Path

from litft import runs
from litft.args import DataArgs, RunEvalArgs
from litft.cli import finetune_args
from litft.data.load import Data, load_data
from litft.data.store import Samples
from litft.folder import Source
from litft.opened import source_of

Name = tuple[int, int]  # of an example, whatever model reads it
ANY = 1 << 30  # more tokens than any vocabulary has: what does not fit a model is told when it is scored


def chosen_data(args: RunEvalArgs, source: Source) -> DataArgs:
    """What to score, and how it is read: of a run its held-out part by its own flags, which is said; another file whole."""
    above = (source.folder.parent, source.folder.parent.parent)
    run = next((folder for folder in above if runs.is_run(folder)), None)
    if args.tasks and not args.data.path:
        return args.data
    if run is None and not args.data.path:
        raise ValueError(f"{source.folder} belongs to no run, which would have examples; give --data.path or --tasks")
    trained = finetune_args(run).data if run else None
    if trained is None or not _resolved(args.data) <= _resolved(trained):
        return args.data
    usual = asdict(RunEvalArgs().data)
    given = {name: value for name, value in asdict(args.data).items() if value != usual[name]}
    chosen = replace(trained, **given, weights=[], new_tokens=[])
    print(f"reading {', '.join(chosen.path)} as {run} did: {_part(chosen)}", file=sys.stderr)
    return chosen


def _resolved(data: DataArgs) -> set[Path]:
    return {Path(path).resolve() for path in data.path}


def _part(data: DataArgs) -> str:
    """Which part of the data is scored."""
    if data.val_path:
        return f"scoring its validation file, {data.val_path}"
    if all(Path(path).is_file() for path in data.path) and not data.val_fraction:
        return "nothing was held out, so these are examples that it was trained on"
    return f"scoring the part that was held out (--data.val_fraction {data.val_fraction}, --data.seed {data.seed})"


def scored(data: Data) -> Samples:
    """The held-out part where there is one, else all."""
    return data.val if len(data.val) else data.train


def readable_by_all(args: RunEvalArgs, source: Source) -> set[Name]:
    """The examples of which every model's tokenizer leaves something within its context; ValueError where none is.

    Says how many they are where some are left out.
    """
    sources = [source]
    if args.against not in (None, "none"):
        sources.append(source_of(args.model(args.against)))
    elif args.against is None and _adds_tokens(source):
        sources.append(source_of(args.model(str(source.base))))
    found = [set(scored(_read(args.data, each)).names) for each in sources]
    shared = set.intersection(*found)
    if not shared:
        raise ValueError(f"{', '.join(args.data.path)}: no example that all models can read; raise --data.max_seq_length")
    if others := max(map(len, found)) - len(shared):
        print(f"scoring the {len(shared):,} examples that all models can read, not {others:,} others", file=sys.stderr)
    return shared


def _adds_tokens(source: Source) -> bool:
    """Whether an adapter's model has tokens that its base has not."""
    adapter = source.read_adapter()
    return adapter is not None and adapter[0].vocab_size(source.config) > source.config.vocab_size


def _read(args: DataArgs, source: Source) -> Data:
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise ValueError(f"{source.folder} has no tokenizer; copy tokenizer.json or tokenizer.model into it")
    return load_data(args, tokenizer, ANY, source.config.context)
