"""Weight files: read lazily, tensor by tensor, and written in shards. Nothing is unpickled but pure weights."""

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from litft.checkpoints.conversion import Rule, TensorMapping, mappings_from_hf, mappings_to_hf
from litft.model.placement import UNSHARDED, WeightPlacement
from litft.model.quantization import STATES, STATISTICS, QuantizedModule, QuantizedTensor, is_quantizable, stored_shape

SHARD_BYTES = 5 * 10**9  # the size at which Hugging Face splits by default
MAPPED = 2**28  # bytes read of a file before it is opened anew
SHOWN = 10  # names listed in one message at most


class Checkpoint:
    """The tensors of a model folder: `model.safetensors`, or its shards and index, or the same as `pytorch_model.bin`.

    What transformers saved quantized by bitsandbytes stands here as the weights that its bits stand for. Raises ValueError
    with a remedy for files that are missing, misnamed, truncated or not pure weights.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._current: tuple[Path | None, Any] = (None, None)
        self._seen = 0  # bytes read of the file that is open
        self._file_of: dict[str, Path] = {}
        self._metas: dict[str, Tensor | str] = {}
        for path in _weight_files(folder):
            metas = _metas(_open(path))
            self._file_of |= dict.fromkeys(metas, path)
            self._metas |= metas
        self._packed = self._find_packed()

    @property
    def names(self) -> list[str]:
        """Every tensor's name, sorted; without the statistics of packed ones."""
        hidden = {part for parts in self._packed.values() for part in parts.values()} - self._packed.keys()
        return sorted(self._file_of.keys() - hidden)

    @property
    def is_quantized(self) -> bool:
        """Whether some of its tensors are packed bits."""
        return bool(self._packed)

    def meta(self, name: str) -> Tensor:
        """The tensor's shape and dtype as a meta tensor; reads no data."""
        meta = self._metas[name]
        if isinstance(meta, str):
            raise ValueError(f"{self._file_of[name]}: {name} is stored as {meta}, which holds no weights")
        if name not in self._packed:
            return meta
        state = next((part for end, part in self._packed[name].items() if end in STATES), None)
        with self._bits_of(name):
            return torch.empty(stored_shape(self._stored(state)) if state else meta.shape, device="meta")

    def read(self, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        """The tensor, on the CPU, in the file's own dtype; of a packed one what it stands for, in fp32.

        part: this much of it, for which no more is read. It may reach beyond the tensor's end.
        """
        return self.packed(name).dequantize()[part] if name in self._packed else self._stored(name, part)

    def is_packed(self, name: str) -> bool:
        """Whether a tensor is stored as packed bits."""
        return name in self._packed

    def packed(self, name: str) -> QuantizedTensor | None:
        """The bits of a tensor that is stored so."""
        if not self.is_packed(name):
            return None
        with self._bits_of(name):
            return QuantizedTensor.from_state({end: self._stored(part) for end, part in self._packed[name].items()})

    @contextmanager
    def _bits_of(self, name: str) -> Iterator[None]:
        """Inside, whatever is wrong with packed bits names the tensor."""
        try:
            yield
        except (KeyError, TypeError, AttributeError, AssertionError, ValueError) as error:
            reason = f"{name} is packed in a way that bitsandbytes does not know ({error or type(error).__name__})"
            raise ValueError(f"{self._file_of[name]}: {reason}; get the folder again, or its plain weights") from None

    def _find_packed(self) -> dict[str, dict[str, str]]:
        """The weights that are packed bits: the names of all their parts, by the end that bitsandbytes gives them."""
        found = {}
        for name in self._file_of:
            stem, _, _ = name.rpartition(".weight.") if ".weight." in name else name.rpartition(".")
            end = name.removeprefix(f"{stem}.")
            if end in (*STATES, *STATISTICS) and f"{stem}.weight" in self._file_of:
                found.setdefault(f"{stem}.weight", {"weight": f"{stem}.weight"})[end] = name
        return found

    def _stored(self, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        handle, meta = self._opened(self._file_of[name]), self._metas[name]
        if isinstance(handle, dict):
            tensor = handle[name][part]
        elif isinstance(meta, str) or meta[part].shape == meta.shape:
            tensor = handle.get_tensor(name)
        else:
            within = tuple(slice(p.start, min(p.stop, size)) for p, size in zip(part, meta.shape, strict=True))
            tensor = handle.get_slice(name)[within] if meta[part].numel() else torch.empty_like(meta[part], device="cpu")
        self._seen += tensor.nbytes
        return tensor

    def head(self, name: str, count: int) -> Tensor:
        """The first `count` numbers of a tensor, read without the rest."""
        handle = self._opened(self._file_of[name])
        if isinstance(handle, dict):
            return handle[name].flatten()[:count].clone()
        part = handle.get_slice(name)
        rows = part[: max(1, count // max(1, part.get_shape()[-1]))] if part.get_shape() else part[:]
        return rows.flatten()[:count]

    def _opened(self, path: Path):
        """The file, of which one at a time is open: what has been read of a mapped file counts as memory until it is not."""
        if self._current[0] != path or self._seen > MAPPED:
            self._current = (path, None)  # closed before the next is opened
            self._current, self._seen = (path, _open(path)), 0
        return self._current[1]


def _open(path: Path):
    """safetensors' own reader, or a memory-mapped dict of tensors."""
    return _open_pickle(path) if path.suffix == ".bin" else _open_safetensors(path)


def _metas(handle) -> dict[str, Tensor | str]:
    """Every tensor of an opened file without its data; of a dtype that torch lacks, its name."""
    if isinstance(handle, dict):
        return {name: tensor.to("meta") for name, tensor in handle.items()}
    slices = ((name, handle.get_slice(name)) for name in handle.keys())  # noqa: SIM118 (no dict)
    kinds = ((name, part.get_shape(), part.get_dtype()) for name, part in slices)
    return {n: torch.empty(shape, dtype=_DTYPES[k], device="meta") if k in _DTYPES else k for n, shape, k in kinds}


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
    if not shards:
        raise ValueError(f"{index} names no files; download it again")
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


def check_weights(model: nn.Module, checkpoint: Checkpoint, rules: list[Rule]) -> list[TensorMapping]:
    """The moves that fill `model` (on any device, meta too); ValueError listing missing, surplus, misshapen tensors."""
    names = set(checkpoint.names)
    mappings, surplus = mappings_from_hf(rules, checkpoint.names)
    expected = {name: torch.empty_like(parameter, device="meta") for name, parameter in model.named_parameters()}
    problems, filled = [], set()
    for mapping in mappings:
        if any(target not in expected or target in filled for target in mapping.targets):
            surplus += [name for name in mapping.sources if name in names]
            continue
        filled |= set(mapping.targets)
        wanted = mapping.revert([expected[target] for target in mapping.targets])
        for name, like in zip(mapping.sources, wanted, strict=True):
            problems += _tensor_problems(checkpoint, name, like) if name in names else [f"missing {name}"]
    lacking = [name for name in expected if name not in filled]
    problems += [f"missing {name}" for mapping in mappings_to_hf(rules, lacking) for name in mapping.targets]
    problems += [f"surplus {name}" for name in surplus]
    if problems:
        rest = [f"... and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise ValueError(
            f"the weights in {checkpoint.folder} do not fit its config.json:\n  "
            + "\n  ".join(problems[:SHOWN] + rest)
            + "\nconfig.json and weights must come from the same model; download both again"
        )
    return mappings


def _tensor_problems(checkpoint: Checkpoint, name: str, like: Tensor) -> list[str]:
    found, shape = checkpoint.meta(name), tuple(like.shape)
    if found.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return [f"{name}: stored as {found.dtype}, which is quantized; get the folder in bf16"]
    if not like.is_floating_point() and found.dtype != like.dtype:
        return [f"{name}: stored as {found.dtype}, and litft reads {like.dtype} here"]
    if found.is_floating_point() != like.is_floating_point():
        return [f"{name}: stored as {found.dtype}, and litft reads floating-point weights"]
    return [] if tuple(found.shape) == shape else [f"{name}: expected shape {shape}, found {tuple(found.shape)}"]


def packed_modules(
    model: nn.Module, checkpoint: Checkpoint, mappings: list[TensorMapping], plain: Collection[str] = ()
) -> Iterator[str]:
    """The modules whose weights are kept packed: not those in `plain`, nor what a packed folder has left as it is."""
    for mapping in mappings:
        if checkpoint.is_quantized and not any(map(checkpoint.is_packed, mapping.sources)):
            continue
        owners = (name.removesuffix(".weight") for name in mapping.targets if is_quantizable(name, model))
        yield from (owner for owner in owners if owner not in plain)


def load_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    mappings: list[TensorMapping],
    dtype: torch.dtype,
    placement: WeightPlacement = UNSHARDED,
) -> None:
    """Fill a network that has memory, one tensor at a time; each process reads what it holds, where a move allows that.

    dtype: what weights are made before they are packed. Rows that the network has beyond the folder's stay as they are.
    """
    for mapping in mappings:
        owners = [model.get_submodule(name.rpartition(".")[0]) for name in mapping.targets]
        packs = [
            isinstance(o, QuantizedModule) and n.endswith(".weight") for o, n in zip(owners, mapping.targets, strict=True)
        ]
        device = model.get_parameter(mapping.targets[0]).device
        if mapping.is_plain and packs[0] and (bits := checkpoint.packed(mapping.sources[0])):
            owners[0].fill(bits.to(device))
        elif len(owners) == 1 and not packs[0]:
            name = mapping.targets[0]
            placement.copy_in(name, model.get_parameter(name), partial(_read_part, checkpoint, mapping))
        else:
            tensors = mapping.convert([checkpoint.read(name) for name in mapping.sources])
            for name, owner, packed, tensor in zip(mapping.targets, owners, packs, tensors, strict=True):
                if packed:
                    owner.fill(
                        QuantizedTensor.quantize(placement.cut(name, tensor).to(device, dtype).flatten(0, -2), owner.kind)
                    )
                else:
                    placement.copy_in(name, model.get_parameter(name), tensor.__getitem__)


def _read_part(checkpoint: Checkpoint, mapping: TensorMapping, wanted: tuple[slice, ...]) -> Tensor:
    """A part of the one tensor that a move makes."""
    if mapping.is_plain:
        return checkpoint.read(mapping.sources[0], wanted)
    if mapping.stacks:
        sources = mapping.sources[wanted[0]]
        return mapping.convert([checkpoint.read(name, wanted[1:]) for name in sources])[0]
    return mapping.convert([checkpoint.read(name) for name in mapping.sources])[0][wanted]


def write_file(tensors: dict[str, Tensor], path: Path) -> None:
    """Write one safetensors file, readable by whoever may read its folder (safetensors itself makes it 0600)."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(0, str(error), str(path)) from None
    path.chmod(path.parent.stat().st_mode & 0o666)


class LazyTensor(NamedTuple):
    """A tensor to be written: its name, its shape and dtype, and how to make it when its shard's turn comes."""

    name: str
    like: Tensor  # on the meta device
    make: Callable[[], Tensor]


def write_weights(folder: Path | None, entries: list[LazyTensor], shard_bytes: int = SHARD_BYTES) -> None:
    """Write `model.safetensors`, or shards of at most `shard_bytes` with an index; memory stays at one shard.

    folder: None to make each tensor, and forget it.
    """
    if folder is None:
        for entry in entries:
            entry.make()
        return
    shards: list[list[LazyTensor]] = [[]]
    for entry in entries:
        if shards[-1] and sum(e.like.nbytes for e in shards[-1]) + entry.like.nbytes > shard_bytes:
            shards.append([])
        shards[-1].append(entry)
    count = len(shards)
    names = [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)] if count > 1 else ["model.safetensors"]
    for file, shard in zip(names, shards, strict=True):
        tensors = {entry.name: entry.make().detach().cpu().contiguous() for entry in shard}
        write_file(tensors, folder / file)
    if count > 1:
        weight_map = {entry.name: file for file, shard in zip(names, shards, strict=True) for entry in shard}
        index = {"metadata": {"total_size": sum(entry.like.nbytes for entry in entries)}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")
