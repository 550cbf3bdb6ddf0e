"""Multimodal models around a language model of another family: where its fields and weights are.

Only the language model is read. Their images, sound and video need transformers' own class.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from litft.checkpoints.peft_module_names import ModuleNames
from litft.checkpoints.rules import Dequantize, Drop, Rule
from litft.families import llama, qwen2_moe
from litft.families.family import LANGUAGE_MODEL, Family, ShapeOf
from litft.model.config import Config

# model_type of the language model -> its class in transformers
TEXT_CLASSES = {
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "cohere2_moe": "Cohere2MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "lfm3": "Lfm3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    # transformers has no class with a head
    "muse_glimmer_text": "MuseGlimmerTextModel",
    "nemotron_h": "NemotronHForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# of these, transformers' AutoModelForCausalLM has no class: it opens the multimodal model alone
ONLY_WRAPPED = ("mistral4", "muse_glimmer_text")
# the same network under another name
SAME_NETWORK = {
    "exaone4_5_text": "exaone4",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "kimi_k2": "deepseek_v3",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
# defaults of transformers' configs for sizes that older multimodal files leave out
OF_7B = dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32)
DEFAULT_SIZES = {
    "llama": OF_7B | dict(vocab_size=32000, intermediate_size=11008),
    "mistral": OF_7B | dict(vocab_size=32000, intermediate_size=14336),
    "qwen2": OF_7B
    | dict(vocab_size=151936, intermediate_size=22016, num_key_value_heads=32),
}
QWEN2_VL = dict(
    vocab_size=152_064,
    hidden_size=8192,
    intermediate_size=29_568,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
)
# the possible beginnings of a tensor's name: as in the language model alone, in files of
# transformers 5, and in older files
MODEL_PREFIXES = "{model.|model.language_model.|language_model.model.}"
TEXT_MODEL_PREFIXES = "{model.|model.text_model.|text_model.model.}"
# tensors of images and sound
OTHER_PARTS = (
    "{model.|}{vision_tower|vision_model|visual|multi_modal_projector|mm_projector|projector|"
    "connector|image_newline|vision_adapter|vision_projection|vision_projector|mlp1|"
    "vision_final_layernorm|sound_encoder|sound_projection|audio_tower|embed_audio}{*}"
)
# fields of a multimodal config.json that do not describe its language model
OUTER_FIELDS = ("vision_config", "text_config", "vision_token_id", "image_token_id")


@dataclass(frozen=True)
class Wrapper:
    """A multimodal class of transformers."""

    # model_type of the language model where `text_config` does not name it
    default: str
    # whether embedding and head are tied where no file says so
    tied: bool = False
    # the beginning of a tensor's name
    prefixes: str = MODEL_PREFIXES
    # the names of the language model's modules in the class
    names: ModuleNames = LANGUAGE_MODEL
    # fields whose default differs from that of the language model alone
    defaults: dict[str, Any] = field(default_factory=dict)
    # fields that the class does not read, with the value that it computes with
    fixed: dict[str, Any] = field(default_factory=dict)
    # whether `text_config` alone says if embedding and head are tied: the class contains the
    # language model with its head
    has_text_ties: bool = False
    # whether the size of a head is not that of the language model alone, but follows from the
    # number of heads
    heads_divide_size: bool = False
    # for weights that the language model alone stores in another way
    own_rules: Callable[[Config, ShapeOf], list[Rule]] | None = None


TEXT_MODEL = Wrapper(
    "llama",
    prefixes=TEXT_MODEL_PREFIXES,
    names=ModuleNames("model.text_model."),
)
# its heads divide the hidden size, and its norms have the usual epsilon
GLM_4V = Wrapper(
    "glm4",
    heads_divide_size=True,
    defaults=dict(rms_norm_eps=1e-5, max_position_embeddings=32768),
)
WRAPPERS = {
    "aya_vision": Wrapper("cohere2", tied=True),
    "cohere2_vision": Wrapper("cohere2", tied=True),
    "exaone4_5": Wrapper("exaone4"),
    "glm46v": GLM_4V,
    "glm4v": GLM_4V,
    "glm4v_moe": Wrapper("glm4_moe"),
    "idefics3": TEXT_MODEL,
    "internvl": Wrapper("qwen2", tied=True),
    "kimi_k25": Wrapper("deepseek_v3", tied=True),
    "lfm2-vl": Wrapper("lfm2", tied=True),
    "lfm2_vl": Wrapper("lfm2", tied=True),
    "lfm3_vl": Wrapper("lfm3", tied=True),
    "llava": Wrapper("llama"),
    "llava_next": Wrapper("llama"),
    "llava_onevision": Wrapper("qwen2"),
    "mistral3": Wrapper("mistral", tied=True),
    "muse_glimmer": Wrapper("muse_glimmer_text"),
    "nemotron_h_omni": Wrapper(
        "nemotron_h",
        prefixes="{backbone.|language_model.backbone.|language_model.model.}",
        names=ModuleNames("language_model.model.", "language_model.lm_head"),
        has_text_ties=True,
    ),
    "qwen2_5_vl": Wrapper("qwen2", defaults=QWEN2_VL),
    "qwen2_vl": Wrapper("qwen2", defaults=QWEN2_VL),
    "qwen3_vl": Wrapper(
        "qwen3", defaults=dict(rope_theta=5e5, max_position_embeddings=128_000)
    ),
    "qwen3_vl_moe": Wrapper(
        "qwen3_moe",
        defaults=dict(rope_theta=5e5),
        fixed=dict(norm_topk_prob=True),
        own_rules=qwen2_moe.experts_of_qwen3_vl,
    ),
    "smolvlm": TEXT_MODEL,
    "vipllava": Wrapper("llama"),
}


def text_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the language model, given that of the multimodal one.

    Older files list the fields of the language model and of the vision tower together. Raises
    ValueError for a language model of an unknown type.
    """
    wrapper = WRAPPERS[hf["model_type"]]
    # as the files of Nemotron 3 Omni call it
    if "text_config" not in hf and "llm_config" in hf:
        hf = {**hf, "text_config": hf["llm_config"]}
    if "text_config" not in hf:
        inner = {}
        for name, value in hf.items():
            if name not in OUTER_FIELDS:
                inner[name] = value
        hf = {**hf, "text_config": inner | {"model_type": wrapper.default}}
    elif wrapper.has_text_ties:
        hf = {name: value for name, value in hf.items() if name != "tie_word_embeddings"}
    found = hf["text_config"].get("model_type", wrapper.default)
    # in a damaged file it may be a list, which cannot be looked up
    model_type = SAME_NETWORK.get(str(found), str(found))
    if model_type not in TEXT_CLASSES:
        raise ValueError(
            f"config.json: model_type {found!r} in text_config is not supported; supported: "
            f"{', '.join(sorted(TEXT_CLASSES))}"
        )
    text = llama.text_model_config(hf, model_type, TEXT_CLASSES[model_type])
    defaults = {
        **DEFAULT_SIZES.get(model_type, {}),
        "tie_word_embeddings": wrapper.tied,
        **wrapper.defaults,
    }
    text = {**defaults, **text, **wrapper.fixed, "model_type": model_type}
    if wrapper.heads_divide_size and text.get("head_dim") is None:
        text["head_dim"] = _divided(
            text.get("hidden_size"), text.get("num_attention_heads")
        )
    # the three positions of M-RoPE are one for text, so it is RoPE
    for name in ("rope_scaling", "rope_parameters"):
        scaling = text.get(name)
        if isinstance(scaling, dict) and "mrope_section" in scaling:
            text[name] = _without_sections(scaling)
    return text


def _divided(size: Any, heads: Any) -> int | None:
    """Return the size of a head; None where a field is missing or wrong, which is reported
    later."""
    if isinstance(size, int) and isinstance(heads, int) and heads > 0:
        return size // heads
    return None


def _without_sections(scaling: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of RoPE without those of M-RoPE."""
    kept = {}
    for name, value in scaling.items():
        if name in ("mrope_section", "mrope_interleaved"):
            continue
        kept[name] = "default" if value == "mrope" else value
    return kept


def wrapped_rules(
    model_type: str, rules: list[Rule], config: Config, shape: ShapeOf
) -> list[Rule]:
    """Return the rules for the files of a multimodal model, given those of its language model."""
    wrapper = WRAPPERS.get(model_type)
    # the other families know the names of their multimodal files
    if wrapper is None:
        return rules
    own = [] if wrapper.own_rules is None else wrapper.own_rules(config, shape)
    wrapped = []
    for rule in [*own, *rules]:
        wrapped.append(_with_prefixes(rule, wrapper.prefixes))
    return [*wrapped, Drop(OTHER_PARTS)]


def _with_prefixes(rule: Rule, prefixes: str) -> Rule:
    """Return a rule that also matches the names in a multimodal file."""
    if isinstance(rule, Dequantize):
        return Dequantize(
            replace(rule.rule, hf_name=_wrapped_name(rule.rule.hf_name, prefixes))
        )
    return replace(rule, hf_name=_wrapped_name(rule.hf_name, prefixes))


def _wrapped_name(name: str, prefixes: str) -> str:
    """Return the pattern of a tensor's names in a multimodal file."""
    if name.startswith("lm_head."):
        return "{|language_model.|text_model.}" + name
    return re.sub(r"^(model|backbone)\.", lambda _: prefixes, name)


FAMILY = Family(
    model_types=tuple(WRAPPERS),
    # those of the default language model: `text_config` names its family, which then is read
    config=llama.config,
    rules=llama.rules,
    text_config=text_config,
)
