"""Weight files: read lazily, tensor by tensor, and written in shards. Nothing is unpickled but pure weights."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from litft.rules import Move, Rule, exporting, importing

SHARD_BYTES = 5 * 10**9  # the size at which Hugging Face splits by default
SHOWN = 10  # names listed in one message at most


class Checkpoint:
    """The tensors of a model folder: `model.safetensors`, or its shards and index, or the same as `pytorch_model.bin`.

    Raises ValueError with a remedy for files that are missing, misnamed, truncated or not pure weights.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[Path, object] = {}
        self._file_of: dict[str, Path] = {}
        for path in _weight_files(folder):
            self._file_of |= dict.fromkeys(self._handle(path).keys(), path)

    @property
    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        return sorted(self._file_of)

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU, in the file's own dtype."""
        handle = self._handle(self._file_of[name])
        return handle[name] if isinstance(handle, dict) else handle.get_tensor(name)

    def meta(self, name: str) -> Tensor:
        """The tensor's shape and dtype as a meta tensor; reads no data."""
        handle = self._handle(self._file_of[name])
        if isinstance(handle, dict):
            return handle[name].to("meta")
        part = handle.get_slice(name)
        if part.get_dtype() not in _DTYPES:
            raise ValueError(f"{self._file_of[name]}: {name} is stored as {part.get_dtype()}, which holds no weights")
        return torch.empty(part.get_shape(), dtype=_DTYPES[part.get_dtype()], device="meta")

    def head(self, name: str, count: int) -> Tensor:
        """The first `count` numbers of a tensor, read without the rest."""
        handle = self._handle(self._file_of[name])
        if isinstance(handle, dict):
            return handle[name].flatten()[:count].clone()
        part = handle.get_slice(name)
        rows = part[: max(1, count // max(1, part.get_shape()[-1]))] if part.get_shape() else part[:]
        return rows.flatten()[:count]

    def _handle(self, path: Path):
        """The opened file: safetensors' own reader, or a memory-mapped dict of tensors."""
        if path not in self._open:
            self._open[path] = _open_pickle(path) if path.suffix == ".bin" else _open_safetensors(path)
        return self._open[path]


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_DTYPES |= {"BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


def _weight_files(folder: Path) -> list[Path]:
    for stem in ("model.safetensors", "pytorch_model.bin"):
        if (index := folder / f"{stem}.index.json").is_file():
            return _indexed_files(index)
        if (single := folder / stem).is_file():
            return [single]
    found = ", ".join(sorted(p.name for p in folder.iterdir())[:SHOWN]) or "nothing"
    remedy = "download the whole folder, or rename the file"
    if list(folder.glob("consolidated*.pth")) or list(folder.glob("consolidated*.safetensors")):
        remedy = "these are in the original layout of Meta or Mistral; get the folder in Hugging Face's format"
    raise ValueError(
        f"{folder} holds no weights: expected model.safetensors, model.safetensors.index.json, pytorch_model.bin or "
        f"pytorch_model.bin.index.json, found {found}; {remedy}"
    )


def _indexed_files(index: Path) -> list[Path]:
    """The shards that an index names; a name may not lead out of the folder."""
    try:
        shards = sorted({str(name) for name in json.loads(index.read_text("utf-8"))["weight_map"].values()})
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{index} is no valid index ({error!r}); download it again") from None
    if strays := [name for name in shards if Path(name).name != name]:
        raise ValueError(f"{index} names {strays[0]!r}, which is not a plain file name; do not trust this folder")
    if missing := [name for name in shards if not (index.parent / name).is_file()]:
        listed = ", ".join(missing[:SHOWN])
        raise ValueError(f"{index.parent} lacks {len(missing)} of {len(shards)} weight files: {listed}; download them")
    return [index.parent / name for name in shards]


def _open_safetensors(path: Path):
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        if path.open("rb").read(24).startswith(b"version https://git-lfs"):
            raise ValueError(f"{path} is a git-lfs pointer, not the weights; run `git lfs pull` in its folder") from None
        size = path.stat().st_size
        raise ValueError(
            f"{path} ({size:,} bytes) is truncated or no safetensors file ({error}); download it again"
        ) from None


def _open_pickle(path: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:  # torch raises many kinds here: UnpicklingError, RuntimeError, EOFError, ...
        reason = str(error).split("\n")[0][:200]
        raise ValueError(
            f"{path} is truncated or holds more than pure weights, and litft does not execute pickles ({reason}); "
            "get the model as safetensors"
        ) from None
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized
        for name, value in content.items()
    ):
        raise ValueError(f"{path} is not a dictionary of plain tensors; get the model as safetensors")
    return {name: value.detach() for name, value in content.items()}


def check_weights(model: nn.Module, checkpoint: Checkpoint, rules: list[Rule]) -> list[Move]:
    """The moves that fill `model` (on any device, meta too); ValueError listing missing, surplus, misshapen tensors."""
    moves, surplus = importing(rules, checkpoint.names)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found: dict[str, tuple[int, ...]] = {}
    problems = []
    for move in moves:
        tensors = [checkpoint.meta(name) for name in move.sources]
        odd = [f"{n}: stored as {t.dtype}" for n, t in zip(move.sources, tensors, strict=True) if not t.is_floating_point()]
        problems += [f"{line}, and litft reads floating-point weights" for line in odd]
        shapes = move.convert(tensors)
        found |= {name: tuple(tensor.shape) for name, tensor in zip(move.targets, shapes, strict=True)}
        surplus += [name for name, target in zip(move.sources, move.targets, strict=False) if target not in expected]
    theirs = {name: move.targets[0] for move in exporting(rules, expected) for name in move.sources}
    problems += [f"missing {theirs[name]}" for name in expected if name not in found]
    problems += [
        f"{theirs[name]}: expected shape {shape}, found {found[name]}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    problems += [f"surplus {name}" for name in surplus]
    if problems:
        rest = [f"... and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise ValueError(
            f"the weights in {checkpoint.folder} do not fit its config.json:\n  "
            + "\n  ".join(problems[:SHOWN] + rest)
            + "\nconfig.json and weights must come from the same model; download both again"
        )
    return moves


def load_weights(
    model: nn.Module, checkpoint: Checkpoint, rules: list[Rule], dtype: torch.dtype, device: torch.device | str
) -> None:
    """Fill a model built on the meta device, one tensor at a time, in `dtype` on `device`."""
    for move in check_weights(model, checkpoint, rules):
        tensors = move.convert([checkpoint.read(name) for name in move.sources])
        for name, tensor in zip(move.targets, tensors, strict=True):
            owner, _, leaf = name.rpartition(".")
            # clone: a tensor that still lies in the memory-mapped file would change with it
            tensor = tensor.to(device=device, dtype=dtype, copy=True)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))


def write_file(tensors: dict[str, Tensor], path: Path) -> None:
    """Write one safetensors file, readable by whoever may read its folder (safetensors itself makes it 0600)."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(0, str(error), str(path)) from None
    path.chmod(path.parent.stat().st_mode & 0o666)


class Entry(NamedTuple):
    """A tensor to be written: its name, its size, and how to make it when its shard's turn comes."""

    name: str
    bytes: int
    make: Callable[[], Tensor]


def model_entries(named: Iterable[tuple[str, Tensor]], rules: list[Rule]) -> list[Entry]:
    """Entries in the checkpoint's names for tensors in ours."""
    tensors = dict(named)
    entries = []
    for move in exporting(rules, tensors):
        converted = move.convert([tensors[name] for name in move.sources])
        for name, tensor in zip(move.targets, converted, strict=True):
            entries.append(Entry(name, tensor.nbytes, lambda tensor=tensor: tensor))
    return entries


def write_weights(folder: Path, entries: list[Entry], shard_bytes: int = SHARD_BYTES) -> None:
    """Write `model.safetensors`, or shards of at most `shard_bytes` with an index; memory stays at one shard."""
    shards: list[list[Entry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(e.bytes for e in shards[-1]) + entry.bytes > shard_bytes:
            shards.append([])
        shards[-1].append(entry)
    count = len(shards)
    names = [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)] if count > 1 else ["model.safetensors"]
    for file, shard in zip(names, shards, strict=True):
        tensors = {entry.name: entry.make().detach().cpu().contiguous() for entry in shard}
        write_file(tensors, folder / file)
    if count > 1:
        weight_map = {entry.name: file for file, shard in zip(names, shards, strict=True) for entry in shard}
        index = {"metadata": {"total_size": sum(entry.bytes for entry in entries)}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")
