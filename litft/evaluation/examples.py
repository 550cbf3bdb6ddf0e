"""Which examples a model is scored on: those that its run held out, or a file's; of these, what every model can read."""

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from litft import run_dir
from litft.args import DataArgs, RunEvalArgs
from litft.args.parser import finetune_args
from litft.checkpoints.hub import hub_id
from litft.data.dataset import DataSplits, length_limit, load_data
from litft.data.sources import File, HubSplit, locate
from litft.data.token_store import Samples
from litft.data.tokenizer import Tokenizer
from litft.inference.session import source_of
from litft.pretrained import PretrainedFolder, resolve

Name = tuple[int, int, int]  # identifies an example independently of the model, see Samples.names
SPLITTING = ("val_path", "val_fraction", "seed", "subset", "format", "columns")  # flags that decide what is held out
ANY = 1 << 30  # a vocabulary size that fits every token: the model's own size is checked when it is scored


def chosen_data(args: RunEvalArgs, source: PretrainedFolder) -> DataArgs:
    """What to score, and how it is read: of a run its held-out part by its own flags, which is said; another file whole.

    ValueError where the examples are some of those that a run has learned from.
    """
    if args.tasks and not args.data.path:
        return args.data
    asked, known = _files(args.data), _runs(args, source)
    reader = next((run for run, trained in known.items() if not asked or asked & _files(trained)), None)
    if reader is None and not asked:
        raise ValueError(f"{source.folder} belongs to no run, which would have examples; give --data.path or --tasks")
    data = args.data
    if reader is not None:
        if asked and asked != _files(known[reader]):
            remedy = "leave --data.path out to score what it held out, or score other files alone"
            raise ValueError(f"--data.path {','.join(data.path)}: not the same files as {reader} was trained on; {remedy}")
        data = _as_trained(data, known[reader], reader)
    for run, trained in known.items():
        if run != reader and _learned_from(data, trained):
            remedy = "score both on a file that neither was trained on"
            raise ValueError(f"{run} was trained on some of what {reader or 'this'} would be scored on; {remedy}")
    if reader is not None:
        print(f"reading {', '.join(data.path)} as {reader} did: {_part(data)}", file=sys.stderr)
    return data


def _runs(args: RunEvalArgs, source: PretrainedFolder) -> dict[Path, DataArgs]:
    """The data flags of the runs whose models are scored, and of those that they began from.

    A warning where a run's files are not found from here.
    """
    folders = [source.folder] + ([source_of(args.model(args.against)).folder] if args.against not in (None, "none") else [])
    known: dict[Path, DataArgs] = {}
    while folders:
        run = _run_of(folders.pop(0))
        if run is None or run in known:
            continue
        begun = finetune_args(run)
        trained = begun.data
        if hub_id(begun.checkpoint_dir) is None and Path(begun.checkpoint_dir).is_dir():
            folders.append(resolve(begun.checkpoint_dir, begun.base_dir).folder)
        try:
            _files(trained)
            known[run] = trained
        except ValueError:
            if not args.data.path:
                raise
            reason = f"{run} was trained on {', '.join(trained.path)}, which is not found from here"
            print(f"warning: {reason}; start where it was trained, or these may be the same examples", file=sys.stderr)
    return known


def _learned_from(data: DataArgs, trained: DataArgs) -> bool:
    """Whether a run has learned from some of what is scored of `data`."""
    splits = [
        [_files(each), _validation(each), *(getattr(each, name) for name in SPLITTING if name != "val_path")]
        for each in (data, trained)
    ]
    if splits[0] == splits[1]:
        return False
    return bool((_validation(data) or _files(data)) & _files(trained))


def _as_trained(asked: DataArgs, trained: DataArgs, run: Path) -> DataArgs:
    """A run's own data, read as asked for; ValueError where that would hold out other examples than the run did."""
    usual = asdict(RunEvalArgs().data)
    given = {name: value for name, value in asdict(asked).items() if value != usual[name] and name != "path"}
    for name in SPLITTING:
        if name not in given or given[name] == getattr(trained, name):
            continue
        if name == "val_path" and _validation(replace(trained, val_path=given[name])) == _validation(trained):
            continue
        reason = f"{run} held out other examples ({_flag(name, getattr(trained, name))})"
        raise ValueError(f"{_flag(name, given[name])}: {reason}; leave it out")
    return replace(trained, **given | {"weights": [], "new_tokens": []})


def _flag(name: str, value: Any) -> str:
    """A flag of the data as it is typed."""
    if value is None:
        return f"without --data.{name}"
    return f"--data.{name} {','.join(value) if isinstance(value, list) else value}"


def _run_of(folder: Path) -> Path | None:
    """The run that has left a model's folder, final/ or one below it."""
    folder = folder.resolve()
    return next((above for above in (folder.parent, folder.parent.parent) if run_dir.is_run(above)), None)


def _files(data: DataArgs) -> set[str]:
    """The training files, wherever they are named from: a local one by what it holds."""
    if not data.path:
        return set()
    return _digests(locate(data)[0])


def _validation(data: DataArgs) -> set[str]:
    """The validation files, by what they hold."""
    return _digests(locate(data)[1])


def _digests(files: list[File | HubSplit]) -> set[str]:
    return {file.digest() if isinstance(file, File) else file.label for file in files}


def _part(data: DataArgs) -> str:
    """Which part of the data is scored."""
    if files := locate(data)[1]:
        return f"scoring its validation examples, {', '.join(file.label for file in files)}"
    if not data.val_fraction:
        return "nothing was held out, so these are examples that it was trained on"
    return f"scoring the part that was held out (--data.val_fraction {data.val_fraction}, --data.seed {data.seed})"


def scored(data: DataSplits, args: DataArgs) -> Samples:
    """The held-out part where there is one, else all; ValueError where nothing of a held-out part can be read."""
    if not len(data.val) and (args.val_fraction or locate(args)[1]):
        reason = "nothing was held out, or nothing of it lies within the length limit"
        raise ValueError(f"{','.join(args.path)}: {reason}; raise --data.max_seq_length, or name other files")
    return data.val if len(data.val) else data.train


def compared(args: RunEvalArgs, source: PretrainedFolder) -> list[PretrainedFolder]:
    """All whose examples are read by a tokenizer or a length of their own: the model's, and what it is held against."""
    if args.against not in (None, "none"):
        return [source, source_of(args.model(args.against))]
    if args.against is None and _adds_tokens(args, source):
        return [source, source_of(args.model(str(source.base)))]
    return [source]


def same_length(data: DataArgs, sources: list[PretrainedFolder]) -> DataArgs:
    """The data with the length that fits all models: or each would be scored on other windows of a text."""
    limits = {length_limit(data.max_seq_length, source.config.max_positions) for source in sources}
    if len(limits) > 1:
        print(f"--data.max_seq_length {min(limits)}, which all models can read", file=sys.stderr)
    return replace(data, max_seq_length=min(limits))


def readable_by_all(args: RunEvalArgs, sources: list[PretrainedFolder]) -> set[Name]:
    """The examples of which every model's tokenizer leaves something within the length limit; ValueError where none is.

    Says how many they are where some are left out.
    """
    tokenizers = [_tokenizer(source) for source in sources]
    found = [
        scored(load_data(args.data, tokenizer, ANY, source.config.max_positions), args.data).names
        for source, tokenizer in zip(sources, tokenizers, strict=True)
    ]
    texts = any(name[0] == 0 for name in found[0])  # whose windows differ with the tokenizer, and are scored all
    found = [{name for name in names if name[0]} for names in found]
    shared = set.intersection(*found)
    if not shared and not texts:
        raise ValueError(f"{', '.join(args.data.path)}: no example that all models can read; raise --data.max_seq_length")
    if others := max(map(len, found)) - len(shared):
        reason = "whose answers all models read to the same end"
        print(f"scoring the {len(shared):,} examples {reason}, not {others:,} others", file=sys.stderr)
    if len({tokenizer.vocabulary_digest() for tokenizer in tokenizers}) > 1:
        if texts and args.limit:
            reason = "models with other tokens would get other parts of the text"
            raise ValueError(f"--limit {args.limit}: {reason}; leave it out")
        print("warning: the tokenizers differ, so losses and perplexities are of different tokens", file=sys.stderr)
    return shared


def warn_of_trained(args: RunEvalArgs, source: PretrainedFolder, names: set[Name]) -> None:
    """Print how many of the scored examples a run was trained on, as records of another file."""
    units = {unit for unit, _, _ in names}
    for run, trained in _runs(args, source).items():
        data = replace(trained, weights=[], new_tokens=[])
        learned = load_data(data, _tokenizer(source), ANY, source.config.max_positions).train.names
        if both := units & {unit for unit, _, _ in learned}:
            count = f"{len(both):,} of the {len(units):,} scored examples"
            print(f"warning: {run} was trained on {count}, which its training data has too", file=sys.stderr)


def _adds_tokens(args: RunEvalArgs, source: PretrainedFolder) -> bool:
    """Whether an adapter has tokens that its base knows nothing of: that reads with its own tokenizer."""
    adapter = source.read_adapter()
    if adapter is None or not adapter[0].tokens:
        return False
    base = _tokenizer(source_of(args.model(str(source.base))))
    names = {token: name for name, token in _tokenizer(source).vocabulary().items()}
    return any(base.token_id(names[token]) is None for token in adapter[0].tokens)


def _tokenizer(source: PretrainedFolder) -> Tokenizer:
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise ValueError(f"{source.folder} has no tokenizer; copy tokenizer.json or tokenizer.model into it")
    return tokenizer
