"""Checkpoints to resume a run from: `checkpoints/step-NNNNNN/`, folders of
torch.distributed.checkpoint (DCP).

The format is the same for one process and for many. A folder is written under a temporary name,
synced to disk and renamed, so it becomes visible only when complete. Its progress.json has the
sizes and hashes of the other files, and its own hash, to detect later damage.
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
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    TensorStorageMetadata,
)
from torch.optim import Optimizer

from litft.atomic import replace_folder
from litft.distributed.process_group import CpuProcessGroup
from litft.run_dir import checkpoint_step, checkpoints
from litft.training.optimizers.make import averaged_weights
from litft.training.optimizers.rounded import StochasticRounding
from litft.training.output.checkpoint_index import IndexReader
from litft.training.output.file_hashes import (
    HashingWriter,
    check_hashes,
    collect_hashes,
    object_hash,
)
from litft.training.resume_identity import check_identity

_PROGRESS = "progress.json"
# the field of progress.json with the hash of all others
_OWN_HASH = "hash"
# what reading a damaged file of JSON, and its fields, may raise
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
# prefix of the keys of trained parameters
_PARAMETERS = "parameters."
# and of the optimizer's state
_OPTIMIZER = "optimizer."

# DCP warns whenever there is only one process
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


class DamagedCheckpoint(ValueError):
    """A checkpoint that cannot be read."""

    def __init__(self, folder: Path, error: BaseException | str) -> None:
        if isinstance(error, str):
            reason = error
        else:
            reason = f"{type(error).__name__}: {error}".split("\n")[0][:200]
        super().__init__(f"{folder} is damaged ({reason})")


def newest(run: Path) -> Path | None:
    """Return the newest complete checkpoint of a run; None if it has none."""
    return next(reversed(checkpoints(run)), None)


class Saver:
    """Writes a run's checkpoints, one at a time, while training continues.

    Every process takes part with its own shards.
    """

    def __init__(
        self, run: Path, is_writer: bool, group: distributed.ProcessGroup | None
    ) -> None:
        self.run = run
        self.is_writer = is_writer
        self.group = group
        self.writing_step: int | None = None  # the step whose state is being written
        self.saving: Future | None = None  # its end, if it is written in the background
        # the step of the last complete checkpoint
        self.saved_step: int | None = None

    def begin(
        self,
        step: int,
        parameters: dict[str, nn.Parameter],
        optimizer: Optimizer,
        progress: dict[str, Any],
        when_written: Callable[[], None],
        in_background: bool = True,
    ) -> None:
        """Start to write the state after `step` steps.

        Raises OSError if it, or the previous one, cannot be written.

        when_written: called in the first process once the checkpoint is complete. in_background:
        write a copy of the state while training continues; otherwise return when the checkpoint is
        complete.
        """
        self.finish()

        # remains of an interrupted save must be gone before any process writes
        self.partial = self.run / "checkpoints" / f"step-{step:06d}.partial"
        if self.is_writer:
            shutil.rmtree(self.partial, ignore_errors=True)
        if self.group is not None:
            distributed.barrier(self.group)
        self.writing_step = step
        self.when_written = when_written

        # the numbers are copied now: training goes on while the tensors are written
        self.progress = {
            "step": step,
            **progress,
            "optimizer": _scalars(parameters, optimizer),
        }
        with averaged_weights(optimizer), self._delete_on_error():
            # with one thread: DCP prints errors of additional threads instead of raising them
            writer = HashingWriter(self.partial)
            state = _state(parameters, optimizer)
            if in_background:
                saving = state_dict_saver.async_save(
                    state, storage_writer=writer, process_group=self.group
                )
                assert isinstance(saving, Future)  # only a stager makes it something else
                self.saving = saving
            else:
                state_dict_saver.save(
                    state, storage_writer=writer, process_group=self.group
                )
                self.saving = None
        if not in_background:
            self.finish()

    def poll(self) -> None:
        """Finish the checkpoint if it is written; do not wait for it."""
        if self.writing_step is not None and self.saving is not None and self.saving.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, and give it its final name."""
        if self.writing_step is None:
            return
        step = self.writing_step
        # first: an error below must not make the next `begin` wait for this checkpoint again
        self.writing_step = None
        with self._delete_on_error():
            if self.saving is not None:
                self.saving.result()
            if self.is_writer:
                # last of all files, since it has the hashes of the others
                hashes = collect_hashes(self.partial)
                sizes = {path.name: path.stat().st_size for path in self.partial.iterdir()}
                progress = self.progress | {"files": sizes, "hashes": hashes}
                progress[_OWN_HASH] = object_hash(progress)
                (self.partial / _PROGRESS).write_text(json.dumps(progress) + "\n", "utf-8")
                replace_folder(self.partial, self.partial.with_suffix(""))
        self.saved_step = step
        if self.is_writer:
            self.when_written()

    @contextmanager
    def _delete_on_error(self) -> Iterator[None]:
        """Within the context, an OSError deletes the incomplete checkpoint, which may free space on
        a full disk."""
        try:
            with _plain_errors(self.partial):
                yield
        except OSError:
            if self.is_writer:
                shutil.rmtree(self.partial, ignore_errors=True)
            raise


def read_progress(folder: Path) -> dict[str, Any]:
    """Return progress.json, `step` included.

    Raises DamagedCheckpoint if it is invalid, or a file's size does not match.
    """
    # the file may be damaged in any way, so every field that is used later is checked
    try:
        progress = json.loads((folder / _PROGRESS).read_text("utf-8"))
        if progress["step"] != checkpoint_step(folder):
            raise ValueError(f"step {progress['step']!r}")
        for name, types in (
            ("samples", int),
            ("elapsed", (int, float)),
            ("identity", dict),
            ("optimizer", dict),
        ):
            if not isinstance(progress[name], types):
                raise ValueError(f"{name} {str(progress[name])[:40]!r}")
        # checkpoints before November 2026 have none
        own_hash = progress.pop(_OWN_HASH, None)
        if own_hash is not None and own_hash != object_hash(progress):
            raise ValueError(
                f"{_PROGRESS} has changed since it was written: its hash is another one"
            )
        for name, size in progress["files"].items():
            # the last part of a name alone: it must not lead out of the folder
            actual_size = (folder / Path(name).name).stat().st_size
            if actual_size != size:
                raise ValueError(f"{name} has {actual_size:,} bytes, not {size:,}")
        return progress
    except _UNREADABLE as error:
        raise DamagedCheckpoint(folder, error) from None


def check_files(
    folder: Path, progress: dict[str, Any], cpu_group: CpuProcessGroup | None = None
) -> None:
    """Read all files once and compare their hashes.

    Each process reads a part of them; all have the same result.

    cpu_group: the processes; None: this one alone. Raises DamagedCheckpoint.
    """
    hashes = progress.get("hashes", {})
    names = sorted(hashes)
    rank = 0
    processes = 1

    # each process reads its part of the files
    if cpu_group is not None and cpu_group.processes > 1:
        rank = distributed.get_rank()
        processes = cpu_group.processes

    # all processes must raise, or none: the others would wait for a process that has raised
    problem = ""
    try:
        check_hashes(folder, hashes, names[rank::processes])
    except (OSError, ValueError) as error:
        problem = str(error)
    problems = cpu_group.all_gather(problem) if cpu_group is not None else [problem]
    for found in problems:
        if found:
            raise DamagedCheckpoint(folder, found)


def read_parameters(folder: Path) -> dict[str, Tensor]:
    """Read only the trained parameters, by name, onto the CPU.

    Raises DamagedCheckpoint if they cannot be read.
    """
    check_files(folder, read_progress(folder))
    reader = IndexReader(folder)
    state = {}
    for key, entry in _index(reader).items():
        if key.startswith(_PARAMETERS):
            state[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    try:
        with _plain_errors(folder):
            state_dict_loader.load(state, storage_reader=reader)
    except OSError as error:
        raise DamagedCheckpoint(folder, error) from None
    return {key.removeprefix(_PARAMETERS): value for key, value in state.items()}


def _index(reader: IndexReader) -> dict[str, Any]:
    """Return the metadata of each tensor from a checkpoint's index."""
    try:
        return reader.read_metadata().state_dict_metadata
    except (
        OSError,
        EOFError,
        pickle.UnpicklingError,
        AttributeError,
        TypeError,
        ValueError,
        IndexError,
        KeyError,
    ) as error:
        raise DamagedCheckpoint(Path(reader.path), error) from None


def check_resumable(run: Path, identity: dict[str, Any]) -> None:
    """Raise ValueError if `restore_newest` would refuse the newest readable checkpoint; nothing is
    restored."""
    for folder in reversed(checkpoints(run)):
        try:
            return check_identity(folder, read_progress(folder), identity)
        except DamagedCheckpoint:
            continue


def restore_newest(
    run: Path,
    identity: dict[str, Any],
    parameters: dict[str, nn.Parameter],
    optimizer: Optimizer,
    cpu_group: CpuProcessGroup | None = None,
) -> tuple[dict[str, Any] | None, list[str]]:
    """Restore parameters and optimizer in place from the newest readable checkpoint, with all
    processes.

    Returns its progress.json (None if the run has no checkpoint), and the problems of newer
    checkpoints. Raises ValueError if the checkpoint's identity differs from `identity`, or if all
    checkpoints are damaged.
    """
    damaged: list[str] = []
    for folder in reversed(checkpoints(run)):
        try:
            progress = read_progress(folder)
            check_identity(folder, progress, identity)
            # reads all files, so it comes after the quick checks
            check_files(folder, progress, cpu_group)
            _restore(folder, progress, parameters, optimizer)
            return progress, damaged
        except DamagedCheckpoint as error:
            damaged.append(str(error))
    if damaged:
        raise ValueError(
            f"{'; '.join(damaged)}: no checkpoint can be resumed; --overwrite starts again from "
            "step 0"
        )
    return None, []


def _restore(
    folder: Path,
    progress: dict[str, Any],
    parameters: dict[str, nn.Parameter],
    optimizer: Optimizer,
) -> None:
    """Restore in place.

    Raises ValueError if the run had other parameters, DamagedCheckpoint if it cannot be read.
    """
    reader = IndexReader(folder)
    index = _index(reader)
    saved_shapes = {}
    for key, entry in index.items():
        if isinstance(entry, TensorStorageMetadata):
            saved_shapes[key] = tuple(entry.size)
        else:
            saved_shapes[key] = None

    # DCP fills tensors in place, so the optimizer's state must exist before; a run whose updates
    # were all left out has none, except for the weights that schedule-free keeps beside its average
    state_keys = [key for key in saved_shapes if key.startswith(_OPTIMIZER)]
    if any(not key.endswith(".stepped") for key in state_keys):
        _init_state(optimizer)
    with averaged_weights(optimizer):
        state = _state(parameters, optimizer)
        shapes = {key: tuple(value.shape) for key, value in state.items()}
        # before anything is overwritten
        if shapes != saved_shapes:
            changed = []
            for key in shapes.keys() | saved_shapes.keys():
                if shapes.get(key) != saved_shapes.get(key):
                    changed.append(key)
            first = min(changed)
            raise ValueError(
                f"{folder} was saved by a run with other trained parameters ({first}: "
                f"{saved_shapes.get(first)} saved, {shapes.get(first)} now); resume with "
                "the run's original flags"
            )

        # the tensors, and then the numbers beside them
        try:
            with _plain_errors(folder):
                state_dict_loader.load(state, storage_reader=reader)
        except OSError as error:
            raise DamagedCheckpoint(folder, error) from None
        try:
            _set_scalars(progress["optimizer"], parameters, optimizer)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint(folder, error) from None


def prune(run: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and the remains of interrupted saves."""
    _delete(run, checkpoints(run)[:-keep])


def delete_after(run: Path, step: int) -> None:
    """Delete the checkpoints after `step`; they are damaged, otherwise the run would continue from
    them."""
    later = []
    for folder in checkpoints(run):
        if checkpoint_step(folder) > step:
            later.append(folder)
    _delete(run, later)


def _delete(run: Path, folders: list[Path]) -> None:
    # an incomplete checkpoint must not have a final name
    for folder in folders:
        folder.rename(folder.with_name(folder.name + ".partial"))
    for folder in (run / "checkpoints").glob("*.partial"):
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _plain_errors(folder: Path) -> Iterator[None]:
    """Within the context, replace DCP's exception by an OSError or KeyboardInterrupt with the
    original cause."""
    try:
        yield
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        # a Ctrl-C in any process is not an error of the disk
        for cause in causes:
            interrupt = _interrupt_before(cause)
            if interrupt is not None:
                raise KeyboardInterrupt(*interrupt.args) from None
        raise OSError(0, str(causes[0]).split("\n")[0], str(folder)) from None


def _interrupt_before(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the Ctrl-C that led to an error: torch's file writer raises one of its own when it is
    closed too early."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def _init_state(optimizer: Optimizer) -> None:
    """Create a new optimizer's state tensors by a step with zero gradients and learning rate, which
    changes no weight."""
    # weight decay is multiplied by the learning rate, so a rate of zero changes nothing
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        if not isinstance(group["lr"], Tensor):
            group["lr"] = 0.0
        else:
            group["lr"] = torch.zeros_like(group["lr"])
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _state(parameters: dict[str, nn.Parameter], optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the tensors of parameters and optimizer under flat names; loading fills them in
    place."""
    state = {
        f"{_PARAMETERS}{name}": parameter.detach() for name, parameter in parameters.items()
    }
    for name, parameter in parameters.items():
        for kind, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor):
                state[f"{_OPTIMIZER}{name}.{kind}"] = value
    return state


def _scalars(parameters: dict[str, nn.Parameter], optimizer: Optimizer) -> dict[str, Any]:
    """Return the Python numbers in the optimizer's groups and in each parameter's state (step
    counts, weight sums)."""
    of_parameters = {}
    for name, parameter in parameters.items():
        of_parameters[name] = _only_numbers(optimizer.state[parameter])
    of_groups = list(map(_only_numbers, optimizer.param_groups))
    return {"groups": of_groups, "parameters": of_parameters}


def _only_numbers(values: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _set_scalars(
    saved: dict[str, Any], parameters: dict[str, nn.Parameter], optimizer: Optimizer
) -> None:
    """Restore the numbers that `_scalars` returned."""
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
        # another layout of the optimizer may have numbers of its own, which follow from the flags
        group.update(
            {name: values[name] for name in _only_numbers(group) if name in values}
        )
    for name, parameter in parameters.items():
        state = optimizer.state[parameter]
        numbers = {kind: saved["parameters"][name][kind] for kind in _only_numbers(state)}
        state.update(numbers)
        # frozen parameters have no inner optimizer
        if isinstance(optimizer, StochasticRounding) and parameter in optimizer.inner:
            # for a sharded parameter, `state` is a copy
            # that shares the tensors, but not the numbers
            for inner_state in optimizer.inner[parameter].state.values():
                for kind, value in numbers.items():
                    if kind in inner_state:
                        inner_state[kind] = value
