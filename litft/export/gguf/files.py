"""GGUF files: their metadata, and their tensors with the face of a checkpoint. Read by the package `gguf`, mapped."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    import gguf
except ModuleNotFoundError as error:
    raise ValueError(f"GGUF needs the package {error.name}: pip install 'litft[gguf]'") from None

_TYPES = gguf.GGMLQuantizationType
_PLAIN = {_TYPES.F64: torch.float64, _TYPES.F32: torch.float32, _TYPES.F16: torch.float16, _TYPES.BF16: torch.bfloat16}
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GgufFile:
    """A model in one .gguf file, or in several that one of them counts; ValueError for what is none, or not whole.

    metadata: its values by their keys, numbers and texts, and lists of them. Quantized tensors stand here as what their
    bits stand for, in bf16's range: fp32 when read, to be rounded to bf16.
    """

    is_quantized = False

    def __init__(self, path: Path) -> None:
        self.folder = path
        readers = [_reader(part) for part in _parts(path)]
        self.metadata: dict[str, Any] = {}
        for field in readers[0].fields.values():
            self.metadata[field.name] = self._contents(field)
        self._tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
        count = self.metadata.get("split.tensors.count")
        if count is not None and count != len(self._tensors):
            raise ValueError(f"{path}: {len(self._tensors)} tensors of {count} are there; download all parts")

    def _contents(self, field: Any) -> Any:
        try:
            value = field.contents()
        except UnicodeDecodeError:
            raise ValueError(f"{self.folder}: {field.name} is no valid text; download the file again") from None
        return _shortest(value) if isinstance(value, float) else value

    @property
    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        return sorted(self._tensors)

    def meta(self, name: str) -> Tensor:
        """The tensor's shape, and the dtype to keep it in, as a meta tensor."""
        tensor = self._tensors[name]
        shape = [int(size) for size in reversed(tensor.shape)]  # llama.cpp counts from the innermost
        return torch.empty(shape, dtype=_PLAIN.get(tensor.tensor_type, torch.bfloat16), device="meta")

    def read(self, name: str) -> Tensor:
        """The tensor: of a quantized one what it stands for, in fp32. ValueError for an encoding that is not known."""
        tensor = self._tensors[name]
        shape = self.meta(name).shape
        if tensor.tensor_type == _TYPES.BF16:
            return torch.from_numpy(tensor.data.copy()).view(torch.bfloat16).reshape(shape)
        if tensor.tensor_type in _PLAIN:
            return torch.from_numpy(tensor.data.copy()).reshape(shape)
        try:
            return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)).reshape(shape)
        except NotImplementedError:
            reason = f"{name} is stored as {tensor.tensor_type.name}, which the package gguf does not decode"
            raise ValueError(f"{self.folder}: {reason}; get another quantization of the model") from None

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors have the same bits."""
        one, two = self._tensors[name], self._tensors[other]
        return one.tensor_type == two.tensor_type and one.data.shape == two.data.shape and bool((one.data == two.data).all())

    def is_packed(self, name: str) -> bool:
        """Whether bits stay packed: never; they are dequantized."""
        return False


def _parts(path: Path) -> list[Path]:
    """The files of a model, of which `path` is one, or the folder that holds one model."""
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        first = [one for one in found if not (split := _SPLIT.fullmatch(one.name)) or split[2] == "00001"]
        if len(first) != 1:
            names = ", ".join(one.name for one in first[:10])
            reason = f"{len(first)} models as .gguf ({names}); name the file" if first else "no .gguf file; name another"
            raise ValueError(f"{path} holds {reason}")
        path = first[0]
    if not path.is_file():
        raise ValueError(f"{path} does not exist; name a .gguf file")
    if not (split := _SPLIT.fullmatch(path.name)):
        return [path]
    count = int(split[3])
    paths = [path.with_name(f"{split[1]}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    if missing := [one.name for one in paths if not one.is_file()]:
        raise ValueError(
            f"{path}: {len(missing)} of its {count} parts are missing: {', '.join(missing[:10])}; download them"
        )
    return paths


def _reader(path: Path) -> Any:
    if path.open("rb").read(4) != b"GGUF":
        raise ValueError(f"{path} is no GGUF file: it does not begin with the letters GGUF; download it again")
    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # of a damaged file: whatever numpy, struct or enums raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{path} is damaged or cut off ({reason}); download it again") from None


def _shortest(value: float) -> float:
    """A number of 32 bits as it was once typed: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(torch.tensor(value, dtype=torch.float32).numpy()))
