"""GGUF files: metadata, and tensors with the interface of Checkpoint, memory-mapped by the package
`gguf`."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    import gguf
except ModuleNotFoundError as error:
    raise ValueError(
        f"GGUF needs the package {error.name}: pip install 'litft[gguf]'"
    ) from None

_TYPES = gguf.GGMLQuantizationType
_PLAIN = {
    _TYPES.F64: torch.float64,
    _TYPES.F32: torch.float32,
    _TYPES.F16: torch.float16,
    _TYPES.BF16: torch.bfloat16,
}
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GgufFile:
    """A model in one .gguf file or a split file; raise ValueError if it is not GGUF, damaged or
    incomplete.

    metadata: numbers, strings and lists of them, by key. Quantized tensors are dequantized: `read`
    returns fp32, and `meta` gives bf16 as the dtype to store them in.
    """

    is_quantized = False
    config_name = "metadata"
    mismatch_remedy = (
        "the file is incomplete, or its metadata is another model's; use another file"
    )

    def __init__(self, path: Path) -> None:
        self.folder = path
        # the first part has the metadata, and each part some of the tensors
        readers = [_reader(part) for part in _part_files(path)]
        self.metadata: dict[str, Any] = {}
        for field in readers[0].fields.values():
            self.metadata[field.name] = self._contents(field)
        self._tensors = {}
        for reader in readers:
            for tensor in reader.tensors:
                self._tensors[tensor.name] = tensor
        count = self.metadata.get("split.tensors.count")
        if count is not None and count != len(self._tensors):
            raise ValueError(
                f"{path}: has {len(self._tensors)} of {count} tensors; download all parts"
            )

    def _contents(self, field: Any) -> Any:
        try:
            value = field.contents()
        except UnicodeDecodeError:
            raise ValueError(
                f"{self.folder}: {field.name} is not valid UTF-8; download the file again"
            ) from None
        # an fp32 number as a Python float has digits that nobody wrote
        if isinstance(value, float):
            return _shortest(value)
        return value

    @property
    def names(self) -> list[str]:
        """The names of all tensors, sorted."""
        return sorted(self._tensors)

    def is_stored_in_fp32(self, name: str) -> bool:
        """Return False: GGUF has all vectors in fp32, whatever the model had."""
        return False

    def meta(self, name: str) -> Tensor:
        """Return a meta tensor with the tensor's shape and the dtype to store it in."""
        tensor = self._tensors[name]
        # GGUF lists the innermost dimension first
        shape = [int(size) for size in reversed(tensor.shape)]
        return torch.empty(
            shape, dtype=_PLAIN.get(tensor.tensor_type, torch.bfloat16), device="meta"
        )

    def read(self, name: str) -> Tensor:
        """Read a tensor, dequantized to fp32 if it is quantized; raise ValueError for an
        unsupported quantization type."""
        tensor = self._tensors[name]
        shape = self.meta(name).shape
        # numpy has no bf16, so the bits are reinterpreted
        if tensor.tensor_type == _TYPES.BF16:
            return torch.from_numpy(tensor.data.copy()).view(torch.bfloat16).reshape(shape)
        if tensor.tensor_type in _PLAIN:
            return torch.from_numpy(tensor.data.copy()).reshape(shape)
        try:
            return torch.from_numpy(
                gguf.dequantize(tensor.data, tensor.tensor_type)
            ).reshape(shape)
        except NotImplementedError:
            reason = (
                f"{name} is stored as {tensor.tensor_type.name}, which the package gguf cannot "
                "dequantize"
            )
            raise ValueError(
                f"{self.folder}: {reason}; use another quantization of the model"
            ) from None

    def same_data(self, name: str, other: str) -> bool:
        """Whether two tensors are bitwise equal."""
        a = self._tensors[name]
        b = self._tensors[other]
        return (
            a.tensor_type == b.tensor_type
            and a.data.shape == b.data.shape
            and bool((a.data == b.data).all())
        )

    def is_packed(self, name: str) -> bool:
        """Whether a tensor stays quantized; always False, since GGUF tensors are dequantized."""
        return False


def _part_files(path: Path) -> list[Path]:
    """Return all files of a model; `path` is one of them, or a folder with a single model."""
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        # of a split model, only the first part counts
        models = [
            file
            for file in files
            if not (split := _SPLIT.fullmatch(file.name)) or split[2] == "00001"
        ]
        if len(models) != 1:
            names = ", ".join(file.name for file in models[:10])
            if models:
                reason = f"{len(models)} GGUF models ({names}); pass one file"
            else:
                reason = "no .gguf file; pass another folder"
            raise ValueError(f"{path} contains {reason}")
        path = models[0]
    if not path.is_file():
        raise ValueError(f"{path} does not exist; pass a .gguf file")
    split = _SPLIT.fullmatch(path.name)
    if not split:
        return [path]
    count = int(split[3])
    if not 1 <= int(split[2]) <= count:
        raise ValueError(
            f"{path}: its name says part {int(split[2])} of {count}; rename it, or download it "
            "again"
        )

    # all parts, whichever was named
    paths = [
        path.with_name(f"{split[1]}-{number:05d}-of-{count:05d}.gguf")
        for number in range(1, count + 1)
    ]
    missing = []
    for part in paths:
        if not part.is_file():
            missing.append(part.name)
    if missing:
        raise ValueError(
            f"{path}: {len(missing)} of its {count} parts are missing: {', '.join(missing[:10])}; "
            "download them"
        )
    return paths


def _reader(path: Path) -> Any:
    if path.open("rb").read(4) != b"GGUF":
        raise ValueError(
            f"{path} is not a GGUF file (it does not begin with the letters GGUF); download it "
            "again"
        )
    try:
        return gguf.GGUFReader(path)
    except Exception as error:
        # damaged files cause errors of numpy, struct and enum
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(
            f"{path} is damaged or truncated ({reason}); download it again"
        ) from None


def _shortest(value: float) -> float:
    """Return the shortest decimal that rounds to the same fp32 number: 1e-05 rather than
    9.999999747378752e-06."""
    return float(str(torch.tensor(value, dtype=torch.float32).numpy()))
