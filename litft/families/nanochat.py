"""nanochat (Karpathy, 2025): weightless norms, also of the embedding and of rotated queries and
keys; squared ReLU."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.rules import Rule
from litft.families import llama
from litft.families.family import Family
from litft.model.config import Config, NormConfig


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' NanoChatConfig."""
    base = llama.config({"hidden_act": "relu2", **hf})
    # norms have no weight, and RoPE rotates by the negative angles
    norm = NormConfig("rms", base.norm.eps, weight=False)
    rope = base.layers[0].rope
    assert rope is not None  # `llama.config` gives every layer one
    layer = replace(base.layers[0], rope=replace(rope, reversed=True))
    return replace(
        base,
        layers=(layer,) * len(base.layers),
        norm=norm,
        embed_norm=norm,
        qk_norm=norm,
        qk_norm_after_rope=True,
        gated=False,
        mlp_bias=False,
        logit_softcap=hf.get("final_logit_softcapping", 15.0),
    )


def rules(config: Config) -> list[Rule]:
    """Return the rules for Llama's attention and CLIP's MLP."""
    return [
        *llama.rename_modules({"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}),
        *llama.rules(config),
    ]


FAMILY = Family(
    model_types=("nanochat",),
    config=config,
    rules=rules,
)
