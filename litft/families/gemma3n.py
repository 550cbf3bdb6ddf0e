"""Gemma 3n (Google, 2025), the language model: four residual streams, per-layer embeddings, shared
keys, sparse MLPs."""

import math
from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rename, Rule
from litft.families import gemma, gemma4, llama
from litft.families.family import Family
from litft.model.config import AltUpConfig, Config, LayerConfig

DEFAULTS = dict(
    vocab_size=262400,
    hidden_size=2048,
    intermediate_size=16384,
    num_hidden_layers=35,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
    hidden_activation="gelu_pytorch_tanh",
    sliding_window=512,
    num_kv_shared_layers=15,
)
# litft's module names -> the files', within a layer
NAMES = {
    "altup.modality": "altup.modality_router",
    "altup.norm": "altup.router_norm",
    "altup.prediction": "altup.prediction_coefs",
    "altup.correction": "altup.correction_coefs",
    "laurel.left": "laurel.linear_left",
    "laurel.right": "laurel.linear_right",
    "laurel.norm": "laurel.post_laurel_norm",
}


def text_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the text model if `hf` is a multimodal model's, otherwise `hf`."""
    if hf["model_type"] == "gemma3n":
        return llama.text_model_config(hf, "gemma3n_text", "Gemma3nForCausalLM")
    return hf


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' Gemma3nTextConfig."""
    hf = {**DEFAULTS, **hf}
    widths = hf["intermediate_size"]
    if not isinstance(widths, list):
        widths = [widths] * hf["num_hidden_layers"]
    sparsity = _sparsity(hf)
    if {len(widths), len(sparsity)} != {hf["num_hidden_layers"]}:
        raise ValueError(
            "config.json: intermediate_size and activation_sparsity_pattern must list "
            f"{hf['num_hidden_layers']} values each"
        )
    plain = {
        "rope_parameters": None,
        "rope_scaling": None,
        "hidden_act": hf["hidden_activation"],
    }
    # widths differ between layers; this one is only a default
    base = llama.config({**hf, **plain, "intermediate_size": widths[0]})
    layers = _layers(hf, base, widths, sparsity)
    if not hf.get("altup_correct_scale", True):
        raise ValueError(
            "config.json: altup_correct_scale false is not supported; no published model has it"
        )
    streams = hf.get("altup_num_inputs", 4)
    active = hf.get("altup_active_idx", 0)
    if not hf.get("hidden_size_per_layer_input", 256):
        raise ValueError(
            "config.json: hidden_size_per_layer_input must be a whole number of at least 1 for "
            "this model_type"
        )
    if active >= streams:
        raise ValueError(
            f"config.json: altup_active_idx {active} must be below altup_num_inputs {streams}"
        )
    return replace(
        base,
        layers=layers,
        norm_position="both",
        mlp_bias=False,
        embed_scale=math.sqrt(base.dim),
        qk_norm=base.norm,
        value_norm=replace(base.norm, weight=False),
        logit_softcap=hf.get("final_logit_softcapping", 30.0),
        per_layer_dim=hf.get("hidden_size_per_layer_input", 256),
        per_layer_vocab_size=hf.get("vocab_size_per_layer_input", 262144),
        altup=AltUpConfig(streams, active, hf.get("laurel_rank", 64)),
    )


def _sparsity(hf: dict[str, Any]) -> list[float]:
    """Return the share of zeros among the gate values of each layer."""
    sparsity = hf.get("activation_sparsity_pattern")
    if sparsity is not None:
        return sparsity
    # as in transformers: of the first ten layers, 95 % of the gate values are set to zero
    count = hf["num_hidden_layers"]
    sparse = 10 if count > 10 else 0
    return [0.95] * sparse + [0.0] * (count - sparse)


def _layers(
    hf: dict[str, Any], base: Config, widths: list[int], sparsity: list[float]
) -> tuple[LayerConfig, ...]:
    """Return the layers, the last of which share the others' keys and values."""
    sliding = llama.sliding_layers(hf, lambda index: (index + 1) % 5 != 0)
    # of (full attention, window), to be indexed by whether the layer slides
    ropes = gemma.ropes_of_types(hf, base.head_dim)
    first_shared = hf["num_hidden_layers"] - hf["num_kv_shared_layers"]
    sharing = gemma4.kv_sharing(sliding, first_shared)
    windows = (None, gemma4.window_size(hf))
    layers = []
    for number, slides in enumerate(sliding):
        layer = replace(
            base.layers[0],
            rope=ropes[slides],
            window=windows[slides],
            attention_scale=1.0,
            hidden_dim=widths[number],
            sparsity=sparsity[number],
            kv_sharing=sharing[number],
        )
        layers.append(layer)
    return tuple(layers)


def rules(config: Config) -> list[Rule]:
    """Return Gemma 4's rules, with those of the residual streams."""
    model = gemma4.MODEL
    layers = gemma4.LAYERS
    # linear maps from the first residual stream to the others, and at the end back
    names = {"expansions": "altup_projections", "reductions": "altup_unembed_projections"}
    stream_rules = []
    for name, hf_name in names.items():
        stored = f"{model}{hf_name}.{{}}.weight"
        stream_rules.append(Rename(stored, f"streams.{name}.{{}}.weight"))
    return [
        *stream_rules,
        *llama.rename_modules(NAMES, layers),
        Rename(f"{layers}altup.correct_output_scale", "blocks.{}.altup.output_scale"),
        *gemma4.rules(config),
    ]


FAMILY = Family(
    model_types=("gemma3n_text", "gemma3n"),
    config=config,
    rules=rules,
    text_config=text_config,
    fits_fp16=False,
)
