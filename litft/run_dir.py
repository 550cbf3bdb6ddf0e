"""A run's folder: where it is, whether it is finished, and which is the newest. Imports no torch.

<out_dir>/config.yaml, metrics.csv, checkpoints/step-NNNNNN/ (to resume), final/ (to open; there only when finished).
"""

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

OUT = Path("out")
CONFIG = "config.yaml"
_MARK = "# A run of litft"  # how its config.yaml begins: other programs have files of that name
_LAUNCH = "# begun by the launch "


def is_run(folder: Path) -> bool:
    """Whether litft wrote this folder."""
    try:
        with (folder / CONFIG).open(encoding="utf-8", errors="replace") as file:
            return file.readline().startswith(_MARK)
    except OSError:
        return False


def method(folder: Path) -> str:
    """Which of the methods a run's config.yaml is for."""
    with (folder / CONFIG).open(encoding="utf-8", errors="replace") as file:
        found = re.match(rf"{_MARK}: finetune (\w+);", file.readline())
    return found[1] if found else "lora"


def finished(folder: Path) -> bool:
    """Whether the run came to its end."""
    return (folder / "final").is_dir()


def newest(done: bool) -> Path | None:
    """The newest run under out/ that is finished, or that is not."""
    runs = [path.parent for path in OUT.glob(f"*/{CONFIG}") if is_run(path.parent) and finished(path.parent) == done]
    return max(runs, key=lambda run: (run / CONFIG).stat().st_mtime, default=None)


def newest_finished() -> Path:
    """The newest finished run; ValueError where there is none."""
    run = newest(done=True)
    if run is None:
        raise ValueError(f"no finished run under {OUT}/; pass --checkpoint_dir, or fine-tune first")
    return run


def named(out_dir: str | None, resume: bool) -> Path | None:
    """The folder that the flags mean; None: a new one."""
    return Path(out_dir) if out_dir else newest(done=False) if resume else None


def claim(method: str) -> Path:
    """Make the first free out/<method>[-n]: of two runs that begin at once, each gets its own."""
    OUT.mkdir(exist_ok=True)
    number = 1
    while True:
        folder = OUT / (method if number == 1 else f"{method}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def check(folder: Path, resume: bool, overwrite: bool, inputs: Iterable[str | None]) -> None:
    """Refuse to write over what is there, and to delete what the run is about to read."""
    if folder.is_file():
        raise ValueError(f"--out_dir {folder} is a file; name a folder")
    held = folder.is_dir() and any(not path.name.endswith(".partial") for path in folder.iterdir())
    if held and not is_run(folder):
        raise ValueError(f"--out_dir {folder} is not empty and holds no run of litft; name another folder")
    if held and not (resume or overwrite):
        raise ValueError(f"--out_dir {folder} already holds a run; --resume continues it, --overwrite deletes it")
    if overwrite:
        for path in filter(None, inputs):
            if Path(path).resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"--overwrite would delete {path}, which this run reads; name another --out_dir")


def clear(folder: Path) -> None:
    """Delete a run, for --overwrite."""
    if is_run(folder):
        shutil.rmtree(folder.resolve())


def write_config(folder: Path, method: str, text: str, launch: str | None) -> None:
    """Write config.yaml, all of it or nothing. launch: whose processes these are."""
    known = f"{_LAUNCH}{launch}\n" if launch else ""
    write_whole(folder / CONFIG, f"{_MARK}: finetune {method}; --config with this file repeats it.\n{known}{text}")


def begun_by(folder: Path | None, launch: str | None) -> bool:
    """Whether this very launch has begun the run, so that its processes have been started again."""
    if not (folder and launch and is_run(folder)):
        return False
    return f"{_LAUNCH}{launch}" in (folder / CONFIG).read_text("utf-8", errors="replace").split("\n")[:2]


def write_whole(path: Path, text: str) -> None:
    """Write a file, all of it or nothing."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, "utf-8", newline="")
    _sync(partial)
    partial.replace(path)


def put_in_place(partial: Path, folder: Path) -> None:
    """Give a folder that is complete its name, another's if there is one: after a crash it is complete, or not there."""
    for path in sorted(partial.rglob("*"), reverse=True):
        _sync(path)
    _sync(partial)
    old = folder.with_name(f"{folder.name}.old.partial")
    shutil.rmtree(old, ignore_errors=True)
    if folder.is_dir():
        folder.rename(old)
    partial.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    """Have the disk hold what was written."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
