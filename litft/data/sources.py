"""Where examples come from: files, folders with both splits, and data sets of the Hugging Face
hub."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from glob import glob, has_magic
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from litft.args import DataArgs
from litft.args.data import VAL_NAMES
from litft.args.data_path import DataPath
from litft.checkpoints.hub import HubId, hub_id
from litft.data.digests import digest_of, digest_of_texts
from litft.data.readers import (
    OPENERS,
    READERS,
    Records,
    drop_nulls,
    read_records,
    require_file,
    split_suffixes,
)

# words of a file's name: of "squadTrain-2.jsonl", squad, Train and jsonl
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
# the number of a file, and of how many: train-00000-of-00003.parquet
NUMBERED = re.compile(r"(\d+)-of-(\d+)")
# names of files that are not read
OTHER_SPLITS = ("test", "testing", "eval", "evaluation", "holdout", "heldout")
SPLITS = {"train": ("train", "training"), "val": VAL_NAMES}


class ReadOptions(NamedTuple):
    """How the records of a file are read, where that differs from the flags."""

    format: str | None = None
    # (litft's field name, the name in the file)
    columns: tuple[tuple[str, str], ...] = ()
    template: str | None = None


class File(NamedTuple):
    """A file of examples, or several that are read one after the other."""

    # of the file, or of the folder or pattern that names several
    name: str
    limit: int | None = None  # the most records to read
    reading: ReadOptions = ReadOptions()
    parts: tuple[str, ...] = ()  # the files, if there are several

    @property
    def label(self) -> str:
        """The name used in messages."""
        return self.name

    def records(self) -> Records:
        """Yield the labelled records."""
        paths = self.parts or (self.name,)
        records = chain.from_iterable(read_records(Path(path)) for path in paths)
        return islice(records, self.limit)

    def digest(self) -> str:
        """Return the hash of the content."""
        digests = [
            digest_of(require_file(Path(path))) for path in self.parts or (self.name,)
        ]
        if len(digests) == 1:
            return digests[0]
        return digest_of_texts(digests)


class HubSplit(NamedTuple):
    """A split of a data set on the hub, which `datasets` downloads once."""

    name: str  # owner/name, or owner/name@revision
    subset: str | None
    split: str
    limit: int | None = None
    reading: ReadOptions = ReadOptions()

    @property
    def label(self) -> str:
        """The name used in messages."""
        if self.subset is None:
            return f"{self.name}, {self.split}"
        return f"{self.name}, {self.subset}, {self.split}"

    def dataset(self) -> Any:
        """Return the rows of the data set."""
        return _load_dataset(self.name, self.subset)[self.split]

    def records(self) -> Records:
        """Yield the labelled records."""
        for index, record in enumerate(islice(self.dataset(), self.limit)):
            yield f"{self.label} {index}", drop_nulls(record)

    def digest(self) -> str:
        """Return the hash of the content."""
        dataset = self.dataset()
        # one that is held in memory has no files
        if not dataset.cache_files:
            return digest_of_texts([json.dumps(record, default=str) for record in dataset])
        return " ".join(digest_of(Path(file["filename"])) for file in dataset.cache_files)


class UsedSources(NamedTuple):
    """The files that a run reads."""

    train: list[File | HubSplit]
    weights: list[float]  # of each training file, above 0
    val: list[tuple[str, File | HubSplit]]  # with the names of their sets
    # of each file once: its name in messages, which no other one has
    labels: dict[File | HubSplit, str]
    unused: list[str]  # the training files with weight 0


def used_sources(args: DataArgs) -> UsedSources:
    """Return the files that a run reads: not those with weight 0.

    Raise ValueError as `find_sources` does, and if all weights are 0.
    """
    train = []
    weights = []
    unused = []
    files, val = find_sources(args)
    for file, weight in zip(files, args.path_weights, strict=True):
        if weight:
            train.append(file)
            weights.append(weight)
        else:
            unused.append(file.label)
    if not train:
        raise ValueError(
            "--data.weights: all are 0, so nothing is left to learn; raise them"
        )
    labels = _unique_labels([*train, *(file for _, file in val)])
    return UsedSources(train, weights, val, labels, unused)


def _unique_labels(files: Iterable[File | HubSplit]) -> dict[File | HubSplit, str]:
    """Return the name of each file in messages. A file that is read in several ways has several."""
    labels: dict[File | HubSplit, str] = {}
    uses = Counter()
    for file in dict.fromkeys(files):
        uses[file.label] += 1
        use = uses[file.label]
        labels[file] = file.label
        if use > 1:
            labels[file] += f" (with other settings, {use})"
    return labels


def source_digests(args: DataArgs) -> dict[str, str]:
    """Return the hash of the content of all files of examples, by label."""
    return {file.label: file.digest() for file in used_sources(args).labels}


def find_sources(
    args: DataArgs,
) -> tuple[list[File | HubSplit], list[tuple[str, File | HubSplit]]]:
    """Return the training files, one for each path, and the validation files, possibly none, with
    the names of their sets.

    Raise ValueError for a path that is not a file, a folder with a training file, or a data set on
    the hub.
    """
    # flags that nothing would read
    if args.split and not any(hub_dataset(item.path) for item in args.paths):
        raise ValueError(
            f"--data.split {args.split}: no --data.path is a data set on the hub; leave it out"
        )
    items = (*args.paths, *args.val_paths)
    if args.subset and not any(hub_dataset(item.path) for item in items):
        raise ValueError(
            f"--data.subset {args.subset}: no path is a data set on the hub; leave it out"
        )
    for item in items:
        if (item.split or item.subset) and not hub_dataset(item.path):
            raise ValueError(
                f"{item.text()}: only data sets on the hub have a split or a subset; leave them out"
            )

    train, named = _sources_of_paths(args)
    # validation files that the flags name replace those that come with the paths
    if args.val_path:
        named = [(item.name, _val_source(item, args.subset)) for item in args.val_paths]
        named = _with_names(named) if len(named) > 1 else named
    return train, named


def notes_on_sources(args: DataArgs) -> Iterator[str]:
    """Yield notes on files of folders that are not read, and on what has no effect because a path
    has validation examples of its own."""
    train, own = _sources_of_paths(args)
    used = set()
    for source in (*train, *(source for _, source in own)):
        if isinstance(source, File):
            used.update(source.parts or (source.name,))
    for item in args.paths:
        if Path(item.path).is_dir():
            files = _readable(sorted(Path(item.path).iterdir()))
            unread = [file.name for file in files if str(file) not in used]
            if unread:
                more = ", ..." if len(unread) > 3 else ""
                yield f"note: {item.path}: {', '.join(unread[:3])}{more} not read"

    if not own:
        return
    labels = ", ".join(source.label for _, source in own)
    if args.val_path:
        yield f"note: {labels} has no effect: --data.val_path names other validation examples"
    elif args.val_fraction != DataArgs().val_fraction:
        yield (
            f"note: --data.val_fraction {args.val_fraction} has no effect: {labels} has the "
            "validation examples"
        )


def _sources_of_paths(
    args: DataArgs,
) -> tuple[list[File | HubSplit], list[tuple[str, File | HubSplit]]]:
    """Return the training files, and the validation files that come with them, without names."""
    train = []
    val = []
    for item, weight in zip(args.paths, args.path_weights, strict=True):
        path, splits = (
            item.path,
            _splits(item.path, item.subset or args.subset, item.split or args.split),
        )
        if "train" not in splits and hub_dataset(path):
            names = ", ".join(_load_dataset(path, item.subset or args.subset))
            raise ValueError(
                f"{path} has no split train; it has {names}: choose one with --data.split"
            )
        if "train" not in splits:
            pattern = Path(path) / "*.jsonl"
            raise ValueError(
                f"{path} contains no train.json, train.jsonl, ... and no several files of one "
                "format, apart from those with a name of test or validation; name the file, or a "
                f"pattern such as '{pattern}', with --data.path"
            )
        reading = _reading(item)
        # --data.limit is about training examples; validation files are used whole
        train.append(
            splits["train"]._replace(limit=item.limit or args.limit, reading=reading)
        )
        if "val" in splits and weight:
            val.append(splits["val"]._replace(reading=reading))
    # a path may name the validation split as training examples
    is_trained_on = {_with_defaults(source) for source in train}
    named = []
    # two splits of a data set on the hub bring the same validation split
    for source in dict.fromkeys(val):
        if _with_defaults(source) not in is_trained_on:
            named.append(("", source))
    return train, named


def _with_defaults(source: File | HubSplit) -> File | HubSplit:
    """Return a source as it would be without settings of its own."""
    return source._replace(limit=None, reading=ReadOptions())


def _with_names(
    named: list[tuple[str, File | HubSplit]],
) -> list[tuple[str, File | HubSplit]]:
    """Return the validation sets with a name for each: the given one, or else that of the file or
    the split.

    Raise ValueError if two sets have the same name.
    """
    named = [(name or _set_name(source), source) for name, source in named]
    names = [name for name, _ in named]
    repeated = []
    for name in names:
        if names.count(name) > 1:
            repeated.append(name)
    if repeated:
        paths = ", ".join(source.label for name, source in named if name == repeated[0])
        raise ValueError(
            f"--data.val_path: {paths} would have the same name, {repeated[0]}; name them: "
            "NAME=PATH,NAME=PATH"
        )
    return named


def _reading(item: DataPath) -> ReadOptions:
    return ReadOptions(item.format, tuple(item.columns.items()), item.template)


def _set_name(source: File | HubSplit) -> str:
    """Return a name for a validation set: that of the file without its suffixes, or those of the
    data set and the split."""
    if isinstance(source, HubSplit):
        name = f"{_dataset_id(source.name).name.rpartition('/')[2]}_{source.split}"
    else:
        name = Path(source.name).name.removesuffix(split_suffixes(Path(source.name))[1])
        name = name.removesuffix(Path(name).suffix)
    return re.sub(r"[^\w-]", "_", name)


def _val_source(item: DataPath, subset: str | None) -> File | HubSplit:
    """Return the validation examples that --data.val_path names: a file, or a split of a data set
    on the hub."""
    if is_pattern(item.path):
        return _splits(item.path, None, None)["train"]._replace(
            limit=item.limit, reading=_reading(item)
        )
    if not hub_dataset(item.path):
        return File(item.path, item.limit, _reading(item))
    if not (item.split or item.path.partition(":")[2]):
        remedy = f"for a data set on the hub, name its split, such as {item.path}:test"
        raise ValueError(f"--data.val_path {item.path}: no such file; {remedy}")
    source = _splits(item.path, item.subset or subset, item.split)["train"]
    return source._replace(limit=item.limit, reading=_reading(item))


def _splits(
    path: str, subset: str | None, split: str | None
) -> Mapping[str, File | HubSplit]:
    """Return the training and validation splits that a path has, by "train" and "val".

    split: the training split of a data set on the hub, unless the path ends with one,
    owner/name:split.
    """
    # several files as one
    if is_pattern(path):
        return {"train": _files_of(path, sorted(glob(path, recursive=True)))}

    # a folder: one file for each split, or numbered parts
    if Path(path).is_dir():
        files = sorted(Path(path).iterdir())
        named = _named_files(path, files)
        if not named:
            return _shards(path, files)
        # The other split may be in numbered parts: val.jsonl beside train-00001.jsonl. Those of a
        # split that is there as one file are refused; other names, as notes.jsonl, are not read.
        numbered = []
        for file in files:
            begins = any(
                file.name.lower().startswith(name) for name in chain(*SPLITS.values())
            )
            if begins and re.search(r"\d", file.stem):
                numbered.append(file)
        return _one_of_each(path, named, _parts_of_splits(path, numbered))

    # a path that cannot be a data set on the hub is a file; if it is missing, reading it says so
    if not hub_dataset(path):
        return {"train": File(path)}
    name, _, own_split = path.partition(":")
    dataset = _load_dataset(name, subset)
    split = own_split or split
    if split and split not in dataset:
        raise ValueError(f"{name} has no split {split}; it has {', '.join(dataset)}")
    hub_splits = {}
    for kind, names in SPLITS.items():
        present = [split_name for split_name in names if split_name in dataset]
        if kind == "train" and split:
            hub_splits[kind] = HubSplit(name, subset, split)
        elif present:
            hub_splits[kind] = HubSplit(name, subset, present[0])
    return hub_splits


def _named_files(path: str, files: list[Path]) -> dict[str, File]:
    """Return the splits of a folder that are one file each, such as train.jsonl; raise ValueError
    if a split has two."""
    found = {}
    for split, stems in SPLITS.items():
        supported = set()
        for stem in stems:
            for end in _endings():
                supported.add(f"{stem}{end}")
        matches = []
        for file in files:
            if file.name.lower() in supported:
                matches.append(file)
        if len(matches) > 1:
            names = " and ".join(file.name for file in matches)
            raise ValueError(
                f"{path} contains {names}; name the one to use with --data.path"
            )
        if matches:
            found[split] = File(str(matches[0]))
    return found


def _one_of_each(
    path: str, named: Mapping[str, File], parts: Mapping[str, File]
) -> dict[str, File | HubSplit]:
    """Return the splits of a folder; raise ValueError if it has one as a file and in parts."""
    for split in parts.keys() & named.keys():
        whole = Path(named[split].name).name
        part = Path(parts[split].parts[0]).name
        raise ValueError(
            f"{path} contains {whole} and {part}; name the file, or a pattern of the parts, with "
            "--data.path"
        )
    return {**parts, **named}


def is_pattern(path: str) -> bool:
    """Return whether a path is a pattern of file names, such as data/*.parquet."""
    return has_magic(path) and not Path(path).exists()


def _files_of(name: str, paths: list[str]) -> File:
    """Return several files of examples as one source; raise ValueError if there is none."""
    readable = []
    for path in paths:
        if Path(path).is_file() and split_suffixes(Path(path))[0] in READERS:
            readable.append(path)
    if not readable:
        raise ValueError(
            f"{name}: no file with examples matches; use {', '.join(READERS)}, and [[] for a "
            "bracket"
        )
    return File(name, parts=tuple(readable))


def _shards(path: str, files: list[Path]) -> dict[str, File]:
    """Return the splits of a folder of several files, such as train-00000-of-00003.parquet.

    A file belongs to the split that its name has as a word. Where none has one, all are training
    examples; where some do, the others must be of a test split. A folder whose files have different
    formats is not read, nor a single file of no split.
    """
    readable = _readable(files)
    if len({split_suffixes(file)[0] for file in readable}) != 1:
        return {}
    others = []
    for file in readable:
        if not _split_of(file):
            others.append(file)
    if len(others) == len(readable) == 1:
        return {}
    if len(others) == len(readable):
        _check_complete(path, readable)
        return {"train": File(path, parts=tuple(map(str, others)))}
    if others:
        names = ", ".join(file.name for file in others[:3])
        raise ValueError(
            f"{path}: {names} belong to no split, but others do; name a pattern with --data.path"
        )
    return _parts_of_splits(path, files)


def _check_complete(folder: str, files: list[Path]) -> None:
    """Raise ValueError if numbered files of a folder are missing, or a file is there twice, once
    compressed or of another download."""
    remedy = "remove one of them, or name a pattern with --data.path"
    stems: dict[str, Path] = {}
    numbers: dict[tuple[str, int], dict[int, str]] = {}
    # by the beginning of their names
    numbered: dict[str, tuple[int, str]] = {}
    for file in files:
        stem = file.name.removesuffix(split_suffixes(file)[1])
        if stem in stems:
            raise ValueError(
                f"{folder} contains {stems[stem].name} and {file.name}; {remedy}"
            )
        stems[stem] = file
        match = NUMBERED.search(file.name)
        if match:
            beginning = file.name[: match.start()]
            of_group = numbers.setdefault((beginning, int(match[2])), {})
            # of two downloads, possibly in other parts
            other = of_group.setdefault(int(match[1]), file.name)
            count, first = numbered.setdefault(beginning, (int(match[2]), file.name))
            if count != int(match[2]):
                other = first
            if other != file.name:
                raise ValueError(f"{folder} contains {other} and {file.name}; {remedy}")

    # they are numbered from 0, or from 1
    for (beginning, count), found in numbers.items():
        first = 0 if 0 in found else 1
        missing = sorted(set(range(first, first + count)) - found.keys())
        if missing:
            pattern = Path(folder) / f"{beginning}*"
            raise ValueError(
                f"{folder}: of {count:,} files {beginning}*, number {missing[0]} is missing; "
                f"complete the folder, or read those that are there with --data.path '{pattern}'"
            )


def _parts_of_splits(path: str, files: list[Path]) -> dict[str, File]:
    """Return the training and validation files of a folder, by the split that each name has."""
    by_split: dict[str, list[Path]] = {}
    for file in _readable(files):
        split = _split_of(file)
        if split in SPLITS:
            by_split.setdefault(split, []).append(file)
    joined = {}
    for split, of_split in by_split.items():
        _check_complete(path, of_split)
        joined[split] = File(f"{path} ({split})", parts=tuple(map(str, of_split)))
    return joined


def _readable(files: list[Path]) -> list[Path]:
    """Return the files that have a known format and are not hidden."""
    readable = []
    for file in files:
        is_data = file.is_file() and split_suffixes(file)[0] in READERS
        if is_data and not file.name.startswith("."):
            readable.append(file)
    return readable


def _split_of(file: Path) -> str:
    """Return the split that a file's name has as a word: train, val, one of OTHER_SPLITS; or none,
    "". Raise ValueError for a name with several."""
    found = {}
    for word in WORD.findall(file.name.removesuffix(file.suffix)):
        split = _split_named(word.lower())
        if split:
            found[split] = word
    if len(found) > 1:
        words = " and ".join(found.values())
        raise ValueError(
            f"{file}: its name has {words}, so its split is unclear; rename it, or name a file or "
            "a pattern with --data.path"
        )
    return "".join(found)


def _split_named(word: str) -> str:
    """Return the split that has this name, or this name and "set"; "" if none has it."""
    word = word.removesuffix("set")
    for split, names in SPLITS.items():
        if word in names:
            return split
    return word if word in OTHER_SPLITS else ""


def hub_dataset(path: str) -> HubId | None:
    """Return the id of the data set on the hub that `path` names, without its split; None if it
    names a file or a folder."""
    is_local = (
        split_suffixes(Path(path))[0] in READERS or Path(path).exists() or is_pattern(path)
    )
    if is_local:
        return None
    return hub_id(path.partition(":")[0])


def _dataset_id(name: str) -> HubId:
    """Return the id of a data set that `hub_dataset` has recognized."""
    dataset_id = hub_id(name)
    assert dataset_id is not None
    return dataset_id


def _endings() -> list[str]:
    endings = []
    for compression in OPENERS:
        endings += [suffix + compression for suffix in READERS]
    return endings


@cache
def _load_dataset(name: str, subset: str | None) -> Any:
    """Load all splits of a data set, once; raise ValueError if it cannot be loaded."""
    try:
        datasets = import_module("datasets")
    except ImportError:
        raise ValueError(
            f"{name} is not a local file or folder; to load it from the hub as a data set, pip "
            "install 'litft[data]'"
        ) from None
    dataset_id = _dataset_id(name)
    try:
        return datasets.load_dataset(dataset_id.name, subset, revision=dataset_id.revision)
    except Exception as error:
        # from the network, the hub, or the reader of the files
        reason = " ".join(str(error).split())[:300]
        if isinstance(error, datasets.exceptions.DatasetGenerationError):
            # such as files whose records have different fields, which litft's readers allow
            raise ValueError(
                f"{name}: the package datasets cannot read its files ({reason}); download them (hf "
                f"download {dataset_id.name} --repo-type dataset --local-dir data), and pass a "
                "file: --data.path data/FILE"
            ) from None
        raise ValueError(
            f"{name} is not a local file or folder, and not a data set on the hub ({reason})"
        ) from None
