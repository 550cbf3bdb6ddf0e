"""The supported model families, one file each.

Every file in this folder is imported, and its `FAMILY` registered; tutorials/add_a_family.md has an
example.
"""

from dataclasses import replace
from functools import cache
from typing import Any

from litft.checkpoints.peft_module_names import ModuleNames
from litft.checkpoints.rules import Rule
from litft.families.family import Family, declarations
from litft.families.wrappers import WRAPPERS
from litft.model.config import Config, DeltaNetConfig, Mamba2Config
from litft.model.config_fields import declared_fields, undeclared_fields
from litft.model.rope_config import scaled_context


@cache
def families() -> dict[str, Family]:
    """Return the family of each supported model_type."""
    by_model_type = {}
    for found in declarations(__name__, __path__, "FAMILY"):
        for model_type in found.model_types:
            by_model_type[model_type] = found
    return by_model_type


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


def family(model_type: str) -> Family:
    """Return the family of a model_type; raise ValueError listing the supported ones if it is not
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


def as_transformers_opens(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the model_type for which transformers' AutoConfig takes it.

    Ministral 8B is published as mistral with kinds of layers, which the class for mistral does not
    have.
    """
    # null: all layers have the window, in both
    if hf.get("model_type") == "mistral" and hf.get("layer_types") is not None:
        return {**hf, "model_type": "ministral"}
    return hf


def text_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's config.json if `hf` is a multimodal model's, otherwise `hf`."""
    # as text: in a damaged file it may be a list, which cannot be looked up
    found = families().get(str(hf.get("model_type")))
    if found is None or found.text_config is None:
        return hf
    if not isinstance(hf.get("text_config", {}), dict):
        raise ValueError(
            f"config.json: text_config must be an object, found {hf['text_config']!r:.200}"
        )
    try:
        return found.text_config(hf)
    except KeyError as missing:
        raise ValueError(
            f"config.json lacks the field {missing}; is the file complete?"
        ) from None


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for modules that PEFT names differently from the checkpoint, such as stacked
    experts."""
    return family(config.model_type).peft_rules(config)


def fits_fp16(config: Config) -> bool:
    """Return whether the activations of a family's published models stay in the range of fp16."""
    return family(config.model_type).fits_fp16


def wrapper_names(multimodal: dict[str, Any]) -> ModuleNames:
    """Return the names of the language model's modules in a multimodal class, given the content of
    its config.json."""
    model_type = multimodal["model_type"]
    if model_type in WRAPPERS:
        return WRAPPERS[model_type].names
    return family(model_type).wrapper


def read_config(hf: dict[str, Any]) -> Config:
    """Convert the content of config.json to a Config; raise ValueError naming missing or
    unsupported fields."""
    try:
        # first: fields of an unknown family may have other meanings
        found = family(str(hf["model_type"]))
        hf = _with_one_rope(declared_fields(hf))
        if hf.get("is_causal") is False:
            raise ValueError(
                "config.json: is_causal false: each token would see those after it, as in models "
                "of embeddings; use a causal model"
            )
        config = found.config(hf)
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
    if not any(
        isinstance(layer.mixer, Mamba2Config | DeltaNetConfig) for layer in config.layers
    ):
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
COMMON_ARCHITECTURES = (
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


def with_model_type(hf: dict[str, Any], model_type: str) -> dict[str, Any]:
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
