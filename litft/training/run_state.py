"""Run state to resume from: `checkpoints/step-NNNNNN/`, one torch.distributed.checkpoint folder in our names.

The same for one process or many. A folder under its final name is complete: it is written under another, synced to the
disk, and renamed. Its progress.json states the sizes of the others, so that one cut short afterwards is known as such.
"""

import json
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.optim import Optimizer

from litft.run_dir import put_in_place
from litft.training.optimizers import StochasticRounding, averaged

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

# DCP's word on one device, which is no distributed run
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


class Damaged(ValueError):
    """A checkpoint that cannot be read."""

    def __init__(self, folder: Path, error: BaseException | str) -> None:
        reason = error if isinstance(error, str) else f"{type(error).__name__}: {error}".split("\n")[0][:200]
        super().__init__(f"{folder} is damaged ({reason})")


def newest(run: Path) -> Path | None:
    """The newest complete checkpoint of a run."""
    return max(_all(run), default=None, key=_step)


def _all(run: Path) -> list[Path]:
    """Every complete checkpoint, the oldest first."""
    folders = [path for path in (run / "checkpoints").glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(folders, key=_step)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


class Saver:
    """Writes a run's checkpoints, one at a time, beside its steps; every process takes part, each with what it holds."""

    def __init__(self, run: Path, main: bool, group: distributed.ProcessGroup | None) -> None:
        self.run, self.main, self.group = run, main, group
        self.start_step: int | None = None  # the step whose state is being written
        self.saved: int | None = None

    def begin(
        self,
        step: int,
        parameters: dict[str, nn.Parameter],
        optimizer: Optimizer,
        progress: dict[str, Any],
        then: Callable[[], None],
        beside: bool = True,
    ) -> None:
        """Write the state after `step` steps; OSError where that, or what was begun before, cannot be.

        then: called in the first process once the checkpoint has its name. beside: while the run goes on, of a copy.
        """
        self.finish()
        self.partial = self.run / "checkpoints" / f"step-{step:06d}.partial"
        if self.main:
            shutil.rmtree(self.partial, ignore_errors=True)
        if self.group is not None:
            distributed.barrier(self.group)
        self.start_step, self.then = step, then
        self.progress = {"step": step, **progress, "optimizer": _numbers(parameters, optimizer)}
        with averaged(optimizer), self._tidied():
            # one thread: what goes wrong in another of DCP's is printed, and not raised
            write = dcp.async_save if beside else dcp.save
            self.written = write(_state(parameters, optimizer), checkpoint_id=self.partial, process_group=self.group)
        if not beside:
            self.finish()

    def poll(self) -> None:
        """Give what is written its name; do not wait for what is not."""
        if self.start_step is not None and self.written.done():
            self.finish()

    def finish(self) -> None:
        """Wait for what was begun."""
        if self.start_step is None:
            return
        step, self.start_step = self.start_step, None
        with self._tidied():
            if isinstance(self.written, Future):
                self.written.result()
            if self.main:
                sizes = {path.name: path.stat().st_size for path in self.partial.iterdir()}
                (self.partial / _PROGRESS).write_text(json.dumps(self.progress | {"files": sizes}) + "\n", "utf-8")
                put_in_place(self.partial, self.partial.with_suffix(""))
        self.saved = step
        if self.main:
            self.then()

    @contextmanager
    def _tidied(self) -> Iterator[None]:
        """Delete what cannot be written: on a full disk the older ones may need the room."""
        try:
            with _plain_errors(self.partial):
                yield
        except OSError:
            if self.main:
                shutil.rmtree(self.partial, ignore_errors=True)
            raise


def read_progress(folder: Path) -> dict[str, Any]:
    """What was saved beside the tensors, `step` among it; Damaged where that, or the size of a file, is not as written."""
    try:
        progress = json.loads((folder / _PROGRESS).read_text("utf-8"))
        if progress["step"] != _step(folder):
            raise ValueError(f"step {progress['step']!r}")
        for name, kind in (("samples", int), ("elapsed", (int, float)), ("identity", dict), ("optimizer", dict)):
            if not isinstance(progress[name], kind):
                raise ValueError(f"{name} {str(progress[name])[:40]!r}")
        for name, size in progress["files"].items():
            if (found := (folder / Path(name).name).stat().st_size) != size:
                raise ValueError(f"{name} has {found:,} bytes, not {size:,}")
        return progress
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(folder, error) from None


def read_parameters(folder: Path) -> dict[str, Tensor]:
    """The trained parameters alone, on the CPU, by their names; Damaged where they cannot be read."""
    reader = _Reader(folder)
    state = {k: torch.empty(v.size, dtype=v.properties.dtype) for k, v in _stored(reader).items() if k.startswith(_OWN)}
    try:
        with _plain_errors(folder):
            dcp.load(state, storage_reader=reader)
    except OSError as error:
        raise Damaged(folder, error) from None
    return {key.removeprefix(_OWN): value for key, value in state.items()}


def _stored(reader: "_Reader") -> dict[str, Any]:
    """What a checkpoint's index says of each tensor."""
    try:
        return reader.read_metadata().state_dict_metadata
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, TypeError, ValueError, IndexError, KeyError) as error:
        raise Damaged(Path(reader.path), error) from None


def restore_newest(
    run: Path, identity: dict[str, Any], parameters: dict[str, nn.Parameter], optimizer: Optimizer
) -> tuple[dict[str, Any] | None, list[str]]:
    """Fill parameters and optimizer in place from the newest checkpoint that can be read.

    Returns what was saved beside them, None where no checkpoint was ever written, and what is wrong with newer ones.
    ValueError where the run was another than `identity` says, and where every checkpoint is damaged.
    """
    damaged: list[str] = []
    for folder in reversed(_all(run)):
        try:
            progress = read_progress(folder)
            if "split" in identity and progress.get("identity", {}).get("split") != identity["split"]:
                reason = "when which examples are held out still depended on how many there are"
                remedy = "begin another run, with this one's newest result as --checkpoint_dir"
                raise ValueError(f"{folder} was saved {reason}: it would now learn some that it was measured on; {remedy}")
            if changed := changes(progress, identity):
                remedy = "resume with what it began with, or begin another run with its newest result as --checkpoint_dir"
                raise ValueError(f"{folder} was saved with {'; '.join(changed)}; {remedy}")
            _restore(folder, progress, parameters, optimizer)
            return progress, damaged
        except Damaged as error:
            damaged.append(str(error))
    if damaged:
        raise ValueError(f"{'; '.join(damaged)}: there is nothing to continue from; --overwrite begins again")
    return None, []


def changes(progress: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What of `now` is not as it was saved: each name with its value then and now."""
    before = progress.get("identity", {})
    odd = {name: (before.get(name), now[name]) for name in now if before.get(name) != now[name]}
    return [f"{name} {str(then)[:40]}, now {str(value)[:40]}" for name, (then, value) in odd.items()]


def _restore(folder: Path, progress: dict[str, Any], parameters: dict[str, nn.Parameter], optimizer: Optimizer) -> None:
    """Fill in place. ValueError where the run had other parameters; Damaged."""
    reader = _Reader(folder)
    stored = _stored(reader)
    found = {k: tuple(v.size) if isinstance(v, TensorStorageMetadata) else None for k, v in stored.items()}
    _begin(optimizer)
    with averaged(optimizer):
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
            raise Damaged(folder, error) from None
        try:
            _set_numbers(progress["optimizer"], parameters, optimizer)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise Damaged(folder, error) from None


def prune(run: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and what a killed save left behind."""
    _delete(run, _all(run)[:-keep])


def cut(run: Path, step: int) -> None:
    """Delete the checkpoints beyond `step`: they are damaged, or the run would have gone on from them."""
    _delete(run, [folder for folder in _all(run) if _step(folder) > step])


def _delete(run: Path, folders: list[Path]) -> None:
    for folder in folders:  # half a checkpoint must not bear a whole one's name
        folder.rename(folder.with_name(folder.name + ".partial"))
    for folder in (run / "checkpoints").glob("*.partial"):
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


@contextmanager
def _plain_errors(folder: Path) -> Iterator[None]:
    """DCP's own exception as what lies beneath it."""
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
            if isinstance(value, Tensor):
                state[f"optimizer.{name}.{kind}"] = value
    return state


def _numbers(parameters: dict[str, nn.Parameter], optimizer: Optimizer) -> dict[str, Any]:
    """What the optimizer keeps in plain numbers (steps, sums of weights), of its groups and of each parameter."""
    return {
        "groups": [_plain(group) for group in optimizer.param_groups],
        "parameters": {name: _plain(optimizer.state[parameter]) for name, parameter in parameters.items()},
    }


def _plain(values: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _set_numbers(saved: dict[str, Any], parameters: dict[str, nn.Parameter], optimizer: Optimizer) -> None:
    """Put back what `_numbers` took."""
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update({name: values[name] for name in _plain(group)})
    for name, parameter in parameters.items():
        state = optimizer.state[parameter]
        numbers = {kind: saved["parameters"][name][kind] for kind in _plain(state)}
        state.update(numbers)
        if isinstance(optimizer, StochasticRounding) and parameter in optimizer.inner:  # what is frozen is not
            # of a part of a parameter `state` is a copy: tensors are shared, numbers are not
            for own in optimizer.inner[parameter].state.values():
                own.update({kind: value for kind, value in numbers.items() if kind in own})
