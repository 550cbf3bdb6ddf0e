"""Where examples come from: files, folders with both splits, data sets of the Hugging Face hub."""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from litft.args import DataArgs
from litft.checkpoints.hub import HubId, hub_id
from litft.data.digests import digest_of
from litft.data.readers import PACKED, READERS, Records, existing, of_arrow, read_records, suffixes

SPLITS = {"train": ("train", "training"), "val": ("val", "valid", "validation", "dev")}


class File(NamedTuple):
    """A file of examples."""

    name: str

    @property
    def label(self) -> str:
        """How it is called where it is spoken of."""
        return self.name

    def records(self) -> Records:
        """Its records, with labels."""
        return read_records(Path(self.name))

    def digest(self) -> str:
        """The hash of what it holds."""
        return digest_of(existing(Path(self.name)))


class HubSplit(NamedTuple):
    """A split of a data set on the hub, which `datasets` downloads once."""

    name: str  # owner/name, or owner/name@revision
    subset: str | None
    split: str

    @property
    def label(self) -> str:
        """How it is called where it is spoken of."""
        return f"{self.name}, {self.split}"

    def dataset(self) -> Any:
        """The data set's rows."""
        return _hub(self.name, self.subset)[self.split]

    def records(self) -> Records:
        """Its records, with labels."""
        for index, record in enumerate(self.dataset()):
            yield f"{self.label} {index}", of_arrow(record)

    def digest(self) -> str:
        """The hash of what it holds."""
        return " ".join(digest_of(Path(file["filename"])) for file in self.dataset().cache_files)


def locate(args: DataArgs) -> tuple[list[File | HubSplit], list[File | HubSplit]]:
    """What is trained on, an entry a path, and what is validated on, which may be nothing.

    Raises ValueError for a path that is no file, no folder with a training file, and no data set on the hub.
    """
    train, val = [], []
    for path in args.path:
        found = _splits(path, args.subset)
        if "train" not in found:
            raise ValueError(f"{path} holds no train.json, train.jsonl, ...; name the file itself with --data.path")
        train.append(found["train"])
        val += [found["val"]] if "val" in found and not args.val_path else []
    return train, [File(args.val_path)] if args.val_path else val


def _splits(path: str, subset: str | None) -> dict[str, File | HubSplit]:
    """The training and validation parts that a path names."""
    if Path(path).is_dir():
        files = [*Path(path).iterdir()]
        names = {split: [f"{stem}{end}" for stem in stems for end in _endings()] for split, stems in SPLITS.items()}
        found = {split: sorted(f.name for f in files if f.name.lower() in known) for split, known in names.items()}
        if several := next((several for several in found.values() if len(several) > 1), None):
            raise ValueError(f"{path} holds {' and '.join(several)}; which is meant? name the files with --data.path")
        return {split: File(str(Path(path) / one[0])) for split, one in found.items() if one}
    if not hub_data(path):
        return {"train": File(path)}
    parts = _hub(path, subset)
    first = {split: next((name for name in names if name in parts), None) for split, names in SPLITS.items()}
    return {split: HubSplit(path, subset, name) for split, name in first.items() if name}


def hub_data(path: str) -> HubId | None:
    """The data set on the hub that a path means, if it is none of a file or a folder."""
    return None if suffixes(Path(path))[0] in READERS else hub_id(path)


def _endings() -> list[str]:
    return [suffix + packed for packed in PACKED for suffix in READERS]


@cache
def _hub(name: str, subset: str | None) -> Any:
    """All splits of a data set, asked for once; ValueError where it cannot be had."""
    try:
        datasets = import_module("datasets")
    except ImportError:
        raise ValueError(
            f"{name} is no file or folder here; to read it from the hub as a data set, pip install 'litft[data]'"
        ) from None
    try:
        wanted = hub_id(name)
        return datasets.load_dataset(wanted.name, subset, revision=wanted.revision)
    except Exception as error:  # whatever the network, the hub and the files' own readers raise
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{name} is no file or folder here, and no data set on the hub ({reason})") from None
