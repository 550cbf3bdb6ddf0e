"""A run's folder: where it is, whether it is finished, and which is the newest. Imports no torch.

<out_dir>/config.yaml, metrics.csv, checkpoints/step-NNNNNN/ (to resume), final/ (to open; there only when finished).
"""

import shutil
from pathlib import Path

OUT = Path("out")
CONFIG = "config.yaml"


def finished(folder: Path) -> bool:
    """Whether the run came to its end."""
    return (folder / "final").is_dir()


def newest(done: bool) -> Path | None:
    """The newest run under out/ that is finished, or that is not."""
    runs = [path.parent for path in OUT.glob(f"*/{CONFIG}") if finished(path.parent) == done]
    return max(runs, key=lambda run: (run / CONFIG).stat().st_mtime, default=None)


def newest_finished() -> Path:
    """The newest finished run; ValueError where there is none."""
    run = newest(done=True)
    if run is None:
        raise ValueError(f"no finished run under {OUT}/; pass --checkpoint_dir, or fine-tune first")
    return run


def choose(out_dir: str | None, method: str, resume: bool) -> Path:
    """The folder of the run that begins or continues."""
    if out_dir:
        return Path(out_dir)
    if resume and (run := newest(done=False)):
        return run
    names = (OUT / (method if n == 1 else f"{method}-{n}") for n in range(1, 10**6))
    return next(folder for folder in names if not folder.exists())


def check(folder: Path, resume: bool, overwrite: bool) -> None:
    """Refuse to write over what is there."""
    if folder.is_file():
        raise ValueError(f"--out_dir {folder} is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (resume or overwrite):
        held = "already holds a run; --resume continues it, --overwrite deletes it"
        other = "is not empty and holds no run; name another folder"
        raise ValueError(f"--out_dir {folder} {held if (folder / CONFIG).is_file() else other}")
    if overwrite and folder.is_dir() and any(folder.iterdir()) and not (folder / CONFIG).is_file():
        raise ValueError(f"--overwrite: {folder} holds no run of litft, and is not deleted; name another folder")


def clear(folder: Path) -> None:
    """Delete a run, for --overwrite."""
    if (folder / CONFIG).is_file():
        shutil.rmtree(folder)
