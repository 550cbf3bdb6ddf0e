"""Run state to resume from: `checkpoints/step-NNNNNN/`, one torch.distributed.checkpoint folder in our names.

The same for one process or many. A folder under its final name is complete: it is written under another and renamed.
"""

import json
import pickle
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.optim import Optimizer

_PROGRESS = "progress.json"
_OWN = "parameters."  # how the keys of what is trained begin
_DCP = "torch.distributed.checkpoint.metadata"
_METADATA_CLASSES = {
    *((_DCP, name) for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")),
    *((_DCP, name) for name in ("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *(("torch", name) for name in ("float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8")),
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
}


def newest(run: Path) -> Path | None:
    """The newest complete checkpoint of a run."""
    return max((run / "checkpoints").glob("step-" + "[0-9]" * 6), default=None)


def save(
    fabric: Fabric,
    run: Path,
    step: int,
    parameters: dict[str, nn.Parameter],
    optimizer: Optimizer,
    progress: dict[str, Any],
) -> None:
    """Write the state after `step` steps; every process takes part. OSError where it cannot be written."""
    folder = run / "checkpoints" / f"step-{step:06d}"
    partial = folder.with_name(folder.name + ".partial")
    if fabric.global_rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    fabric.barrier()
    with _plain_errors(partial):
        dcp.save(_state(parameters, optimizer), checkpoint_id=partial)
    if fabric.global_rank == 0:
        (partial / _PROGRESS).write_text(json.dumps({"step": step, **progress}) + "\n", "utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    fabric.barrier()


def read_progress(folder: Path) -> dict[str, Any]:
    """What was saved beside the tensors, `step` among it; ValueError where that is damaged."""
    try:
        progress = json.loads((folder / _PROGRESS).read_text("utf-8"))
        if not (isinstance(progress["step"], int) and progress["step"] >= 0):
            raise ValueError(f"step {progress['step']!r}")
        return progress
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, error) from None


def read_parameters(folder: Path) -> dict[str, Tensor]:
    """The trained parameters alone, on the CPU, by their names; ValueError where the folder is damaged."""
    reader = _Reader(folder)
    state = {k: torch.empty(v.size, dtype=v.properties.dtype) for k, v in _stored(reader).items() if k.startswith(_OWN)}
    try:
        with _plain_errors(folder):
            dcp.load(state, storage_reader=reader)
    except OSError as error:
        raise _damaged(folder, error) from None
    return {key.removeprefix(_OWN): value for key, value in state.items()}


def _stored(reader: "_Reader") -> dict[str, Any]:
    """What a checkpoint's index says of each tensor."""
    try:
        return reader.read_metadata().state_dict_metadata
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, TypeError, ValueError, IndexError, KeyError) as error:
        raise _damaged(Path(reader.path), error) from None


def changes(folder: Path, now: dict[str, Any]) -> list[str]:
    """What of `now` is not as it was saved: each name with its value then and now."""
    before = read_progress(folder).get("identity", {})
    return [f"{name} {before.get(name)!r}, now {now[name]!r}" for name in now if before.get(name) != now[name]]


def restore(folder: Path, parameters: dict[str, nn.Parameter], optimizer: Optimizer) -> None:
    """Fill parameters and optimizer in place. ValueError where the run had other parameters, or the folder is damaged."""
    reader = _Reader(folder)
    stored = _stored(reader)
    found = {k: tuple(v.size) if isinstance(v, TensorStorageMetadata) else None for k, v in stored.items()}
    _begin(optimizer)
    state = _state(parameters, optimizer)
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    if shapes != found:
        odd = sorted(key for key in shapes.keys() | found.keys() if shapes.get(key) != found.get(key))
        raise ValueError(
            f"{folder} was saved by a run with other trained parameters ({odd[0]}: {found.get(odd[0])} there, "
            f"{shapes.get(odd[0])} here); resume with the flags the run began with"
        )
    try:
        with _plain_errors(folder):
            dcp.load(state, storage_reader=reader)
    except OSError as error:
        raise _damaged(folder, error) from None


def prune(fabric: Fabric, run: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and what a killed save left behind."""
    if fabric.global_rank != 0:
        return
    folders = sorted((run / "checkpoints").glob("step-" + "[0-9]" * 6))
    for folder in [*folders[:-keep], *(run / "checkpoints").glob("*.partial")]:
        shutil.rmtree(folder, ignore_errors=True)


class _Reader(dcp.FileSystemReader):
    """DCP's reader, but its index, a pickle, may name the classes of an index only: a run's folder may be a stranger's."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of the folder; UnpicklingError for anything else."""
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _Unpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _METADATA_CLASSES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint's index")
        return super().find_class(module, name)


def _damaged(folder: Path, error: BaseException) -> ValueError:
    reason = f"{type(error).__name__}: {error}".split("\n")[0][:200]
    return ValueError(f"{folder} is damaged ({reason}); delete it, and --resume takes the checkpoint before it")


@contextmanager
def _plain_errors(folder: Path) -> Iterator[None]:
    """DCP's own exception as what lies beneath it, and no warning that a run on one device is no distributed one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            yield
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
                raise KeyboardInterrupt from None
            raise OSError(0, str(causes[0]).split("\n")[0], str(folder)) from None


def _begin(optimizer: Optimizer) -> None:
    """Give a fresh optimizer its state tensors: one step with no gradient and no learning rate changes no weight."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0 if not isinstance(group["lr"], Tensor) else torch.zeros_like(group["lr"])
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _state(parameters: dict[str, nn.Parameter], optimizer: Optimizer) -> dict[str, Tensor]:
    """The tensors of parameters and optimizer under flat names: they are loaded into in place."""
    state = {f"{_OWN}{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        for kind, value in optimizer.state[parameter].items():
            state[f"optimizer.{name}.{kind}"] = value
    return state
