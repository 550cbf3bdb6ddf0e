"""GPT-BigCode (arXiv 2301.03988), StarCoder: GPT-2 with one key/value head, its Linears stored as such."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.conversion import Rule, Split
from litft.families import gpt2, llama
from litft.families.phi3 import qkv
from litft.model.config import Config

MODEL_TYPES = ("gpt_bigcode",)


def config(hf: dict[str, Any]) -> Config:
    """Defaults are those of transformers' GPTBigCodeConfig."""
    plain = gpt2.config({"activation_function": "gelu_pytorch_tanh", **hf})
    return replace(plain, n_kv_heads=1 if hf.get("multi_query", True) else plain.n_heads)


def rules(config: Config) -> list[Rule]:
    """All queries, one key and one value; or, with as many of those, interleaved head by head."""
    sizes = (config.n_heads // config.n_kv_heads * config.head_dim, config.head_dim, config.head_dim)
    fused = [Split(f"{gpt2.LAYERS}attn.c_attn.{n}", qkv(n), sizes, config.n_kv_heads) for n in ("weight", "bias")]
    return [*gpt2.ends(config), *llama.named(gpt2.LINEARS | gpt2.NORMS, gpt2.LAYERS), *fused]
