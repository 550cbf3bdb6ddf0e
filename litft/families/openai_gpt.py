"""GPT (Radford et al., 2018): GPT-2 with a norm after each residual sum, and no final norm."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Drop, Rename, Rule, Split
from litft.families import gpt2, llama
from litft.families.family import Family
from litft.families.phi3 import qkv_names
from litft.model.config import Config, NormConfig

LAYERS = "transformer.h.{}."
NORMS = {"attention_post_norm": "ln_1", "mlp_post_norm": "ln_2"}


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' OpenAIGPTConfig."""
    # transformers means the tanh approximation by gelu here
    activation = hf.get("afn", "gelu")
    fields = {
        "n_positions": 512,
        **hf,
        "n_inner": None,
        "activation_function": "gelu_new" if activation == "gelu" else activation,
    }
    base = llama.config(gpt2.standard_names(fields))
    return replace(
        base,
        layers=tuple(replace(layer, rope=None) for layer in base.layers),
        norm=NormConfig("layer", hf.get("layer_norm_epsilon", 1e-5), bias=True),
        # the norms follow the sums, so none is needed before the head
        norm_position="residual",
        final_norm=False,
        gated=False,
        learned_positions=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )


def rules(config: Config) -> list[Rule]:
    """Return the rules; Linears are Conv1D with weights (in, out)."""
    names = gpt2.LINEARS
    sizes = (config.dim,) * 3
    weights = [
        Rename(f"{LAYERS}{n}.weight", f"blocks.{{}}.{name}.weight", transposed=True)
        for name, n in names.items()
    ]
    return [
        *llama.embedding_and_head(config, "transformer.", "tokens_embed"),
        *llama.rename_modules({"embed_positions": "transformer.positions_embed"}, "", ""),
        # before the plain rules, which are then for biases and norms only
        *weights,
        *llama.rename_modules(names | NORMS, LAYERS),
        Split(f"{LAYERS}attn.c_attn.weight", qkv_names("weight"), sizes, transposed=True),
        Split(f"{LAYERS}attn.c_attn.bias", qkv_names("bias"), sizes),
        *(Drop(name) for name in (f"{LAYERS}attn.bias", "transformer.position_ids")),
    ]


FAMILY = Family(
    model_types=("openai-gpt",),
    config=config,
    rules=rules,
)
