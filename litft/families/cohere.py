"""Cohere's Command-R, R+ and R7B, Aya: parallel blocks with one bias-free LayerNorm, interleaved RoPE."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.conversion import Rule
from litft.families import llama
from litft.model.config import Config, NormConfig

MODEL_TYPES = ("cohere", "cohere2")


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' CohereConfig and Cohere2Config.

    Cohere2 applies RoPE only in layers with a sliding window.
    """
    is_cohere2 = hf["model_type"] == "cohere2"
    hf = {"tie_word_embeddings": True, "max_position_embeddings": 8192, "sliding_window": 4096, **hf}
    base = llama.config({**hf, "head_dim": None}, rope_theta=1e4 if is_cohere2 else 5e5)
    norm = NormConfig("layer", hf.get("layer_norm_eps", 1e-5))
    layers = base.layers
    if is_cohere2:
        pattern = hf.get("sliding_window_pattern", 4)
        windows = llama.layer_windows(hf, lambda index: (index + 1) % pattern != 0)
        layers = tuple(
            replace(base.layers[0], window=window, rope=base.layers[0].rope if window else None) for window in windows
        )
    return replace(
        base,
        layers=layers,
        norm=norm,
        mlp_bias=False,
        parallel=True,
        shared_norm=True,
        rope_interleaved=True,
        qk_norm=norm if hf.get("use_qk_norm") else None,
        qk_norm_over="heads",
        logit_scale=hf.get("logit_scale", 0.0625),
    )


def rules(config: Config) -> list[Rule]:
    """Return the rules for Llama's names, with a single norm per layer."""
    names = llama.ATTENTION | llama.QK_NORMS | llama.MLP | {"attention_norm": "input_layernorm"}
    return [*llama.embedding_and_head(config), *llama.rename_modules(names)]
