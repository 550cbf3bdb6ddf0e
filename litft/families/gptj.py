"""GPT-J 6B (Wang and Komatsuzaki, 2021): parallel attention and MLP, interleaved RoPE on part of
each head."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Drop, Rule
from litft.families import gpt2, llama
from litft.families.family import Family
from litft.model.config import Config, NormConfig


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' GPTJConfig."""
    hf = {
        "n_positions": 2048,
        "activation_function": "gelu_new",
        "tie_word_embeddings": False,
        **hf,
    }
    head_dim = hf["n_embd"] / hf["n_head"]
    # null: the whole head is rotated
    rotary_dim = hf.get("rotary_dim", 64) or head_dim
    base = llama.config(gpt2.standard_names(hf), rope_fraction=rotary_dim / head_dim)
    return replace(
        base,
        norm=NormConfig("layer", hf.get("layer_norm_epsilon", 1e-5), bias=True),
        gated=False,
        parallel=True,
        shared_norm=True,
        rope_interleaved=True,
        mlp_bias=True,
        head_bias=True,
    )


def rules(config: Config) -> list[Rule]:
    """Return the rules, which only rename."""
    layers = "transformer.h.{}."
    names = {
        f"attention.{name}_proj": f"attn.{hf_name}_proj"
        for name, hf_name in zip("qkvo", ["q", "k", "v", "out"], strict=True)
    }
    names |= {
        "mlp.up_proj": "mlp.fc_in",
        "mlp.down_proj": "mlp.fc_out",
        "attention_norm": "ln_1",
    }
    # causal masks and angles, which old files have
    buffers = [
        Drop(f"{layers}attn.{name}") for name in ("bias", "masked_bias", "embed_positions")
    ]
    return [
        *llama.embedding_and_head(config, "transformer.", "wte", "ln_f"),
        *llama.rename_modules(names, layers),
        *buffers,
    ]


FAMILY = Family(
    model_types=("gptj",),
    config=config,
    rules=rules,
)
