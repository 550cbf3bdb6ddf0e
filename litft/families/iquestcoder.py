"""IQuest-Coder V1 (2026): Llama under a name of its own."""

from typing import Any

from litft.families import llama
from litft.families.family import Family
from litft.model.config import Config

DEFAULTS = dict(
    num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5
)


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' IQuestCoderConfig."""
    return llama.config({**DEFAULTS, **hf})


FAMILY = Family(
    model_types=("iquestcoder",),
    config=config,
    rules=llama.rules,
)
