"""llama.cpp's names and metadata of model families, one file each.

Every file in this folder is imported, and its `GGUF_FAMILY` registered.
"""

from functools import cache
from typing import Any

from litft.checkpoints.rules import Rule
from litft.export.gguf.families.family import GgufFamily
from litft.families.family import declarations
from litft.families.llama import drop_mtp
from litft.model.config import Config


@cache
def gguf_families() -> dict[str, GgufFamily]:
    """Return the family of each model_type with GGUF support."""
    families = {}
    for family in declarations(__name__, __path__, "GGUF_FAMILY"):
        for model_type in family.architectures:
            families[model_type] = family
    return families


def gguf_architectures() -> dict[str, str]:
    """Return llama.cpp's architecture of each model_type with GGUF support."""
    return {
        model_type: family.architectures[model_type][0]
        for model_type, family in gguf_families().items()
    }


def gguf_architecture(config: Config) -> str:
    """Return llama.cpp's architecture of a model; raise ValueError without GGUF support."""
    family = gguf_families().get(config.model_type)
    if family is None:
        reason = f"GGUF files of {config.model_type!r} are not supported"
        remedy = "keep the Hugging Face folder; tutorials/export.md gives reasons"
        supported = ", ".join(sorted(gguf_families()))
        raise ValueError(f"{reason}; supported: {supported}; {remedy}")
    if family.architecture:
        return family.architecture(config)
    return family.architectures[config.model_type][0]


def gguf_rules(config: Config, extra_layers: int = 0) -> list[Rule]:
    """Return the rules for llama.cpp's names of a family's weights; raise ValueError without GGUF
    support.

    extra_layers: the file's layers for multi-token prediction, which are ignored.
    """
    gguf_architecture(config)
    extra = drop_mtp(config, "blk.", extra_layers)
    return [*extra, *gguf_families()[config.model_type].rules(config)]


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return the GGUF metadata that only this family has, by key."""
    return gguf_families()[config.model_type].metadata(config)


def gguf_fields(architecture: str) -> dict[str, str]:
    """Return the fields of config.json for GGUF metadata that only families of this architecture
    have."""
    fields: dict[str, str] = {}
    for family in _families_of(architecture):
        fields |= family.fields
    return fields


def gguf_tensors(architecture: str) -> dict[str, str]:
    """Return the fields of config.json that are true if a block has a tensor, and the tensor's name
    in the block."""
    tensors: dict[str, str] = {}
    for family in _families_of(architecture):
        tensors |= family.tensors
    return tensors


def _families_of(architecture: str) -> list[GgufFamily]:
    """Return the families with this GGUF architecture."""
    families = []
    for model_type, name in gguf_architectures().items():
        family = gguf_families()[model_type]
        if name == architecture and family not in families:
            families.append(family)
    return families


def gguf_config(architecture: str, hf: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a GGUF file with this architecture; hf: the fields that its
    metadata specifies."""
    model_types = []
    for model_type, name in gguf_architectures().items():
        if name == architecture:
            model_types.append(model_type)
    if not model_types:
        supported = ", ".join(sorted(set(gguf_architectures().values())))
        raise ValueError(
            f"the GGUF architecture {architecture!r} is not supported; supported: {supported}"
        )
    # several model types may share an architecture: take the one of this name, else the first; the
    # family tells them apart by the metadata
    model_type = architecture if architecture in model_types else model_types[0]
    family = gguf_families()[model_type]
    hf = {
        "model_type": model_type,
        "architectures": [family.architectures[model_type][1]],
        **hf,
    }
    try:
        return family.config(hf)
    except KeyError as missing:
        # the metadata has llama.cpp's name of the field
        fields = {field: key for key, field in gguf_fields(architecture).items()}
        key = fields.get(missing.args[0], missing.args[0])
        raise ValueError(
            f"{architecture}.{key}: missing from the metadata; download the file again"
        ) from None
