"""Run folders: find, create and check them. Imports no torch.

A run folder has config.yaml, metrics.csv, checkpoints/step-NNNNNN/ (to resume) and final/ (the
result; written at the end). While a finished run is continued, its earlier result is previous/.
"""

import csv
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from litft.atomic import atomic_write
from litft.folder_lock import LOCK

OUT = Path("out")
CONFIG = "config.yaml"
VERDICT = "verdict.json"
# the hashes of the files of examples, by their names
DATA = "data.json"
# first line of config.yaml: other programs have files of that name
_HEADER = "# A run of litft"
# the folder of the earlier result of a run that is continued
PREVIOUS = "previous"
_LAUNCH_LINE = "# begun by the launch "


def is_run(folder: Path) -> bool:
    """Return whether this is a run folder of litft."""
    try:
        with (folder / CONFIG).open(encoding="utf-8", errors="replace") as file:
            return file.readline().startswith(_HEADER)
    except OSError:
        return False


def method(folder: Path) -> str:
    """Return the name of a run's method, from its config.yaml."""
    with (folder / CONFIG).open(encoding="utf-8", errors="replace") as file:
        match = re.match(rf"{_HEADER}: finetune (\w+);", file.readline())
    if match:
        return match[1]
    return "lora"


def command(script: str) -> str:
    """Return how a script is started from here: `python finetune/lora.py` in a clone, otherwise
    `litft finetune lora`."""
    path = Path(script)
    if path.is_file():
        return f"python {script}"
    if path.parent.name == "finetune":
        return f"litft finetune {path.stem}"
    if script == "generate/base.py":
        return "litft generate"
    return f"litft {path.stem}"


def finished(folder: Path) -> bool:
    """Return whether the run is finished."""
    return (folder / "final").is_dir()


def verdict_texts(folder: Path) -> list[str]:
    """Return how a run's result differs from the model before it, a line for each score; none if
    that was not measured, or the file is damaged."""
    try:
        content = json.loads((folder / VERDICT).read_text("utf-8"))
        return [str(verdict["text"]) for verdict in content["verdicts"]]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def data_digests(folder: Path) -> set[str]:
    """Return the hashes of the files that a run has learned from and held out of; none where the
    run has not recorded them, or the record is damaged."""
    try:
        return set(map(str, json.loads((folder / DATA).read_text("utf-8")).values()))
    except (OSError, ValueError, AttributeError):
        return set()


def set_final_aside(folder: Path) -> None:
    """Rename final/ to previous/: a run that is continued is not finished."""
    if finished(folder):
        delete_previous_final(folder)
        (folder / "final").rename(folder / PREVIOUS)


def delete_previous_final(folder: Path) -> None:
    """Delete what `set_final_aside` has kept."""
    shutil.rmtree(folder / PREVIOUS, ignore_errors=True)


def checkpoints(folder: Path) -> list[Path]:
    """Return all complete checkpoints of a run, the oldest first."""
    folders = (
        path
        for path in (folder / "checkpoints").glob("step-*")
        if path.name.removeprefix("step-").isdecimal()
    )
    return sorted(folders, key=checkpoint_step)


def checkpoint_step(checkpoint: Path) -> int:
    """Return the number of steps after which a checkpoint was saved."""
    return int(checkpoint.name.removeprefix("step-"))


def metrics_rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the values of each row of a metrics.csv, without rows that a crash has damaged.

    Raise ValueError if the file has no header.
    """
    if not path.is_file():
        return
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        names = _cells(next(file, ""))
        if names and "step" not in names:
            raise ValueError(
                f"{path} does not start with a row of column names; fix it, or move it away"
            )
        for line in file:
            # a row that a crash has cut short
            cells = _cells(line)
            if len(cells) < len(names):
                continue
            values = {}
            for name, cell in zip(names, cells, strict=False):
                if name and cell:
                    values[name] = cell
            try:
                if int(values["step"]) >= 0 and [float(value) for value in values.values()]:
                    yield values
            except (KeyError, ValueError):
                continue


def _cells(line: str) -> list[str]:
    """Return the cells of one line, none if it is damaged: a quotation mark must not swallow the
    lines after it."""
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        # zero bytes before Python 3.11, or a very long cell
        return []


def newest_run(is_finished: bool) -> Path | None:
    """Return the newest finished, or unfinished, run folder under out/; None if there is no such
    run."""
    runs = []
    for path in OUT.glob(f"*/{CONFIG}"):
        if is_run(path.parent) and finished(path.parent) == is_finished:
            runs.append(path.parent)
    # by the last start, since a resumed run writes its config again
    return max(runs, key=lambda run: (run / CONFIG).stat().st_mtime, default=None)


def newest_finished() -> Path:
    """Return the newest finished run folder under out/. Raise ValueError if none exists."""
    run = newest_run(is_finished=True)
    if run is None:
        raise ValueError(
            f"no finished run under {OUT}/; pass --checkpoint_dir, or fine-tune first"
        )
    return run


def named_or_newest(out_dir: str | None, resume: bool) -> Path | None:
    """Return the run folder that the flags name, or None for a new run."""
    if out_dir:
        return Path(out_dir)
    if resume:
        return newest_run(is_finished=False)
    return None


def claim(method: str) -> Path:
    """Create and return the first free out/<method>[-n].

    Runs that start at the same time get different folders.
    """
    OUT.mkdir(exist_ok=True)
    number = 1
    while True:
        folder = OUT / (method if number == 1 else f"{method}-{number}")
        # fails if another run has just made the folder
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def check(
    folder: Path, resume: bool, overwrite: bool, inputs: Iterable[str | None]
) -> None:
    """Raise ValueError if the run would overwrite other files, or delete `inputs`, the paths that
    it reads."""
    if folder.is_file():
        raise ValueError(f"--out_dir {folder} is a file; name a folder")

    # what a run may write over
    occupied = folder.is_dir() and any(not _is_temporary(path) for path in folder.iterdir())
    if occupied and not is_run(folder):
        raise ValueError(
            f"--out_dir {folder} is not empty and is not a litft run; name another folder"
        )
    if occupied and not (resume or overwrite):
        raise ValueError(
            f"--out_dir {folder} already contains a run; --resume continues it, --overwrite "
            "deletes it"
        )
    if overwrite:
        for path in filter(None, inputs):
            if Path(path).resolve().is_relative_to(folder.resolve()):
                raise ValueError(
                    f"--overwrite would delete {path}, which this run reads; name another --out_dir"
                )


def _is_temporary(path: Path) -> bool:
    """Return whether a file or folder of a run is a lock, or is not complete."""
    return path.name == LOCK or path.name.endswith((".partial", ".partial.lock"))


def clear(folder: Path) -> None:
    """Delete what is in a run folder, for --overwrite, but for its lock.

    Other folders are left alone.
    """
    if not is_run(folder):
        return
    # config.yaml is the last, so that after a kill the rest is still that of a run
    for path in sorted(folder.resolve().iterdir(), key=lambda path: path.name == CONFIG):
        if path.name == LOCK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_config(folder: Path, method: str, text: str, launch: str | None) -> None:
    """Write config.yaml atomically. launch: id of the launch (torchrun, SLURM) that started the
    run."""
    launch_line = f"{_LAUNCH_LINE}{launch}\n" if launch else ""
    atomic_write(
        folder / CONFIG,
        f"{_HEADER}: finetune {method}; --config with this file repeats it.\n{launch_line}{text}",
    )


def launched_by(folder: Path | None, launch: str | None) -> bool:
    """Return whether the launch with this id started the run, so that its processes are now
    restarted ones."""
    if not (folder and launch and is_run(folder)):
        return False
    return (
        f"{_LAUNCH_LINE}{launch}"
        in (folder / CONFIG).read_text("utf-8", errors="replace").split("\n")[:2]
    )
