"""Select the examples to score: those that a run held out, or those of a file, limited to what
every model can read."""

import sys
from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from litft import run_dir
from litft.args import DataArgs, RunEvalArgs
from litft.args.parser import finetune_args
from litft.args.preference import DATA_KINDS
from litft.checkpoints.adapter_reader import ADAPTER_CONFIG
from litft.checkpoints.hub import hub_id
from litft.data.chat_template import STYLES
from litft.data.dataset import DataSplits, length_limit, load_data
from litft.data.formats import preference_kind, rename_columns
from litft.data.notes import CUT, CUT_AWAY, NO_ROOM, TOOLS_LOST
from litft.data.prompts import has_format
from litft.data.sources import (
    File,
    HubSplit,
    find_sources,
    source_digests,
    used_sources,
)
from litft.data.token_store import Samples
from litft.data.tokenizer import Tokenizer
from litft.inference.session import source_of
from litft.pretrained.folder import PretrainedFolder, resolve

# identifies an example independently of the model, see Samples.names
# the longest answer that is rated, unless --max_new_tokens says otherwise
ANSWER_TOKENS = 256
Name = tuple[int, int, int]
# flags that determine the held-out examples
SPLIT_FLAGS = (
    "val_path",
    "val_fraction",
    "seed",
    "subset",
    "split",
    "limit",
    "format",
    "columns",
)
# larger than any token id: the model's vocabulary size is checked when it is scored
ANY_VOCAB_SIZE = 1 << 30


def resolve_data(
    args: RunEvalArgs, source: PretrainedFolder
) -> tuple[DataArgs, Path | None]:
    """Return the data flags to score with, and the run whose held-out part is scored; None for a
    file of its own.

    Raise ValueError if a run was trained on some of the examples.
    """
    if args.tasks and not args.data.path:
        return args.data, None
    requested = _train_files(args.data)
    run_data = _training_runs(args, source)
    # the run of the model comes first; with --data.path, the run that was trained on these files
    own_run = next(
        (
            run
            for run, trained_data in run_data.items()
            if not requested or requested & _train_files(trained_data)
        ),
        None,
    )
    if own_run is None and not requested:
        raise ValueError(
            f"{source.folder} belongs to no run with held-out examples; give --data.path or --tasks"
        )
    data = args.data
    if own_run is not None:
        if requested and requested != _train_files(run_data[own_run]):
            remedy = "leave --data.path out to score what it held out, or score other files alone"
            raise ValueError(
                f"--data.path {','.join(data.path)}: not the same files as {own_run} was trained "
                f"on; {remedy}"
            )
        data = _apply_overrides(data, run_data[own_run], own_run, args.given_flags)

    # no other run may have been trained on what is scored
    for run, trained_data in run_data.items():
        same_split = own_run is None or is_supervised(run) == is_supervised(own_run)
        if run != own_run and _was_trained_on(data, trained_data, same_split):
            remedy = "score both on a file that neither was trained on"
            raise ValueError(
                f"{run} was trained on some of what {own_run or 'this'} would be scored on; "
                f"{remedy}"
            )
    if own_run is None:
        data = _with_own_columns(data, _run_of(source.folder))
    if own_run is not None:
        print(
            f"reading {_names(data)} as {own_run} did: {_scored_part(data)}",
            file=sys.stderr,
        )
        _warn_if_changed(data, own_run)
    return data, own_run


def _warn_if_changed(data: DataArgs, run: Path) -> None:
    """Print a warning if the files of examples have another content than a run has read: which
    examples are held out depends on their content."""
    recorded = run_dir.data_digests(run)
    # a run of an earlier version: there is nothing to compare the files with
    if not recorded:
        return
    changed = []
    for label, digest in source_digests(data).items():
        if digest not in recorded:
            changed.append(label)
    if changed:
        print(
            f"warning: {', '.join(changed)}: the content has changed since {run} was trained, and "
            "with it which examples are held out: the scores may be of trained examples; restore "
            "the file, or score one of its own",
            file=sys.stderr,
        )


def notes_on_adapter(
    args: RunEvalArgs, source: PretrainedFolder, own_run: Path | None
) -> Iterator[str]:
    """Yield lines on an adapter: which model it is compared with, what else its run can be compared
    with, and that it was trained on quantized weights, if it is scored on others."""
    if source.adapter is None:
        return
    if args.against is None:
        yield f"{_note_on_base(source, own_run)}\n"
    run = _run_of(source.folder)
    if run is None or args.quantize != "none":
        return
    trained = finetune_args(run).quantize
    if trained != "none":
        yield (
            f"{run} was trained on {trained} weights, and is scored on those that are not "
            f"quantized; --quantize {trained} scores it as it was trained\n"
        )


def _note_on_base(source: PretrainedFolder, own_run: Path | None) -> str:
    """Return which model is the base of an adapter, and what else its run can be compared with."""
    note = f"base: {source.base}"
    if own_run is None:
        return note
    start = finetune_args(own_run).checkpoint_dir
    # a run that continues an adapter has learned from more than its own data
    is_adapter = start and any(
        (Path(start) / folder / ADAPTER_CONFIG).is_file() for folder in (".", "final")
    )
    if is_adapter:
        note += (
            f"; the run started from the adapter {start}: compare with --against {start}"
        )
    return note


def _with_own_columns(data: DataArgs, run: Path | None) -> DataArgs:
    """Return the data flags with the format and the columns of the model's run, if the first record
    has these columns."""
    if run is None or data.columns or data.format:
        return data
    trained_data = finetune_args(run).data
    names = [item.split("=", 1)[1] for item in trained_data.columns]
    # of the first record only, as the file may be large
    _, record = next(iter(find_sources(data)[0][0].records()), ("", {}))
    if (
        not names
        or not isinstance(record, dict)
        or any(name not in record for name in names)
    ):
        return data
    print(
        f"reading {_names(data)} with the columns of {run}: {','.join(trained_data.columns)}",
        file=sys.stderr,
    )
    return replace(data, columns=trained_data.columns, format=trained_data.format)


def _first_record(args: RunEvalArgs) -> dict[str, Any]:
    """Return the first record of --data by the names of our fields; empty if it is no object."""
    first_file = find_sources(args.data)[0][0]
    _, record = next(iter(first_file.records()), ("", {}))
    if not isinstance(record, dict):
        return {}
    columns = dict(item.split("=", 1) for item in args.data.columns)
    return rename_columns(record, columns | dict(first_file.reading.columns))


def _check_held_out_prompts(args: RunEvalArgs, own_run: Path | None) -> None:
    """Raise ValueError if the run has held out records by their prompts, as preferences are, and
    the records have an answer beside the pair, by which prompts are held out here."""
    if own_run is None or not args.data.val_fraction or is_supervised(own_run):
        return
    if not has_format(_first_record(args)):
        return
    trained = finetune_args(own_run).objective
    raise ValueError(
        f"--reward: {own_run} was trained with {trained}, which holds out other examples; give "
        "--data.path a file of its own"
    )


def kind_of(args: RunEvalArgs, own_run: Path | None) -> str:
    """Return what the examples of --data are, see `Encoder`: by the flag, the run that held them
    out, or their fields."""
    if args.reward:
        _check_held_out_prompts(args, own_run)
        return "prompts"
    objective = args.objective
    if own_run is not None:
        trained = finetune_args(own_run).objective
        objective = objective or trained
        scores_answers = scored_kind(objective) == "supervised"
        if args.data.val_fraction and scores_answers != is_supervised(own_run):
            reason = f"{own_run} was trained with {trained}, which holds out other examples"
            raise ValueError(
                f"--objective {objective}: {reason}; leave it out, or score a file of its own"
            )
    if objective and scored_kind(objective) != "labels":
        return scored_kind(objective)

    # by the fields of the first record
    kind = preference_kind(_first_record(args))
    return kind or ("labels" if objective else "supervised")


def _training_runs(args: RunEvalArgs, source: PretrainedFolder) -> dict[Path, DataArgs]:
    """Return the data flags of the runs whose models are scored, and of the runs that these started
    from.

    Print a warning if the files of a run are not found.
    """
    folders = [source.folder] + (
        [source_of(args.model(args.against)).folder]
        if args.against not in (None, "none")
        else []
    )
    run_data: dict[Path, DataArgs] = {}

    # a run may have begun with the result of another one
    while folders:
        run = _run_of(folders.pop(0))
        if run is None or run in run_data:
            continue
        run_args = finetune_args(run)
        trained_data = run_args.data
        start = run_args.checkpoint_dir
        assert start is not None  # every run has begun with a model
        if hub_id(start) is None and Path(start).is_dir():
            folders.append(resolve(start, run_args.base_dir).folder)
        try:
            _train_files(trained_data)
            run_data[run] = trained_data
        except ValueError:
            # what the model's own run held out is scored; that of an earlier run is only excluded
            if not args.data.path and run == _run_of(source.folder):
                raise
            reason = (
                f"{run} was trained on {_names(trained_data)}, which is not "
                "found from this folder"
            )
            print(
                f"warning: {reason}; start in the folder of the training, or scores may include "
                "training examples",
                file=sys.stderr,
            )
    return run_data


def is_supervised(run: Path) -> bool:
    """Return whether a run has learned answers, or from rewards; examples of preferences are held
    out by their prompts alone."""
    return scored_kind(finetune_args(run).objective) == "supervised"


def scored_kind(objective: str) -> str:
    """Return how the examples of an objective are scored: those of rewards by their answers."""
    kind = DATA_KINDS[objective]
    if kind == "prompts":
        return "supervised"
    return kind


def _was_trained_on(data: DataArgs, trained_data: DataArgs, same_split: bool) -> bool:
    """Return whether a run was trained on some of the files that are scored of `data`.

    same_split: equal flags hold out the same examples.
    """
    # files and flags that decide which examples are held out
    if _split_of(data) == _split_of(trained_data) and same_split:
        return False
    return bool((_val_files(data) or _train_files(data)) & _train_files(trained_data))


def _split_of(data: DataArgs) -> list[Any]:
    """Return the files and flags that decide which examples are held out."""
    split: list[Any] = [_train_files(data), _val_files(data)]
    for name in SPLIT_FLAGS:
        if name != "val_path":
            split.append(getattr(data, name))
    return split


def _apply_overrides(
    requested: DataArgs, trained_data: DataArgs, run: Path, given: Collection[str]
) -> DataArgs:
    """Return a run's data flags, updated with the requested ones. given: the names of the flags
    that were given, maybe with their default's value.

    Raise ValueError if these change the held-out examples.
    """
    defaults = asdict(RunEvalArgs().data)
    # the files are those of the run, under whatever path
    overrides = {}
    for name, value in asdict(requested).items():
        if (value != defaults[name] or f"data.{name}" in given) and name != "path":
            overrides[name] = value
    # a template's file may have changed since: the copy in the run's model folder is used
    if "template" not in overrides and trained_data.template not in ("auto", *STYLES):
        overrides["template"] = "auto"

    # these flags decide what was held out, so the run's own values must stay
    for name in SPLIT_FLAGS:
        if name not in overrides or overrides[name] == getattr(trained_data, name):
            continue
        # another path to the same files is no change
        if name == "val_path" and _val_files(
            replace(trained_data, val_path=overrides[name])
        ) == _val_files(trained_data):
            continue
        reason = f"{run} held out other examples ({_flag_text(name, getattr(trained_data, name))})"
        raise ValueError(f"{_flag_text(name, overrides[name])}: {reason}; leave it out")
    # how often training reads a file, and which tokens it adds, does not change what is held out;
    # a file with weight 0 was not read
    used = []
    for weight in trained_data.path_weights:
        used.append(1.0 if weight else 0.0)
    overrides |= {"weights": used, "new_tokens": [], "replay": 0.0}
    return replace(trained_data, **overrides)


def _flag_text(name: str, value: Any) -> str:
    """Return a data flag as it is typed."""
    if value in (None, []):
        return f"without --data.{name}"
    return f"--data.{name} {','.join(value) if isinstance(value, list) else value}"


def _names(data: DataArgs) -> str:
    """Return the paths of the examples, for messages."""
    return ", ".join(item.path for item in data.paths)


def _run_of(folder: Path) -> Path | None:
    """Return the run folder that contains a model folder (final/ or checkpoints/step-NNNNNN), or
    None."""
    folder = folder.resolve()
    return next(
        (
            parent
            for parent in (folder.parent, folder.parent.parent)
            if run_dir.is_run(parent)
        ),
        None,
    )


def _train_files(data: DataArgs) -> set[str]:
    """Return ids of the training files: of local files the digest of their content, independent of
    their path."""
    if not data.path:
        return set()
    return _digests(used_sources(data).train)


def _val_files(data: DataArgs) -> set[str]:
    """Return ids of the validation files, see `_train_files`."""
    return _digests([file for _, file in find_sources(data)[1]])


def _digests(files: list[File | HubSplit]) -> set[str]:
    return {file.digest() if isinstance(file, File) else file.label for file in files}


def _scored_part(data: DataArgs) -> str:
    """Describe which part of the data is scored."""
    files = find_sources(data)[1]
    if files:
        return (
            f"scoring its validation examples, {', '.join(file.label for _, file in files)}"
        )
    if not data.val_fraction:
        return "nothing was held out, so it was trained on these examples"
    return (
        f"scoring the part that was held out (--data.val_fraction {data.val_fraction}, --data.seed "
        f"{data.seed})"
    )


def scored_samples(data: DataSplits, args: DataArgs) -> Samples:
    """Return the held-out samples if there are any, otherwise all.

    Raise ValueError if no held-out sample can be read.
    """
    if not len(data.val) and (args.val_fraction or find_sources(args)[1]):
        reason = "nothing was held out, or all held-out examples exceed the length limit"
        raise ValueError(
            f"{_names(args)}: {reason}; raise --data.max_seq_length, or name other files"
        )
    if len(data.val):
        return data.val
    return data.train


def compared_sources(args: RunEvalArgs, source: PretrainedFolder) -> list[PretrainedFolder]:
    """Return the folders that need their own tokenizer or length limit: the model, and the one it
    is compared with."""
    if args.against not in (None, "none"):
        return [source, source_of(args.model(args.against))]
    if args.against is None and _adds_tokens(args, source):
        return [source, source_of(args.model(str(source.base)))]
    return [source]


def with_shared_length(data: DataArgs, sources: list[PretrainedFolder]) -> DataArgs:
    """Return the data flags with the smallest length limit of all models, so that all are scored on
    the same windows."""
    limits = {
        length_limit(data.max_seq_length, source.config.max_positions) for source in sources
    }
    if len(limits) > 1:
        print(
            f"--data.max_seq_length {min(limits)}, which all models can read",
            file=sys.stderr,
        )
    return replace(data, max_seq_length=min(limits))


def answer_tokens(args: RunEvalArgs) -> int:
    """Return the tokens that a prompt needs room for, if answers are rated: by default at most
    half of what all models read."""
    limit = args.data.max_seq_length or 2 * ANSWER_TOKENS
    return args.max_new_tokens or min(ANSWER_TOKENS, limit // 2)


def readable_by_all(
    args: RunEvalArgs, sources: list[PretrainedFolder], kind: str
) -> set[Name]:
    """Return the names of the scored examples: the first --limit that every model can read within
    the length limit.

    Raise ValueError if none can be read. Print how many there are if some are left out.
    """
    tokenizers = [_tokenizer(source) for source in sources]
    ordered_by_source = []
    for source, tokenizer in zip(sources, tokenizers, strict=True):
        limit = source.config.max_positions
        data = load_data(
            args.data,
            tokenizer,
            ANY_VOCAB_SIZE,
            limit,
            kind=kind,
            completion_tokens=answer_tokens(args),
        )
        ordered_by_source.append(scored_samples(data, args.data).names)
        if source is sources[0]:
            _note_lost(data, length_limit(args.data.max_seq_length, limit))
    ordered = ordered_by_source[0]
    # their windows depend on the tokenizer; all are scored
    has_texts = any(map(_is_text, ordered))

    # the examples that every model can read
    names_by_source = []
    for names in ordered_by_source:
        names_by_source.append({name for name in names if not _is_text(name)})
    shared = set.intersection(*names_by_source)
    if not shared and not has_texts:
        raise ValueError(
            f"{_names(args.data)}: no example can be read by all models; raise "
            "--data.max_seq_length"
        )
    num_left_out = max(map(len, names_by_source)) - len(shared)
    if num_left_out:
        reason = "whose answers all models read to the same end"
        print(
            f"scoring the {len(shared):,} examples {reason}, not {num_left_out:,} others",
            file=sys.stderr,
        )

    # models that are not comparable in every score
    if len({tokenizer.vocabulary_digest() for tokenizer in tokenizers}) > 1:
        if has_texts and args.limit:
            reason = (
                "models with different tokenizers would be scored on "
                "different parts of the text"
            )
            raise ValueError(f"--limit {args.limit}: {reason}; leave it out")
        print(
            "warning: the tokenizers differ, so losses and perplexities are not comparable",
            file=sys.stderr,
        )
    scored = [name for name in ordered if name in shared or _is_text(name)][: args.limit]
    return {name for name in scored if not _is_text(name)}


def _note_lost(data: DataSplits, limit: int) -> None:
    """Print how many records are not scored, or not whole, because of the length limit, and how
    many lose their tools."""
    has_long = False
    for label, report in data.reports.items():
        for note in (CUT, CUT_AWAY, NO_ROOM, TOOLS_LOST):
            count = report.notes.get(note, [0])[0]
            if not count:
                continue
            has_long = has_long or note != TOOLS_LOST
            print(
                f"{label}: {count:,} of {report.records:,} records {note}", file=sys.stderr
            )
    if has_long:
        print(
            f"the limit is {limit:,} tokens; --data.max_seq_length sets another one",
            file=sys.stderr,
        )


def _is_text(name: Name) -> bool:
    """Return whether a name is that of a window of plain text, which has no record of its own."""
    return name[0] == 0


def warn_if_trained_on(
    args: RunEvalArgs, source: PretrainedFolder, names: set[Name]
) -> None:
    """Print a warning if the training data of a run contains some of the scored examples."""
    records = {record for record, _, _ in names}
    for run, trained_data in _training_runs(args, source).items():
        data = replace(trained_data, weights=[], new_tokens=[], replay=0.0)
        # as it was trained, since examples of rewards may have no answers
        kind = DATA_KINDS[finetune_args(run).objective]
        context = source.config.max_positions
        trained_names = load_data(
            data,
            _tokenizer(source),
            ANY_VOCAB_SIZE,
            context,
            kind=kind,
            completion_tokens=1,
        ).train.names
        repeated = records & {record for record, _, _ in trained_names}
        if repeated:
            count = f"{len(repeated):,} of the {len(records):,} scored examples"
            print(
                f"warning: {run} was trained on {count}, which its training data contains",
                file=sys.stderr,
            )


def _adds_tokens(args: RunEvalArgs, source: PretrainedFolder) -> bool:
    """Return whether an adapter adds tokens that its base lacks, so that the base needs its own
    tokenizer."""
    adapter = source.read_adapter()
    if adapter is None or not adapter[0].tokens:
        return False
    base = _tokenizer(source_of(args.model(str(source.base))))
    texts = {token: text for text, token in _tokenizer(source).vocabulary().items()}
    return any(base.token_id(texts[token]) is None for token in adapter[0].tokens)


def _tokenizer(source: PretrainedFolder) -> Tokenizer:
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise ValueError(
            f"{source.folder} has no tokenizer; copy tokenizer.json or tokenizer.model into it"
        )
    return tokenizer
