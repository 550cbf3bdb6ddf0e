"""The index of a checkpoint, which is read without running what it may name."""

import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

_DCP = "torch.distributed.checkpoint.metadata"
_METADATA_CLASSES = {
    (_DCP, "Metadata"),
    (_DCP, "TensorStorageMetadata"),
    (_DCP, "TensorProperties"),
    (_DCP, "ChunkStorageMetadata"),
    (_DCP, "MetadataIndex"),
    (_DCP, "StorageMeta"),
    (_DCP, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("torch", "float32"),
    ("torch", "float16"),
    ("torch", "bfloat16"),
    ("torch", "float64"),
    ("torch", "int64"),
    ("torch", "int32"),
    ("torch", "uint8"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class IndexReader(FileSystemReader):
    """DCP's reader, with a restricted unpickler for the index, since a run folder may come from an
    untrusted source."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index of the folder.

        Raises UnpicklingError if it names a class that does not belong in an index.
        """
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _Unpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _METADATA_CLASSES:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which does not belong in a checkpoint's index"
            )
        return super().find_class(module, name)
