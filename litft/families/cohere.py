"""Cohere's Command-R, R+, R7B and A, Aya: parallel blocks with one bias-free LayerNorm, interleaved
RoPE."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rule
from litft.families import deepseek, llama
from litft.families.family import Family
from litft.model.config import Config, ExpertsConfig, LayerConfig, NormConfig


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' CohereConfig and
    Cohere2Config.

    Cohere2 applies RoPE only in layers with a sliding window.
    """
    is_cohere2 = hf["model_type"] != "cohere"
    hf = {
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        **hf,
    }
    is_mixture = hf["model_type"] == "cohere2_moe"
    if is_mixture and hf.get("rope_scaling"):
        raise ValueError(
            "config.json: transformers ignores rope_scaling of cohere2_moe; write its fields "
            "into rope_parameters"
        )
    # in other models, the heads divide the hidden size
    head_dim = hf.get("head_dim", 128) if is_mixture else None
    theta = 1e4 if is_cohere2 else 5e5
    base = llama.config({**hf, "head_dim": head_dim}, rope_theta=theta)
    norm = NormConfig("layer", hf.get("layer_norm_eps", 1e-5))
    # a mixture has RMS norms if the file has their epsilon
    if is_mixture and hf.get("rms_norm_eps") is not None:
        norm = base.norm
    layers = base.layers
    if is_cohere2:
        pattern = hf.get("sliding_window_pattern", 4)
        start = hf.get("first_k_dense_replace", 0)
        first = hf.get("prefix_dense_sliding_window_pattern", 1)

        # the dense layers at the start of a mixture have a pattern of their own
        def slides(index: int) -> bool:
            if index < start:
                return (index + 1) % first != 0
            return (index - start + 1) % pattern != 0

        windows = llama.layer_windows(hf, slides)
        layers = llama.local_rope_layers(base, windows)
    if is_mixture:
        layers = _with_experts(hf, base, list(layers))
    qk_norm = norm if hf.get("use_qk_norm") else None
    return replace(
        base,
        layers=layers,
        norm=norm,
        mlp_bias=False,
        parallel=True,
        shared_norm=True,
        rope_interleaved=True,
        qk_norm=qk_norm,
        qk_norm_over="heads",
        logit_scale=hf.get("logit_scale") or 0.0625,
    )


def _with_experts(
    hf: dict[str, Any], base: Config, layers: list[LayerConfig]
) -> tuple[LayerConfig, ...]:
    """Return the layers of Cohere2 MoE; those of the dense prefix have RoPE in any case, and
    another width."""
    num_shared = hf.get("num_shared_experts") or 0
    scoring = hf.get("expert_selection_fn", "softmax")
    # the average of both outputs is half of their sum
    is_average = (
        num_shared and hf.get("shared_expert_combination_strategy", "average") == "average"
    )
    output_scale = 0.5 if is_average else 1.0
    experts = ExpertsConfig(
        hf.get("num_experts", 8),
        hf.get("num_experts_per_tok", 2),
        base.hidden_dim,
        renormalize=scoring == "softmax" or hf.get("norm_topk_prob", True),
        shared_dim=base.hidden_dim * num_shared,
        scoring=scoring,
        output_scale=output_scale,
    )
    layers = list(
        deepseek.sparse_layers({"first_k_dense_replace": 0, **hf}, layers, experts)
    )
    for number, layer in enumerate(layers):
        if not layer.experts:
            # a pattern of 1 has full attention in all of these
            # layers, which would leave them without RoPE
            forced = hf.get("prefix_dense_sliding_window_pattern", 1) == 1
            rope = base.layers[0].rope if forced else layer.rope
            layers[number] = replace(
                layer, rope=rope, hidden_dim=hf.get("prefix_dense_intermediate_size")
            )
    return tuple(layers)


def rules(config: Config) -> list[Rule]:
    """Return the rules for Llama's names, with a single norm per layer."""
    names = (
        llama.ATTENTION | llama.QK_NORMS | llama.MLP | {"attention_norm": "input_layernorm"}
    )
    if config.model_type == "cohere2_moe":
        mixture = deepseek.mixture_rules(config)
    else:
        mixture = []
    return [*mixture, *llama.embedding_and_head(config), *llama.rename_modules(names)]


def peft_rules(config: Config) -> list[Rule]:
    """Return the rules for PEFT's names of experts and router."""
    return deepseek.peft_rules(config)


FAMILY = Family(
    model_types=("cohere", "cohere2", "cohere2_moe"),
    config=config,
    rules=rules,
    peft_rules=peft_rules,
)
