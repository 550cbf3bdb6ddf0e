"""What a model family is in GGUF files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from litft.checkpoints.rules import Rule
from litft.model.config import Config


def as_it_is(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that the metadata specifies: they are all of config.json."""
    return hf


def no_metadata(config: Config) -> dict[str, Any]:
    """Return no metadata beside that of all families."""
    return {}


@dataclass(frozen=True)
class GgufFamily:
    """llama.cpp's names for model types; each file of this folder has one as `GGUF_FAMILY`."""

    # by model_type: llama.cpp's architecture, and transformers' class
    architectures: Mapping[str, tuple[str, str]]
    # litft's tensors as llama.cpp's, and back
    rules: Callable[[Config], list[Rule]]
    # adds fields of config.json that are not in GGUF metadata
    config: Callable[[dict[str, Any]], dict[str, Any]] = as_it_is
    # the values of metadata that only this family has, by key
    metadata: Callable[[Config], dict[str, Any]] = no_metadata
    # keys of metadata that only this family has, and their fields of config.json
    fields: Mapping[str, str] = field(default_factory=dict)
    # fields of config.json that are true if a block has a tensor, and the tensor's name in the
    # block
    tensors: Mapping[str, str] = field(default_factory=dict)
    # the architecture, where it depends on more than the model_type
    architecture: Callable[[Config], str] | None = None
