"""The supported model families, one file each; every file in this folder is imported and
registered.

A family file defines:

- `MODEL_TYPES`: values of `model_type` in config.json.
- `config(hf) -> Config`: read the content `hf` of config.json. Missing fields have transformers'
defaults.
- `rules(config) -> list[Rule]`: map litft's tensors to the checkpoint's and back (see
checkpoints/rules.py).
- optional `text_config(hf)`: return the language model's part of a multimodal config.json.
- optional `WRAPPER`: the names of the language model's modules in the family's multimodal class in
transformers.
- optional `peft_rules(config)`: rules for modules that PEFT names differently from the checkpoint,
such as stacked experts.
- optional, for GGUF: `GGUF`, which maps a model_type to llama.cpp's architecture and transformers'
  class, `gguf_rules(config)`, and `gguf_config(hf)`, which adds fields of config.json that are not
  in GGUF metadata. For metadata of this family alone, `GGUF_FIELDS` maps its keys to fields of
  config.json, and `gguf_metadata(config)` returns its values. `GGUF_TENSORS` maps fields of
  config.json to the tensors of a block that are there if the field is true.
  `gguf_architecture(config)` returns the architecture if it depends on more than the model_type.

The helper functions in llama.py cover most of this. A new field of config.json is declared in
model/config_fields.py: a family sees no other fields. tutorials/add_a_family.md has an example.
"""

import pkgutil
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from litft.checkpoints.peft_names import ModuleNames
from litft.checkpoints.rules import Rule
from litft.model.config import Config, DeltaNetConfig, Mamba2Config
from litft.model.config_fields import declared_fields, undeclared_fields
from litft.model.rope_config import scaled_context


@cache
def families() -> dict[str, ModuleType]:
    """Return the family module of each supported model_type."""
    modules = [import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    return {model_type: module for module in modules for model_type in module.MODEL_TYPES}


_ENCODER_DECODER = "an encoder and a decoder, and litft trains decoders"
_ENCODER = "an encoder, which does not generate text"
_MAMBA_1 = "a network with Mamba-1 layers, which are not implemented"
# why some model types are not supported
UNSUPPORTED = {
    **dict.fromkeys(
        (
            "t5",
            "mt5",
            "umt5",
            "bart",
            "mbart",
            "pegasus",
            "marian",
            "m2m_100",
            "t5gemma",
            "whisper",
            "led",
            "fsmt",
        ),
        _ENCODER_DECODER,
    ),
    **dict.fromkeys(
        (
            "bert",
            "roberta",
            "xlm-roberta",
            "deberta",
            "deberta-v2",
            "electra",
            "distilbert",
            "albert",
            "modernbert",
        ),
        _ENCODER,
    ),
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba"), _MAMBA_1),
    "rwkv": "a network with RWKV layers, which are not implemented",
    "clip": "an image model",
    "vit": "an image model",
    "wav2vec2": "a speech model",
}


def family(model_type: str) -> ModuleType:
    """Return the module of a model_type; raise ValueError listing the supported ones if it is not
    among them."""
    if model_type not in families():
        reason = UNSUPPORTED.get(model_type)
        why = f": it is {reason}" if reason else ""
        remedy = (
            "tutorials/families.md has what is supported and why, add_a_family.md shows how to add "
            "a family"
        )
        supported = f"supported: {', '.join(sorted(families()))}"
        raise ValueError(
            f"config.json: model_type {model_type!r} is not supported{why}; {remedy} ({supported})"
        )
    return families()[model_type]


def text_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's config.json if `hf` is a multimodal model's, otherwise `hf`."""
    # as text: in a damaged file it may be a list, which cannot be looked up
    module = families().get(str(hf.get("model_type")))
    if not hasattr(module, "text_config"):
        return hf
    if not isinstance(hf.get("text_config", {}), dict):
        raise ValueError(
            f"config.json: text_config must be an object, found {hf['text_config']!r:.200}"
        )
    try:
        return module.text_config(hf)
    except KeyError as missing:
        raise ValueError(f"config.json lacks the field {missing}; is the file complete?") from None


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for modules that PEFT names differently from the checkpoint, such as stacked
    experts."""
    module = family(config.model_type)
    if hasattr(module, "peft_rules"):
        return module.peft_rules(config)
    return []


def wrapper_names(config: Config) -> ModuleNames:
    """Return the names of the language model's modules in the multimodal class of a family."""
    return getattr(family(config.model_type), "WRAPPER", ModuleNames("model.language_model."))


def read_config(hf: dict[str, Any]) -> Config:
    """Convert the content of config.json to a Config; raise ValueError naming missing or
    unsupported fields."""
    try:
        # first: fields of an unknown family may have other meanings
        module = family(str(hf["model_type"]))
        hf = _with_one_rope(declared_fields(hf))
        config = module.config(hf)
        _check_convolutions(hf, config)
    except KeyError as missing:
        raise ValueError(
            f"config.json lacks the field {missing}; is it the folder of a causal language model?"
        ) from None
    # a table of positions has no RoPE whose context could be extended
    if config.learned_positions:
        return config
    return replace(config, max_positions=scaled_context(hf, config.max_positions))


def _check_convolutions(hf: dict[str, Any], config: Config) -> None:
    """Raise ValueError if the convolutions of recurrent mixers have another activation than SiLU.

    In transformers they have the activation of the MLP, or one of their own (Nemotron-H).
    """
    if not any(isinstance(layer.mixer, Mamba2Config | DeltaNetConfig) for layer in config.layers):
        return
    name = "mamba_hidden_act" if hf["model_type"] == "nemotron_h" else "hidden_act"
    activation = hf.get(name, "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(
            f"config.json: {name} {activation!r} is not supported in a network with recurrent "
            "layers, whose convolutions have it, too; only silu is"
        )


def _with_one_rope(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the rope parameters that transformers reads where it has both fields
    for them.

    transformers 5 writes `rope_parameters`; model cards still say to add `rope_scaling`, which then
    replaces all of it. Raises ValueError where the base of the angles would be lost with the
    replaced field.
    """
    parameters = hf.get("rope_parameters") or {}
    scaling = hf.get("rope_scaling") or {}
    # parameters for each kind of layer are read by the family itself
    is_by_layer = any(isinstance(value, dict) for value in parameters.values())
    if not parameters or not scaling or is_by_layer:
        return hf
    theta = scaling.get("rope_theta") or hf.get("rope_theta")
    if theta is None and "rope_theta" in parameters:
        raise ValueError(
            "config.json has rope_scaling beside rope_parameters, and only the latter has "
            "rope_theta; transformers would ignore it; move the fields of rope_scaling "
            f"({', '.join(scaling)}) into rope_parameters"
        )
    return {**hf, "rope_parameters": scaling}


# families whose network others have under another model_type, as code in the model's repository
LOOKALIKES = (
    "llama",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "phi3",
    "gpt_neox",
    "gpt2",
)
# fields of config.json that do not describe the network
_NOT_THE_NETWORK = (
    "architectures auto_map torch_dtype dtype transformers_version use_cache initializer_range "
    "bos_token_id eos_token_id pad_token_id attention_dropout _name_or_path pretraining_tp "
    "hidden_dropout rope_theta"
).split()


def as_family(hf: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Return config.json with another model_type, and without the code that transformers would run
    for its own."""
    kept = {}
    for name, value in hf.items():
        if name not in ("auto_map", "architectures"):
            kept[name] = value
    return kept | {"model_type": model_type}


def unread_fields(hf: dict[str, Any]) -> list[str]:
    """Return the fields of config.json that no family reads."""
    return [name for name in undeclared_fields(hf) if name not in _NOT_THE_NETWORK]


def gguf_architectures() -> dict[str, str]:
    """Return llama.cpp's architecture of each model_type with GGUF support."""
    return {
        model_type: names[0]
        for module in families().values()
        for model_type, names in getattr(module, "GGUF", {}).items()
    }


def gguf_architecture(config: Config) -> str:
    """Return llama.cpp's architecture of a model; raise ValueError without GGUF support."""
    if config.model_type not in (supported := gguf_architectures()):
        reason = f"GGUF files of {config.model_type!r} are not supported"
        remedy = "keep the Hugging Face folder; tutorials/export.md gives reasons"
        raise ValueError(f"{reason}; supported: {', '.join(sorted(supported))}; {remedy}")
    module = family(config.model_type)
    if hasattr(module, "gguf_architecture"):
        return module.gguf_architecture(config)
    return supported[config.model_type]


def gguf_rules(config: Config, extra_layers: int = 0) -> list[Rule]:
    """Return the rules for llama.cpp's names of a family's weights; raise ValueError without GGUF
    support.

    extra_layers: the file's layers for multi-token prediction, which are ignored.
    """
    gguf_architecture(config)
    extra = families()["llama"].drop_mtp(config, "blk.", extra_layers)
    return [*extra, *family(config.model_type).gguf_rules(config)]


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return the GGUF metadata that only this family has, by key."""
    module = family(config.model_type)
    if hasattr(module, "gguf_metadata"):
        return module.gguf_metadata(config)
    return {}


def gguf_fields(architecture: str) -> dict[str, str]:
    """Return the fields of config.json for GGUF metadata that only families of this architecture
    have."""
    return _of_architecture(architecture, "GGUF_FIELDS")


def gguf_tensors(architecture: str) -> dict[str, str]:
    """Return the fields of config.json that are true if a block has a tensor, and the tensor's name
    in the block."""
    return _of_architecture(architecture, "GGUF_TENSORS")


def _of_architecture(architecture: str, table: str) -> dict[str, str]:
    """Return the union of a table of all families with this GGUF architecture."""
    modules = set()
    for model_type, name in gguf_architectures().items():
        if name == architecture:
            modules.add(family(model_type))
    return {key: value for module in modules for key, value in getattr(module, table, {}).items()}


def gguf_config(architecture: str, hf: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a GGUF file with this architecture; hf: the fields that its
    metadata specifies."""
    model_types = [
        model_type for model_type, name in gguf_architectures().items() if name == architecture
    ]
    if not model_types:
        supported = ", ".join(sorted(set(gguf_architectures().values())))
        raise ValueError(
            f"the GGUF architecture {architecture!r} is not supported; supported: {supported}"
        )
    # several model types may share an architecture: take the one of this name, else the first; the
    # family tells them apart by the metadata
    if architecture in model_types:
        model_type = architecture
    else:
        model_type = model_types[0]
    module = family(model_type)
    hf = {"model_type": model_type, "architectures": [module.GGUF[model_type][1]], **hf}
    try:
        if hasattr(module, "gguf_config"):
            return module.gguf_config(hf)
        return hf
    except KeyError as missing:
        # the metadata has llama.cpp's name of the field
        fields = {field: key for key, field in gguf_fields(architecture).items()}
        key = fields.get(missing.args[0], missing.args[0])
        raise ValueError(
            f"{architecture}.{key}: missing from the metadata; download the file again"
        ) from None
