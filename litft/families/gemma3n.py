"""Gemma 3n (Google, 2025), the language model: four residual streams, per-layer embeddings, shared
keys, sparse MLPs."""

import math
from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rename, Rule
from litft.families import gemma, gemma4, llama
from litft.families.family import Family
from litft.model.config import AltUpConfig, Config

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
    count = hf["num_hidden_layers"]
    widths = hf["intermediate_size"]
    sparsity = hf.get("activation_sparsity_pattern")
    widths = widths if isinstance(widths, list) else [widths] * count
    # as in transformers: of the first ten layers, 95 % of the gate values are set to zero
    sparse = 10 if count > 10 else 0
    if sparsity is None:
        sparsity = [0.95] * sparse + [0.0] * (count - sparse)
    if len(widths) != count or len(sparsity) != count:
        raise ValueError(
            f"config.json: intermediate_size and activation_sparsity_pattern must list {count} "
            "values each"
        )
    plain = {"rope_parameters": None, "rope_scaling": None, "hidden_act": hf["hidden_activation"]}
    # widths differ between layers; this one is only a default
    base = llama.config({**hf, **plain, "intermediate_size": widths[0]})
    sliding = llama.sliding_layers(hf, lambda index: (index + 1) % 5 != 0)
    ropes = gemma.ropes_of_types(hf, base.head_dim)
    first_shared = count - hf["num_kv_shared_layers"]
    sharing = gemma4.kv_sharing(sliding, first_shared)
    window = gemma4.window_size(hf)
    layers = tuple(
        replace(
            layer,
            rope=ropes[sliding[n]],
            window=window if sliding[n] else None,
            attention_scale=1.0,
            hidden_dim=widths[n],
            sparsity=sparsity[n],
            kv_sharing=sharing[n],
        )
        for n, layer in enumerate(base.layers)
    )
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


def rules(config: Config) -> list[Rule]:
    """Return Gemma 4's rules, with those of the residual streams."""
    model = gemma4.MODEL
    layers = gemma4.LAYERS
    # linear maps from the first residual stream to the others, and at the end back
    streams = {"expansions": "altup_projections", "reductions": "altup_unembed_projections"}
    return [
        *(
            Rename(f"{model}{hf_name}.{{}}.weight", f"streams.{name}.{{}}.weight")
            for name, hf_name in streams.items()
        ),
        *llama.rename_modules(NAMES, layers),
        Rename(f"{layers}altup.correct_output_scale", "blocks.{}.altup.output_scale"),
        *gemma4.rules(config),
    ]


FAMILY = Family(
    model_types=("gemma3n_text", "gemma3n"),
    config=config,
    rules=rules,
    text_config=text_config,
)
