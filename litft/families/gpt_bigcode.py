"""GPT-BigCode (arXiv 2301.03988), StarCoder: GPT-2 with one key/value head and untransposed
Linears."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rule
from litft.families import gpt2, llama
from litft.families.family import Family
from litft.families.phi3 import fused_qkv
from litft.model.config import Config


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' GPTBigCodeConfig."""
    # which only GPT-2 obeys
    ignored = {"scale_attn_by_inverse_layer_idx": False}
    base = gpt2.config({"activation_function": "gelu_pytorch_tanh", **hf, **ignored})
    if hf.get("multi_query", True):
        return replace(base, n_kv_heads=1)
    return replace(base, n_kv_heads=base.n_heads)


def rules(config: Config) -> list[Rule]:
    """Return the rules; the fused q/k/v has all queries, one key and one value, or is interleaved
    by head without MQA."""
    sizes = (
        config.n_heads // config.n_kv_heads * config.head_dim,
        config.head_dim,
        config.head_dim,
    )
    fused = fused_qkv(f"{gpt2.LAYERS}attn.c_attn", sizes, config.n_kv_heads)
    return [
        *gpt2.embedding_and_head(config),
        *llama.rename_modules(gpt2.LINEARS | gpt2.NORMS, gpt2.LAYERS),
        *fused,
    ]


FAMILY = Family(
    model_types=("gpt_bigcode",),
    config=config,
    rules=rules,
)
