"""Muse Glimmer (Meta, 2026): Trinity's gated attention, Gemma's norms, and a norm of the
embedding."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rule
from litft.families import gemma, llama
from litft.families.family import Family
from litft.families.granite import layer_thetas
from litft.model.config import Config, LayerConfig

# defaults of transformers' MuseGlimmerTextConfig
DEFAULTS = dict(
    vocab_size=202_048,
    hidden_size=6656,
    intermediate_size=19_968,
    num_hidden_layers=52,
    num_attention_heads=32,
    num_key_value_heads=2,
    head_dim=128,
    hidden_activation="silu",
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    sliding_window=2048,
    final_logit_softcapping=20.0,
)


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers'
    MuseGlimmerTextConfig."""
    hf = {**DEFAULTS, **hf}
    base = llama.config({**hf, "hidden_act": hf["hidden_activation"]})
    # norms in the blocks multiply by 1 + weight, that before the head by the weight
    plain = base.norm
    centered = replace(plain, offset=1.0)
    without_weight = replace(plain, weight=False)
    base = replace(
        base,
        norm=centered,
        post_norm=replace(centered, eps=hf.get("post_norm_eps", 1e-8)),
        final_norm=plain,
        norm_position="both",
        embed_norm=without_weight,
        noise_after="norm",
        qk_norm=without_weight,
        attention_gate=True,
        logit_scale=hf.get("output_multiplier", 0.19611613513818404),
        logit_softcap=hf["final_logit_softcapping"],
    )
    scale = hf.get("qk_scale_factor", 3.87) / base.head_dim**0.5
    base = replace(base, layers=llama.changed_layers(base, attention_scale=scale))
    return replace(base, layers=_layers(hf, base))


def _layers(hf: dict[str, Any], base: Config) -> tuple[LayerConfig, ...]:
    """Return the layers: every fourth one, counted from the last, has full attention without
    RoPE."""
    count = hf["num_hidden_layers"]

    def is_local(index: int) -> bool:
        return (count - 1 - index) % 4 != 0

    layers = list(llama.windowed_layers(base, llama.layer_windows(hf, is_local)))
    thetas = layer_thetas(hf)
    for index, layer in enumerate(layers):
        # by default independent of `layer_types`, as in transformers
        rotates = is_local(index) if thetas is None else bool(thetas[index])
        if not rotates:
            layers[index] = replace(layer, rope=None)
        # transformers reads the list only for whether a layer has RoPE
        elif thetas is not None and layer.rope and thetas[index] != layer.rope.theta:
            raise ValueError(
                f"config.json: layer_rope_theta {thetas[index]!r} of layer {index} is neither 0 "
                f"nor rope_theta, {layer.rope.theta:g}; other bases are not supported"
            )
    return tuple(layers)


def rules(config: Config) -> list[Rule]:
    """Return the rules for Llama's names, with Gemma's four norms a layer and the output gate."""
    gate = {"attention.gate_proj": "self_attn.gate_proj"}
    return [*llama.rename_modules(gate), *llama.rules(config, norms=gemma.POST_NORMS)]


FAMILY = Family(
    model_types=("muse_glimmer_text",),
    config=config,
    rules=rules,
)
