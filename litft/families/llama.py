"""Llama 1 to 3.3 and the many models of its shape (arXiv 2302.13971, 2407.21783)."""

from typing import Any

from litft.config import Config, Layer, Rope
from litft.rules import Drop, Rename, Rule

MODEL_TYPES = ("llama",)


def config(hf: dict[str, Any]) -> Config:
    """Defaults are those of transformers' LlamaConfig."""
    heads = hf["num_attention_heads"]
    head_dim = hf.get("head_dim") or hf["hidden_size"] // heads
    layer = Layer(rope=Rope.from_hf(hf, head_dim))
    return Config(
        model_type=hf["model_type"],
        vocab_size=hf["vocab_size"],
        context=hf.get("max_position_embeddings", 2048),
        dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"],
        n_heads=heads,
        n_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        layers=(layer,) * hf["num_hidden_layers"],
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        activation=hf.get("hidden_act", "silu"),
        qkv_bias=hf.get("attention_bias", False),
        o_bias=hf.get("attention_bias", False),
        mlp_bias=hf.get("mlp_bias", False),
        tied=hf.get("tie_word_embeddings", False),
    )


def rules(config: Config) -> list[Rule]:
    """Plain renames; biases are there or not, as the config says."""
    linears = [f"attention.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    return [
        Rename("model.embed_tokens.weight", "embed.weight"),
        *(
            Rename(f"model.layers.{{}}.{ours.replace('attention', 'self_attn')}.{part}", f"blocks.{{}}.{ours}.{part}")
            for ours in linears
            for part in ("weight", "bias")
        ),
        Rename("model.layers.{}.input_layernorm.weight", "blocks.{}.attention_norm.weight"),
        Rename("model.layers.{}.post_attention_layernorm.weight", "blocks.{}.mlp_norm.weight"),
        Rename("model.norm.weight", "norm.weight"),
        Drop("lm_head.weight") if config.tied else Rename("lm_head.weight", "lm_head.weight"),
        Drop("model.layers.{}.self_attn.rotary_emb.inv_freq"),
    ]
