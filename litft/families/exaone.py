"""EXAONE 3.0 and 3.5 (LG, arXiv 2408.03541): Llama under the names of GPT-2."""

from typing import Any

from litft.checkpoints.rules import Rule
from litft.families import llama
from litft.families.family import Family
from litft.model.config import Config

LAYER_NAMES = {
    **{f"attention.{name}_proj": f"attn.attention.{name}_proj" for name in "qkv"},
    "attention.o_proj": "attn.attention.out_proj",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "mlp.gate_proj": "mlp.c_fc_0",
    "mlp.up_proj": "mlp.c_fc_1",
    "mlp.down_proj": "mlp.c_proj",
}


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' ExaoneConfig."""
    hf = {
        "num_hidden_layers": hf.get("num_layers", 32),
        "rms_norm_eps": hf.get("layer_norm_epsilon", 1e-5),
        "hidden_act": hf.get("activation_function", "silu"),
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        **hf,
    }
    return llama.config(hf, rope_theta=5e5)


def rules(config: Config) -> list[Rule]:
    """Return the rules for the published names, which transformers 5 writes, too."""
    return [
        *llama.embedding_and_head(config, "transformer.", "wte", "ln_f"),
        *llama.rename_modules(LAYER_NAMES, "transformer.h.{}."),
    ]


FAMILY = Family(
    model_types=("exaone",),
    config=config,
    rules=rules,
    peft_rules=llama.rules,
)
