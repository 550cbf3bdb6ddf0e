"""Llama 4 (Meta, 2025), the language model: chunked attention, scaled NoPE layers, experts with
weighted inputs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from litft.checkpoints.peft_module_names import ModuleNames
from litft.checkpoints.rules import Drop, Rename, Rule, Split
from litft.families import llama, mixtral, smollm3
from litft.families.family import Family
from litft.model.config import Chunk, Config, ExpertsConfig, NormConfig
from litft.model.rope_config import RopeConfig

# text files, and multimodal ones
MODEL = "{model.|language_model.model.}"
DEFAULTS = dict(
    num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5
)


def text_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the text model if `hf` is a multimodal model's, otherwise `hf`."""
    if hf["model_type"] == "llama4":
        return llama.text_model_config(hf, "llama4_text", "Llama4ForCausalLM")
    return hf


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' Llama4TextConfig."""
    hf = {**DEFAULTS, **hf}
    base = llama.config(hf, rope_theta=500000.0)
    experts = _experts(hf, base.hidden_dim)
    uses_rope = smollm3.layers_with_rope(hf)
    kinds = {"full_attention": False, "chunked_attention": True}
    # by default, layers with RoPE attend within chunks only
    is_chunked = llama.layer_kinds(hf, kinds, lambda n: bool(uses_rope[n]))
    size = hf.get("attention_chunk_size", 8192)
    if size:
        chunk = Chunk(size)
    else:
        chunk = None
    nope = _scaling_without_rotation(hf)
    sparse = _sparse_layers(hf, len(base.layers))
    layers = tuple(
        replace(
            layer,
            rope=layer.rope if uses_rope[n] else nope,
            qk_norm=bool(uses_rope[n]),
            window=chunk if is_chunked[n] else None,
            experts=experts if n in sparse else None,
        )
        for n, layer in enumerate(base.layers)
    )
    # of queries and keys after RoPE, in the layers that have RoPE
    if hf.get("use_qk_norm") is not False:
        qk_norm = NormConfig("rms", base.norm.eps, weight=False)
    else:
        qk_norm = None
    # layers without experts have an MLP of a width of their own
    dense = dict(
        hidden_dim=hf.get("intermediate_size_mlp", 16384),
        rope_interleaved=True,
        mlp_bias=False,
    )
    return replace(base, layers=layers, qk_norm=qk_norm, qk_norm_after_rope=True, **dense)


def _experts(hf: dict[str, Any], width: int) -> ExpertsConfig:
    """Return the experts; their scores multiply the input of an expert, not its output."""
    return ExpertsConfig(
        hf.get("num_local_experts", 16),
        hf.get("num_experts_per_tok", 1),
        width,
        renormalize=False,
        scoring="sigmoid",
        weighted_input=True,
        shared_dim=width,
    )


def _scaling_without_rotation(hf: dict[str, Any]) -> RopeConfig:
    """Return what scales the queries of layers without RoPE by their position: a RoPE of no
    dimension."""
    if hf.get("attn_temperature_tuning", True):
        scale = hf.get("attn_scale", 0.1)
    else:
        scale = 0.0
    return RopeConfig(
        1.0,
        0,
        original_max_positions=hf.get("floor_scale", 8192),
        query_beta=scale,
        query_offset=1,
    )


def _sparse_layers(hf: dict[str, Any], num_layers: int) -> Sequence[int]:
    """Return the numbers of the layers that are a mixture; by default, each `step`-th one."""
    step = hf.get("interleave_moe_layer_step", 1)
    sparse = hf.get("moe_layers")
    if sparse is None:
        sparse = range(step - 1, num_layers, step)
    if any(n >= num_layers for n in sparse):
        raise ValueError(
            f"config.json: moe_layers must list numbers of layers, found {sparse!r:.200}"
        )
    return sparse


def rules(config: Config) -> list[Rule]:
    """Return the rules, also for the multimodal checkpoint.

    Fused experts are stored as (E, C, 2 I) and (E, I, C).
    """
    prefix = "blocks.{}.mlp."
    hf_prefix = f"{MODEL}layers.{{}}.feed_forward."
    gate_up = (f"{prefix}experts.gate_proj.weight", f"{prefix}experts.up_proj.weight")
    experts = mixtral.experts_of(config)
    width = experts.hidden_dim if experts else 0
    names = {name: name for name in llama.PROJECTIONS.values()}
    names["router"] = "router"
    names |= llama.mlp_names("shared", "shared_expert")
    return [
        *llama.rename_modules(names, hf_prefix, prefix),
        *llama.rules(config, MODEL, "{|language_model.}lm_head"),
        # transformers' class does not tell PEFT that its stacks are transposed
        Split(
            f"{hf_prefix}experts.gate_up_proj",
            gate_up,
            (width, width),
            transposed=True,
            known_to_peft=False,
        ),
        Rename(
            f"{hf_prefix}experts.down_proj",
            f"{prefix}experts.down_proj.weight",
            transposed=True,
            known_to_peft=False,
        ),
        Drop("{vision_model|multi_modal_projector}.{*}"),
    ]


FAMILY = Family(
    model_types=("llama4_text", "llama4"),
    config=config,
    rules=rules,
    text_config=text_config,
    wrapper=ModuleNames("language_model.model.", "language_model.lm_head"),
    has_text_class=True,
)
