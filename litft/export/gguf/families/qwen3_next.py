"""GGUF files of Qwen3-Next and Qwen3.5."""

from typing import Any

from litft.checkpoints.rules import InterleaveValueHeads, Rename, Rule, Shift, Split
from litft.export.gguf.families import llama, qwen2_moe
from litft.export.gguf.families.family import GgufFamily
from litft.families.qwen3_next import delta_of
from litft.model.config import Config

GGUF = {
    "qwen3_next": ("qwen3next", "Qwen3NextForCausalLM"),
    "qwen3_5_text": ("qwen35", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe_text": ("qwen35moe", "Qwen3_5MoeForCausalLM"),
}
GGUF_MIXERS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": "linear_value_width",
    "attention.recurrent_layers": "layer_types",
    "rope.dimension_sections": "mrope_section",
}
GGUF_FIELDS = GGUF_MIXERS | qwen2_moe.GGUF_FIELDS


def gguf_rules(config: Config) -> list[Rule]:
    """Return the rules for llama.cpp's names; it stores norm weights plus 1, and Qwen3.5's value
    heads in another order."""
    delta = delta_of(config)
    prefix = "blocks.{}.mixer."
    if config.model_type == "qwen3_next":
        # one value head for each key head: tiling then
        # changes nothing, and Qwen3-Next keeps its order
        key_heads = delta.n_heads
    else:
        key_heads = delta.n_key_heads
    key_width = delta.n_key_heads * delta.key_dim
    heads = delta.n_heads
    values = delta.n_heads * delta.value_dim
    q_gate = ("blocks.{}.attention.q_proj.weight", "blocks.{}.attention.gate_proj.weight")

    def qkv_names(leaf: str) -> tuple[str, ...]:
        return tuple(f"{prefix}{part}_{leaf}.weight" for part in ("query", "key", "value"))

    def tile(
        gguf_name: str, name: str | tuple[str, ...], *sizes: int, **settings: bool
    ) -> InterleaveValueHeads:
        # the number of rows shows which tensors have one number for each head
        if sizes == (heads,):
            head_dim = 1
        else:
            head_dim = delta.value_dim
        return InterleaveValueHeads(
            f"blk.{{}}.{gguf_name}", name, sizes, key_heads, head_dim, **settings
        )

    beta = f"{prefix}beta_proj.weight"
    decay = f"{prefix}decay_proj.weight"
    steps: list[Rule] = [
        tile("ssm_beta.weight", beta, heads),
        tile("ssm_alpha.weight", decay, heads),
    ]
    if config.model_type == "qwen3_next":
        sizes = (heads // delta.n_key_heads,) * 2
        # fused in llama.cpp's files of Qwen3-Next, too
        steps = [Split("blk.{}.ssm_ba.weight", (beta, decay), sizes, delta.n_key_heads)]
    return [
        Split("blk.{}.attn_q.weight", q_gate, (config.head_dim,) * 2, config.n_heads),
        tile("attn_qkv.weight", qkv_names("proj"), key_width, key_width, values),
        tile("ssm_conv1d.weight", qkv_names("conv"), key_width, key_width, values),
        tile("attn_gate.weight", f"{prefix}gate_proj.weight", values),
        *steps,
        tile("ssm_dt.bias", f"{prefix}decay_bias", heads),
        tile("ssm_a", f"{prefix}log_rate", heads, decay=True),
        tile("ssm_out.weight", f"{prefix}out_proj.weight", values, columns=True),
        Rename("blk.{}.ssm_norm.weight", f"{prefix}norm.weight"),
        *_norm_rules(),
        *qwen2_moe.gguf_mixture_rules(),
        *llama.gguf_names(config, llama.GGUF_ATTENTION | llama.GGUF_MLP),
    ]


def _norm_rules() -> list[Rule]:
    """Return the rules of norms, which are stored plus 1."""
    names = {"attention_norm": "attn_norm", "mlp_norm": "post_attention_norm"}
    rules: list[Rule] = []
    for name, gguf_name in (names | llama.GGUF_QK_NORMS).items():
        rules.append(
            Shift(f"blk.{{}}.{gguf_name}.weight", f"blocks.{{}}.{name}.weight", 1.0)
        )
    rules.append(Shift("output_norm.weight", "norm.weight", 1.0))
    return rules


def gguf_metadata(config: Config) -> dict[str, Any]:
    """Return the sizes of the delta nets and which layers have them; raise ValueError where
    llama.cpp has one size."""
    delta = delta_of(config)
    if delta.key_dim != delta.value_dim:
        reason = (
            f"llama.cpp's architecture for {config.model_type} needs keys "
            "and values of one size"
        )
        raise ValueError(f"{reason}; keep the Hugging Face folder")
    pairs = next(layer.rope.dim // 2 for layer in config.layers if layer.rope)
    metadata = {
        "ssm.conv_kernel": delta.conv_width,
        "ssm.state_size": delta.key_dim,
        "ssm.group_count": delta.n_key_heads,
        "ssm.time_step_rank": delta.n_heads,
        "ssm.inner_size": delta.n_heads * delta.value_dim,
        "attention.recurrent_layers": [bool(layer.mixer) for layer in config.layers],
        # of time, height and width, which are one in a text
        "rope.dimension_sections": [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0],
    }
    if config.model_type != "qwen3_5_text":
        metadata |= qwen2_moe.gguf_metadata(config)
    return metadata


def gguf_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Add the kinds of layers; keys and values have one size."""
    # the metadata lists the linear layers; without it, every fourth layer has full attention
    recurrent = hf.get("layer_types") or [
        (n + 1) % 4 != 0 for n in range(hf["num_hidden_layers"])
    ]
    kinds = [
        "linear_attention" if is_recurrent else "full_attention"
        for is_recurrent in recurrent
    ]
    hf = {
        name: value
        for name, value in hf.items()
        if name not in ("linear_value_width", "mrope_section")
    }
    return hf | {"layer_types": kinds, "linear_value_head_dim": hf["linear_key_head_dim"]}


GGUF_FAMILY = GgufFamily(
    architectures=GGUF,
    rules=gguf_rules,
    config=gguf_config,
    metadata=gguf_metadata,
    fields=GGUF_FIELDS,
)
