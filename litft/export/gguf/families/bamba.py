"""GGUF files of Bamba, Falcon-H1."""

from typing import Any

from litft.checkpoints.rules import Rename, Reshape, Rule
from litft.families import llama
from litft.families.bamba import fused_projection, mixer_of
from litft.model.config import Config

GGUF_MAMBA = {  # metadata of the mixers of hybrids
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
    "ssm.inner_size": "mamba_width",
    "attention.head_count_kv": "num_key_value_heads",
    "rope.scaling.finetuned": "has_rope",
}


def gguf_mamba_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names of Mamba-2 mixers, none without mixers."""
    mamba = mixer_of(config)
    prefix = "blocks.{}.mixer."
    if mamba is None:
        return []
    if mamba.bias or mamba.out_bias:
        raise ValueError(
            "llama.cpp reads Mamba-2 layers without biases of their projections; keep the Hugging "
            "Face folder"
        )
    return [
        fused_projection(mamba, "blk.{}.ssm_in", "weight"),
        *llama.rename_modules(
            {"conv": "ssm_conv1d", "out_proj": "ssm_out"}, "blk.{}.", prefix
        ),
        Rename("blk.{}.ssm_dt.bias", f"{prefix}step_bias"),
        # llama.cpp stores the decay itself, -exp(A_log), with one row for each head
        Reshape("blk.{}.ssm_a", f"{prefix}log_rate", (-1, 1), (-1,), decay=True),
        Reshape("blk.{}.ssm_d", f"{prefix}skip", (-1, 1), (-1,)),
        Reshape(
            "blk.{}.ssm_norm.weight", f"{prefix}norm.weight", (mamba.n_groups, -1), (-1,)
        ),
    ]


def gguf_mamba(config: Config) -> dict[str, Any]:
    """Return the sizes of Mamba-2 mixers, if there are any, and which layers have them.

    Raise ValueError where llama.cpp has another width.
    """
    mamba = mixer_of(config)
    if mamba is None:
        return {}
    width = mamba.n_heads * mamba.head_dim
    if width != 2 * config.dim:
        raise ValueError(
            f"llama.cpp reads Mamba-2 layers only if they are {2 * config.dim} wide; keep the "
            "Hugging Face folder"
        )
    return {
        "ssm.conv_kernel": mamba.conv_width,
        "ssm.state_size": mamba.state_dim,
        "ssm.group_count": mamba.n_groups,
        "ssm.time_step_rank": mamba.n_heads,
        "ssm.inner_size": width,
        # 0 key heads: the layer has no attention, but a mixer
        "attention.head_count_kv": [
            config.n_kv_heads if layer.attention else 0 for layer in config.layers
        ],
        "rope.scaling.finetuned": any(layer.rope for layer in config.layers),
    }
