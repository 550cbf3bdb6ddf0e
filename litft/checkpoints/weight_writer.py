"""Write weights as safetensors files, in shards of which one at a time is in memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 5 * 10**9  # Hugging Face's default shard size


def write_file(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file with the read and write permissions of its folder (safetensors
    itself uses 0600)."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(0, str(error), str(path)) from None
    path.chmod(path.parent.stat().st_mode & 0o666)


class LazyTensor(NamedTuple):
    """A tensor to be written: name, meta tensor, and a function that computes it when its shard is
    written."""

    name: str
    like: Tensor  # on the meta device
    make: Callable[[], Tensor]


def write_weights(
    folder: Path | None, entries: list[LazyTensor], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write `model.safetensors`, or shards of at most `shard_bytes` with an index; only one shard
    is in memory.

    folder: None on ranks that only join the all-gathers of `make`; they discard each tensor.
    """
    if folder is None:
        for entry in entries:
            entry.make()
        return
    # a tensor that does not fit into the last shard begins a new one
    shards: list[list[LazyTensor]] = [[]]
    for entry in entries:
        if (
            shards[-1]
            and sum(previous.like.nbytes for previous in shards[-1]) + entry.like.nbytes
            > shard_bytes
        ):
            shards.append([])
        shards[-1].append(entry)
    count = len(shards)
    if count > 1:
        names = [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    else:
        names = ["model.safetensors"]

    # one shard after the other, so that only its own tensors are in memory
    for file, shard in zip(names, shards, strict=True):
        tensors = {entry.name: entry.make().detach().cpu().contiguous() for entry in shard}
        write_file(tensors, folder / file)
    if count > 1:
        weight_map = {}
        for file, shard in zip(names, shards, strict=True):
            for entry in shard:
                weight_map[entry.name] = file
        index = {
            "metadata": {"total_size": sum(entry.like.nbytes for entry in entries)},
            "weight_map": weight_map,
        }
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2) + "\n", "utf-8"
        )
