"""Run state to resume from: `checkpoints/step-NNNNNN/`, one torch.distributed.checkpoint folder in our names.

The same for one process or many. A folder under its final name is complete: it is written under another and renamed.
"""

import json
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
from torch.optim import Optimizer

_PROGRESS = "progress.json"


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
    """Write the state after `step` steps; every process takes part."""
    folder = run / "checkpoints" / f"step-{step:06d}"
    partial = folder.with_name(folder.name + ".partial")
    if fabric.global_rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    fabric.barrier()
    with _one_process_is_meant():
        dcp.save(_state(parameters, optimizer), checkpoint_id=partial)
    if fabric.global_rank == 0:
        (partial / _PROGRESS).write_text(json.dumps({"step": step, **progress}) + "\n", "utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    fabric.barrier()


def restore(folder: Path, parameters: dict[str, nn.Parameter], optimizer: Optimizer) -> dict[str, Any]:
    """Fill parameters and optimizer in place; returns the progress. ValueError where the run had other parameters."""
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    _begin(optimizer)
    state = _state(parameters, optimizer)
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    found = {key: tuple(value.size) for key, value in stored.items()}
    if shapes != found:
        odd = sorted(key for key in shapes.keys() | found.keys() if shapes.get(key) != found.get(key))
        raise ValueError(
            f"{folder} was saved by a run with other trained parameters ({odd[0]}: {found.get(odd[0])} there, "
            f"{shapes.get(odd[0])} here); resume with the flags the run began with"
        )
    with _one_process_is_meant():
        dcp.load(state, checkpoint_id=folder)
    return json.loads((folder / _PROGRESS).read_text("utf-8"))


def prune(fabric: Fabric, run: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and what a killed save left behind."""
    if fabric.global_rank != 0:
        return
    folders = sorted((run / "checkpoints").glob("step-" + "[0-9]" * 6))
    for folder in [*folders[:-keep], *(run / "checkpoints").glob("*.partial")]:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Keep torch from warning that a run on one device is no distributed one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


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
    state = {f"parameters.{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        for kind, value in optimizer.state[parameter].items():
            state[f"optimizer.{name}.{kind}"] = value
    return state
