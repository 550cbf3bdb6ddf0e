"""Read weight files lazily, one tensor at a time.

Pickle files may only contain tensors.
"""

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from litft.checkpoints.conversion import TensorMapping, mappings_from_hf, mappings_to_hf
from litft.checkpoints.rules import Rule
from litft.checkpoints.stored_formats import find_stored_weights
from litft.model.placement import SINGLE_DEVICE, WeightPlacement
from litft.model.quantization import (
    STATES,
    STATISTICS,
    QuantizedModule,
    QuantizedTensor,
    is_quantizable,
    stored_shape,
)

# bytes read from a file before it is reopened
MAX_MAPPED_BYTES = 2**28
ROWS_AT_ONCE = 8192  # of two matrices that are compared
MAX_LISTED = 10  # names listed in one message
# of queries, keys, values and outputs, for inference with a cache in 8 bits
SCALES_OF_CACHES = (".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".output_scale")


class Checkpoint:
    """The tensors of a model folder: `model.safetensors` or `pytorch_model.bin`, as a single file
    or shards with an index.

    Quantized weights (bitsandbytes, FP8, GPTQ, AWQ) appear under their names as dequantized
    tensors. Raises ValueError with a remedy if files are missing, misnamed, truncated or contain
    more than tensors.
    """

    def __init__(self, folder: Path, quantization: dict[str, Any] | None = None) -> None:
        """quantization: quantization_config of config.json."""
        self.folder = folder
        self._open_handle: tuple[Path | None, Any] = (None, None)
        self._bytes_read = 0  # from the open file
        self._file_of: dict[str, Path] = {}
        self._metas: dict[str, Tensor | str] = {}
        for path in _weight_files(folder):
            metas = _read_metas(_open_file(path))
            self._file_of |= dict.fromkeys(metas, path)
            self._metas |= metas
        self._packed = self._find_packed()
        self._stored = find_stored_weights(self._metas, quantization or {})

    @property
    def names(self) -> list[str]:
        """The sorted names of all tensors, without what quantized weights are stored as."""
        # scales and the like belong to a quantized weight, and are no tensors of their own
        statistics = set()
        for parts in self._packed.values():
            statistics.update(parts.values())
        statistics -= self._packed.keys()
        stored_parts = set()
        for weight in self._stored.values():
            stored_parts.update(weight.parts.values())
        return sorted(
            (self._file_of.keys() - statistics - stored_parts) | self._stored.keys()
        )

    config_name = "config.json"  # what says which tensors there must be
    mismatch_remedy = (
        "config.json and weights must come from the same model; download both again, or choose "
        "another --family"
    )

    @property
    def files(self) -> list[Path]:
        """The files that have tensors."""
        return sorted(set(self._file_of.values()))

    @property
    def is_quantized(self) -> bool:
        """Whether some weights are stored quantized (packed by bitsandbytes)."""
        return bool(self._packed)

    @property
    def has_stored_formats(self) -> bool:
        """Whether some weights are stored in FP8 or in packed integers, and dequantized on
        reading."""
        return bool(self._stored)

    @property
    def packed_names(self) -> Collection[str]:
        """The weights that are stored quantized (packed by bitsandbytes)."""
        return self._packed.keys()

    def meta(self, name: str) -> Tensor:
        """Return a meta tensor with the shape and dtype of the (dequantized) tensor, without
        reading its data."""
        stored = self._stored.get(name)
        if stored:
            return torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        meta = self._metas[name]
        if isinstance(meta, str):
            raise ValueError(
                f"{self._file_of[name]}: {name} is stored as {meta}, not a weight dtype; download "
                "it in bf16"
            )
        if name not in self._packed:
            return meta
        # a 4-bit weight is stored flat, and its state has the shape
        shape = meta.shape
        with self._translate_errors(name):
            for suffix, stored_name in self._packed[name].items():
                if suffix in STATES:
                    shape = stored_shape(self._read_stored(stored_name))
                    break
            return torch.empty(shape, device="meta")

    def read(self, name: str, slices: tuple[slice, ...] = ()) -> Tensor:
        """Return the tensor on the CPU in the file's dtype; packed weights are dequantized to fp32.

        slices: read only this part of the tensor. Slices may extend beyond its end.
        """
        stored = self._stored.get(name)
        if stored:
            return stored.dequantize(
                {suffix: self._read_stored(part) for suffix, part in stored.parts.items()}
            )[slices]
        if name in self._packed:
            return self._read_packed(name).dequantize()[slices]
        return self._read_stored(name, slices)

    def is_stored_in_fp32(self, name: str) -> bool:
        """Whether a tensor itself, not the number that it is dequantized to, is fp32."""
        if name in self._stored or name in self._packed:
            return False
        return self.meta(name).dtype == torch.float32

    def is_packed(self, name: str) -> bool:
        """Whether a weight is stored quantized."""
        return name in self._packed

    def packed(self, name: str) -> QuantizedTensor | None:
        """Return the quantized tensor of a packed weight, or None for other tensors."""
        if not self.is_packed(name):
            return None
        return self._read_packed(name)

    def _read_packed(self, name: str) -> QuantizedTensor:
        """Return the quantized tensor of a packed weight."""
        with self._translate_errors(name):
            parts = {}
            for suffix, stored_name in self._packed[name].items():
                parts[suffix] = self._read_stored(stored_name)
            return QuantizedTensor.from_state(parts)

    @contextmanager
    def _translate_errors(self, name: str) -> Iterator[None]:
        """Within the context, errors about packed data become ValueErrors that name the tensor."""
        try:
            yield
        except (KeyError, TypeError, AttributeError, AssertionError, ValueError) as error:
            reason = (
                f"{name} is quantized in a format unknown to bitsandbytes "
                f"({error or type(error).__name__})"
            )
            raise ValueError(
                f"{self._file_of[name]}: {reason}; download the folder again, or unquantized "
                "weights"
            ) from None

    def _find_packed(self) -> dict[str, dict[str, str]]:
        """Return the packed weights; for each one the names of its stored tensors by bitsandbytes'
        suffixes."""
        packed = {}
        for name in self._file_of:
            # bitsandbytes appends suffixes to the weight's name (4 bits) or to the module's (int8)
            stem, _, _ = (
                name.rpartition(".weight.") if ".weight." in name else name.rpartition(".")
            )
            suffix = name.removeprefix(f"{stem}.")
            if suffix in (*STATES, *STATISTICS) and f"{stem}.weight" in self._file_of:
                parts = packed.setdefault(f"{stem}.weight", {"weight": f"{stem}.weight"})
                parts[suffix] = name
        return packed

    def _read_stored(self, name: str, slices: tuple[slice, ...] = ()) -> Tensor:
        handle = self._handle_of(self._file_of[name])
        meta = self._metas[name]
        # the tensors of a pickle file are memory-mapped, so a slice reads no more than itself
        if isinstance(handle, dict):
            tensor = handle[name][slices]
        elif isinstance(meta, str) or meta[slices].shape == meta.shape:
            tensor = handle.get_tensor(name)
        else:
            # safetensors accepts no slices beyond the end
            clipped = []
            for part, size in zip(slices, meta.shape, strict=True):
                clipped.append(slice(part.start, min(part.stop, size)))
            if meta[slices].numel():
                tensor = handle.get_slice(name)[tuple(clipped)]
            else:
                tensor = torch.empty_like(meta[slices], device="cpu")
        self._bytes_read += tensor.nbytes
        return tensor

    def equal(self, name: str, other: str) -> bool:
        """Return whether two matrices of the same shape have the same values.

        They are read in parts.
        """
        num_rows, num_columns = self.meta(name).shape
        for start in range(0, num_rows, ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE), slice(0, num_columns)
            if not torch.equal(
                self.read(name, part).float(), self.read(other, part).float()
            ):
                return False
        return True

    def sample(self, name: str, places: int, count: int) -> list[Tensor]:
        """Return `count` values at each of so many places, from the first to the last, of a tensor
        as it is stored, without reading the rest."""
        stored = self._stored.get(name)
        if stored:
            name = next(iter(stored.parts.values()))
        handle = self._handle_of(self._file_of[name])
        # as it is stored: a packed weight is flat
        if isinstance(handle, dict):
            values = handle[name]
            shape = list(values.shape)
        else:
            shape = handle.get_slice(name).get_shape()
            values = handle.get_slice(name) if shape else handle.get_tensor(name)
        if not shape:
            return [values]
        parts = []
        for place in range(places):
            fraction = place / max(1, places - 1)
            index = []
            for size in shape[:-1]:
                start = round(fraction * max(0, size - 1))
                index.append(slice(start, start + 1))
            start = round(fraction * max(0, shape[-1] - count))
            index.append(slice(start, start + count))
            parts.append(values[tuple(index)].flatten())
        return parts

    def _handle_of(self, path: Path):
        """Open the file and close the previous one: pages read from a mapped file count as memory
        until it is closed."""
        if self._open_handle[0] != path or self._bytes_read > MAX_MAPPED_BYTES:
            self._open_handle = (path, None)  # closed before the next is opened
            self._open_handle = (path, _open_file(path))
            self._bytes_read = 0
        return self._open_handle[1]


def _open_file(path: Path):
    """Return the safetensors reader, or a memory-mapped dict of tensors for a .bin file."""
    if path.suffix == ".bin":
        return _open_pickle(path)
    return _open_safetensors(path)


def _read_metas(handle) -> dict[str, Tensor | str]:
    """Return a meta tensor for every tensor of an open file; for a dtype that torch lacks, the
    dtype's name."""
    if isinstance(handle, dict):
        return {name: tensor.to("meta") for name, tensor in handle.items()}
    metas: dict[str, Tensor | str] = {}
    for name in handle.keys():  # noqa: SIM118 (not a dict)
        lazy_slice = handle.get_slice(name)
        shape = lazy_slice.get_shape()
        dtype = lazy_slice.get_dtype()
        if dtype in _DTYPES:
            metas[name] = torch.empty(shape, dtype=_DTYPES[dtype], device="meta")
        else:
            metas[name] = dtype
    return metas


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_DTYPES |= {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_DTYPES |= {
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def _weight_files(folder: Path) -> list[Path]:
    for stem in ("model.safetensors", "pytorch_model.bin"):
        if (single := folder / stem).is_file():  # before an index, as in transformers
            return [single]
        if (index := folder / f"{stem}.index.json").is_file():
            return _indexed_files(index)
    existing_files = (
        ", ".join(sorted(path.name for path in folder.iterdir())[:MAX_LISTED]) or "nothing"
    )
    remedy = "download the whole folder, or rename the file"
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        remedy = (
            "download the whole folder (scripts/plan.py plans a run without the weights)"
        )
    if list(folder.glob("consolidated*.pth")) or list(
        folder.glob("consolidated*.safetensors")
    ):
        remedy = (
            "these are in the original layout of Meta or Mistral; download the folder in Hugging "
            "Face format"
        )
    raise ValueError(
        f"{folder} holds no weights: expected model.safetensors, model.safetensors.index.json, "
        f"pytorch_model.bin or pytorch_model.bin.index.json, found {existing_files}; {remedy}"
    )


def _indexed_files(index: Path) -> list[Path]:
    """Return the shards listed in an index; raise ValueError if a name points outside the
    folder."""
    try:
        shards = sorted(
            {
                str(name)
                for name in json.loads(index.read_text("utf-8"))["weight_map"].values()
            }
        )
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{index} is not a valid index ({error!r}); download it again"
        ) from None
    if not shards:
        raise ValueError(f"{index} lists no files; download it again")
    # an index may come from anywhere: it must not lead to files outside of its folder
    strays = []
    for name in shards:
        if Path(name).name != name:
            strays.append(name)
    if strays:
        raise ValueError(
            f"{index} lists {strays[0]!r}, which is not a plain file name; do not trust this folder"
        )
    missing = []
    for name in shards:
        if not (index.parent / name).is_file():
            missing.append(name)
    if missing:
        listed = ", ".join(missing[:MAX_LISTED])
        raise ValueError(
            f"{index.parent} lacks {len(missing)} of {len(shards)} weight files: {listed}; "
            "download them"
        )
    return [index.parent / name for name in shards]


def _open_safetensors(path: Path):
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        if path.open("rb").read(24).startswith(b"version https://git-lfs"):
            raise ValueError(
                f"{path} is a git-lfs pointer, not the weights; run `git lfs pull` in its folder"
            ) from None
        size = path.stat().st_size
        raise ValueError(
            f"{path} ({size:,} bytes) is truncated or not a safetensors file ({error}); download "
            "it again"
        ) from None


def _open_pickle(path: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:
        # UnpicklingError, RuntimeError, EOFError, ...
        reason = str(error).split("\n")[0][:200]
        raise ValueError(
            f"{path} is truncated or contains more than tensors, and litft does not execute "
            f"pickles ({reason}); get the model as safetensors"
        ) from None
    reason = f"{path} is not a dictionary of plain tensors; get the model as safetensors"
    if not isinstance(content, dict):
        raise ValueError(reason)
    tensors = {}
    for name, value in content.items():
        if not isinstance(name, str) or not _is_plain(value):
            raise ValueError(reason)
        tensors[name] = value.detach()
    return tensors


def _is_plain(value: Any) -> bool:
    """Return whether a value is a dense tensor of numbers."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not value.is_quantized
    )


def check_weights(
    model: nn.Module, checkpoint: Checkpoint, rules: list[Rule]
) -> list[TensorMapping]:
    """Return the mappings that fill `model`; raise ValueError for missing, unexpected or misshapen
    tensors."""
    # what the network expects
    names = set(checkpoint.names)
    mappings, unexpected = mappings_from_hf(rules, checkpoint.names)
    expected = {}
    for name, parameter in model.named_parameters():
        expected[name] = torch.empty_like(parameter, device="meta")

    # compare each stored tensor with the network's, converted back
    problems = []
    used = []
    filled = set()
    for mapping in mappings:
        # a target that the network lacks, or that has a value already
        if any(target not in expected or target in filled for target in mapping.targets):
            unexpected += [name for name in mapping.sources if name in names]
            continue
        used.append(mapping)
        filled |= set(mapping.targets)
        expected_sources = mapping.revert([expected[target] for target in mapping.targets])
        for name, expected_meta in zip(mapping.sources, expected_sources, strict=True):
            if name in names:
                problems += _tensor_problems(checkpoint, name, expected_meta)
            else:
                problems.append(f"missing {name}")

    # the network's parameters without a stored tensor
    unfilled = [name for name in expected if name not in filled]
    for mapping in mappings_to_hf(rules, unfilled):
        problems += [f"missing {name}" for name in mapping.targets]
    for name in unexpected:
        if not _changes_nothing(checkpoint, name, names):
            problems.append(f"unexpected {name}")
    if problems:
        if len(problems) > MAX_LISTED:
            omitted = [f"... and {len(problems) - MAX_LISTED} more"]
        else:
            omitted = []
        raise ValueError(
            f"the weights in {checkpoint.folder} do not match its {checkpoint.config_name}:\n  "
            + "\n  ".join(problems[:MAX_LISTED] + omitted)
            + f"\n{checkpoint.mismatch_remedy}"
        )
    return used


def _changes_nothing(checkpoint: Checkpoint, name: str, names: Collection[str]) -> bool:
    """Return whether a tensor that the network lacks has no effect: a bias of zeros, which programs
    for GPTQ wrote for every Linear, or the scale of a cache in 8 bits. names: of all tensors."""
    if name.endswith(SCALES_OF_CACHES):
        return checkpoint.has_stored_formats
    weight = f"{name.removesuffix('.bias')}.weight"
    if not name.endswith(".bias") or weight not in names:
        return False
    return not checkpoint.read(name).any()


def _tensor_problems(checkpoint: Checkpoint, name: str, expected: Tensor) -> list[str]:
    meta = checkpoint.meta(name)
    shape = tuple(expected.shape)
    if meta.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return [
            f"{name}: stored as {meta.dtype}, which is quantized; download the folder in bf16"
        ]
    if not expected.is_floating_point() and meta.dtype != expected.dtype:
        return [f"{name}: stored as {meta.dtype}, but litft expects {expected.dtype}"]
    if meta.is_floating_point() != expected.is_floating_point():
        return [f"{name}: stored as {meta.dtype}, but litft expects floating-point weights"]
    if tuple(meta.shape) == shape:
        return []
    return [f"{name}: expected shape {shape}, found {tuple(meta.shape)}"]


def packed_modules(
    model: nn.Module,
    checkpoint: Checkpoint,
    mappings: list[TensorMapping],
    unquantized: Collection[str] = (),
) -> Iterator[str]:
    """Yield the modules to quantize: not those in `unquantized`, nor those that a quantized folder
    stores unquantized."""
    for mapping in mappings:
        if checkpoint.is_quantized and not any(map(checkpoint.is_packed, mapping.sources)):
            continue
        for name in mapping.targets:
            module = name.removesuffix(".weight")
            if is_quantizable(name, model) and module not in unquantized:
                yield module


def load_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    mappings: list[TensorMapping],
    dtype: torch.dtype,
    placement: WeightPlacement = SINGLE_DEVICE,
) -> None:
    """Load the weights into an allocated network, one tensor at a time; if possible, ranks only
    read their own shard.

    dtype: of weights before they are quantized. Additional rows of the network, for new tokens,
    stay unchanged.
    """
    for mapping in mappings:
        modules = [model.get_submodule(name.rpartition(".")[0]) for name in mapping.targets]
        # the modules that take quantized data; None for a tensor that is stored as it is
        quantized: list[QuantizedModule | None] = []
        for module, name in zip(modules, mapping.targets, strict=True):
            if isinstance(module, QuantizedModule) and name.endswith(".weight"):
                quantized.append(module)
            else:
                quantized.append(None)
        first = quantized[0]
        device = model.get_parameter(mapping.targets[0]).device
        # stored in bitsandbytes' format: taken over as it is
        if (
            mapping.is_copy
            and first is not None
            and (packed := checkpoint.packed(mapping.sources[0]))
        ):
            first.fill(packed.to(device))
        elif len(modules) == 1 and first is None:
            # a single target can be read in part, so that a rank reads only its shard
            name = mapping.targets[0]
            placement.copy_in(
                name, model.get_parameter(name), partial(_read_part, checkpoint, mapping)
            )
        else:
            # quantized here, or converted together with others: this needs the whole tensors
            tensors = mapping.convert([checkpoint.read(name) for name in mapping.sources])
            is_packed = any(map(checkpoint.is_packed, mapping.sources))
            for name, module, tensor in zip(
                mapping.targets, quantized, tensors, strict=True
            ):
                if module is not None and is_packed:
                    # Values that were quantized have their scale in each block, so that it is
                    # found again, unless it is rounded, or quantized once more.
                    kind = module.kind.removesuffix("-dq")
                    module.fill(_quantized_part(placement, name, tensor.to(device), kind))
                elif module is not None:
                    tensor = tensor.to(device, dtype)
                    module.fill(_quantized_part(placement, name, tensor, module.kind))
                else:
                    placement.copy_in(name, model.get_parameter(name), tensor.__getitem__)


def _quantized_part(
    placement: WeightPlacement, name: str, tensor: Tensor, kind: str
) -> QuantizedTensor:
    """Quantize a whole weight, (out, in) or (E, out, in), and return this process's part of it.

    A part whose blocks of weights cross its boundary is quantized by itself, with other blocks.
    """
    # stacked experts are quantized as one matrix
    quantized = QuantizedTensor.quantize(tensor.flatten(0, -2), kind)
    partition = placement.partition(name)
    if partition is None:
        return quantized
    matrices = tensor.size(0) if tensor.dim() == 3 else 1
    part = quantized.part(*partition, matrices=matrices)
    if part is None:
        return QuantizedTensor.quantize(placement.shard(name, tensor).flatten(0, -2), kind)
    return part


def _read_part(
    checkpoint: Checkpoint, mapping: TensorMapping, slices: tuple[slice, ...]
) -> Tensor:
    """Read a slice of the only target of a mapping."""
    # copies and stacks are read in part; any other conversion needs its whole sources
    if mapping.is_copy:
        return checkpoint.read(mapping.sources[0], slices)
    if mapping.is_stack:
        sources = mapping.sources[slices[0]]
        return mapping.convert([checkpoint.read(name, slices[1:]) for name in sources])[0]
    return mapping.convert([checkpoint.read(name) for name in mapping.sources])[0][slices]
