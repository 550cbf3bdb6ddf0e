"""GPT (Radford et al., 2018): GPT-2 with a norm after each residual sum, and no final norm."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Drop, Rule
from litft.families import gpt2, llama
from litft.families.family import Family
from litft.model.config import Config, NormConfig

# as published, names lack the prefix
LAYERS = "{transformer.|}h.{}."
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
        layers=llama.changed_layers(base, rope=None),
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
    return [
        *llama.embedding_and_head(config, "{transformer.|}", "tokens_embed"),
        *llama.rename_modules(
            {"embed_positions": "{transformer.|}positions_embed"}, "", ""
        ),
        *gpt2.conv1d_rules(config, LAYERS, NORMS),
        Drop(f"{LAYERS}attn.bias"),
        Drop("{transformer.|}position_ids"),
    ]


FAMILY = Family(
    model_types=("openai-gpt",),
    config=config,
    rules=rules,
)
