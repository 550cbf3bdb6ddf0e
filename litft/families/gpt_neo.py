"""GPT-Neo (Black et al., 2021): GPT-2 with unscaled attention and a window of 256 tokens in every
second layer."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Drop, Rule
from litft.families import gpt2, llama
from litft.families.family import Family
from litft.model.config import Config, NormConfig

LAYERS = "transformer.h.{}."
NAMES = {f"attention.{n}_proj": f"attn.attention.{n}_proj" for n in "qkv"} | {
    "attention.o_proj": "attn.attention.out_proj"
}
NAMES |= {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"} | gpt2.NORMS


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' GPTNeoConfig."""
    names = {
        "hidden_size": "n_embd",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "intermediate_size": "n_inner",
    }
    hf = {"max_position_embeddings": 2048, "activation_function": "gelu_new", **hf}
    gpt2_fields = {}
    for name, gpt2_name in names.items():
        if name in hf:
            gpt2_fields[gpt2_name] = hf[name]
    base = llama.config(
        gpt2.standard_names(
            {**hf, **gpt2_fields, "n_positions": hf["max_position_embeddings"]}
        )
    )

    # [[kinds of layers, how often they repeat], ...]
    kinds: list[str] = []
    for repeated, repeats in hf.get("attention_types") or [[["global", "local"], 12]]:
        kinds += repeated * repeats
    if len(kinds) != len(base.layers) or not {"global", "local"}.issuperset(kinds):
        raise ValueError(
            f"config.json: attention_types must describe {len(base.layers)} layers, found "
            f"{kinds!r:.200}"
        )
    window = hf.get("window_size", 256)
    windows = [window if kind == "local" else None for kind in kinds]
    # scores are not scaled, and positions are a table
    base = replace(base, layers=llama.changed_layers(base, rope=None, attention_scale=1.0))
    return replace(
        base,
        layers=llama.windowed_layers(base, windows),
        norm=NormConfig("layer", hf.get("layer_norm_epsilon", 1e-5), bias=True),
        gated=False,
        learned_positions=True,
        o_bias=True,
        mlp_bias=True,
    )


def rules(config: Config) -> list[Rule]:
    """Return the rules, which only rename."""
    # causal masks, which old files have
    masks = [Drop(f"{LAYERS}attn.attention.{name}") for name in ("bias", "masked_bias")]
    positions = llama.rename_modules({"embed_positions": "transformer.wpe"}, "", "")
    outer = llama.embedding_and_head(config, "transformer.", "wte", "ln_f")
    return [*outer, *positions, *llama.rename_modules(NAMES, LAYERS), *masks]


FAMILY = Family(
    model_types=("gpt_neo",),
    config=config,
    rules=rules,
)
