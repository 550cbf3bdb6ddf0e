"""GGUF files of Mistral 7B to Small 3.2, Ministral, Mathstral."""

from typing import Any

from litft.export.gguf.families.family import GgufFamily
from litft.export.gguf.families.llama import gguf_rules
from litft.model.config import Config

GGUF = {
    "mistral": ("llama", "MistralForCausalLM"),
    "ministral3": ("mistral3", "Ministral3ForCausalLM"),
}
GGUF_FIELDS = {
    "attention.temperature_scale": "llama_4_scaling_beta",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return Ministral 3's scale of queries by position, and the parameters of its YaRN."""
    if config.model_type != "ministral3":
        return {}
    rope = config.layers[0].rope
    if rope is None or rope.rope_type != "yarn":
        raise ValueError(
            "llama.cpp's architecture mistral3 needs YaRN, and this model has none; keep the "
            "Hugging Face folder"
        )
    return dict(
        zip(
            GGUF_FIELDS,
            (rope.query_beta, 1.0, float(rope.beta_fast), float(rope.beta_slow)),
            strict=True,
        )
    )


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return config.json; without a scale of queries, the file is one of Mistral Small 3.1."""
    if hf["model_type"] != "ministral3":
        return hf
    scaling = {}
    for name in GGUF_FIELDS.values():
        if name in hf:
            scaling[name] = hf.pop(name)
    if not scaling.get("llama_4_scaling_beta"):
        return hf | {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": None,
        }
    # the metadata has one number for both
    mscale = scaling.pop("mscale_all_dim", None)
    if mscale:
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
    # in the form of transformers 5: type, base and factors in one field
    kind = hf.pop("rope_scaling", {"rope_type": "default"})
    return hf | {"rope_parameters": {"rope_theta": hf["rope_theta"], **kind, **scaling}}


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    config=gguf_config,
    metadata=gguf_metadata,
    fields=GGUF_FIELDS,
)
