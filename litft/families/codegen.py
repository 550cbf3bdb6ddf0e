"""CodeGen (arXiv 2203.13474): GPT-J with fused projections."""

from typing import Any

from litft.checkpoints.rules import Drop, Rule, Split
from litft.families import gptj
from litft.families.family import Family
from litft.families.phi3 import qkv_names
from litft.model.config import Config

# the rows of q, v and k alternate in four parts, one
# for each of the TPU cores that it was trained on
GROUPS = 4


def config(hf: dict[str, Any]) -> Config:
    """Read config.json; missing fields have the defaults of transformers' CodeGenConfig."""
    # a field of CodeGen2, two of whose models have the rows in eight parts
    if hf.get("head_dim") is not None:
        raise ValueError(
            f"config.json: head_dim {hf['head_dim']} is CodeGen2's, which is not supported: its "
            "weights may have another layout"
        )
    return gptj.config(hf)


def rules(config: Config) -> list[Rule]:
    """Return the rules for GPT-J's names, with q, v and k fused."""
    q, k, v = qkv_names("weight")
    fused = Split(
        "transformer.h.{}.attn.qkv_proj.weight",
        (q, v, k),
        (config.dim // GROUPS,) * 3,
        GROUPS,
    )
    return [fused, *gptj.rules(config), Drop("transformer.h.{}.attn.causal_mask")]


FAMILY = Family(
    model_types=("codegen",),
    config=config,
    rules=rules,
)
