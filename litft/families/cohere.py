"""Cohere's Command-R, R+ and R7B, Aya: parallel blocks on one LayerNorm without bias, interleaved rotation."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.conversion import Rule
from litft.families import llama
from litft.model.config import Config, NormConfig

MODEL_TYPES = ("cohere", "cohere2")


def config(hf: dict[str, Any]) -> Config:
    """Defaults are those of transformers' CohereConfig and Cohere2Config; in the second, full attention has no rotation."""
    second = hf["model_type"] == "cohere2"
    hf = {"tie_word_embeddings": True, "max_position_embeddings": 8192, "sliding_window": 4096, **hf}
    plain = llama.config({**hf, "head_dim": None}, rope_base=1e4 if second else 5e5)
    norm = NormConfig("layer", hf.get("layer_norm_eps", 1e-5))
    layers = plain.layers
    if second:
        pattern = hf.get("sliding_window_pattern", 4)
        windows = llama.windows(hf, lambda index: (index + 1) % pattern != 0)
        layers = tuple(replace(plain.layers[0], window=w, rope=plain.layers[0].rope if w else None) for w in windows)
    return replace(
        plain,
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
    """Plain renames."""
    names = llama.ATTENTION | llama.QK_NORMS | llama.MLP | {"attention_norm": "input_layernorm"}
    return [*llama.ends(config), *llama.named(names)]
