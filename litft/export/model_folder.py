"""Write a model folder whole or not at all, and compare it with what was to be written."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from litft.atomic import atomic_folder
from litft.checkpoints.weight_files import Checkpoint
from litft.checkpoints.weight_writer import LazyTensor
from litft.distributed.devices import DTYPES
from litft.pretrained.folder import PretrainedFolder
from litft.signals import sigterm_exits


def written_dtype(source: PretrainedFolder, precision: str) -> torch.dtype:
    if precision == "auto":
        return source.dtype(None)
    return DTYPES[precision]


def compare(folder: Path, entries: list[LazyTensor]) -> None:
    """Read all tensors back and compare them.

    Raises OSError on a difference, which only a faulty disk or a bug can cause, and ValueError for
    NaN or infinity.
    """
    # as any reader would open it
    written = Checkpoint(folder)
    assert written.names == sorted(entry.name for entry in entries)
    for entry in entries:
        expected = entry.make()
        if not expected.isfinite().all():
            dtype = str(expected.dtype).removeprefix("torch.")
            reason = (
                "the weights that it is made from are damaged, or too large for this dtype; use "
                "others"
            )
            raise ValueError(f"{entry.name} contains NaN or infinity in {dtype}: {reason}")
        if not torch.equal(written.read(entry.name), expected):
            raise OSError(
                0,
                f"{entry.name} read back from the disk differs from what was written",
                str(folder),
            )


def write_folder(out_dir: str, fill: Callable[[Path], None]) -> Path:
    """Create `out_dir` with `fill`, under a temporary name first: it becomes visible only when
    complete."""
    out = Path(os.path.realpath(out_dir))
    _check_is_free(out, out_dir)
    _check_mount(out, out_dir)
    # a folder of the user has hardly this name
    partial = out.with_name(f"{out.name}.litft.partial")
    with sigterm_exits(), atomic_folder(out, partial):
        # another process may have filled it before this one had the lock
        _check_is_free(out, out_dir)
        fill(partial)
        # what somebody has put there meanwhile would be deleted
        _check_is_free(out, out_dir)
    return Path(out_dir)


def _check_mount(out: Path, out_dir: str) -> None:
    """Raise ValueError for a mount point: a complete folder, on another disk, cannot replace it."""
    if out.is_mount():
        raise ValueError(
            f"--out_dir {out_dir} is a mount point; name a folder in it, such as {out / 'model'}"
        )


def _check_is_free(out: Path, out_dir: str) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(
            f"--out_dir {out_dir} already exists and is not an empty folder; choose another folder"
        )
