"""OLMo 1, 2 and 3 and OLMoE (arXiv 2402.00838, 2501.00656, 2409.02060): weightless norms, then norms after each half."""

from dataclasses import replace
from typing import Any

from litft.checkpoints.conversion import Rename, Rule
from litft.families import llama, mixtral
from litft.model.config import Config, ExpertsConfig, NormConfig, RopeConfig

MODEL_TYPES = ("olmo", "olmo2", "olmo3", "olmoe")


def config(hf: dict[str, Any]) -> Config:
    """Defaults are those of transformers' OlmoConfig, Olmo2Config, Olmo3Config and OlmoeConfig."""
    kind, nested = hf["model_type"], llama.ropes_by_type(hf)
    context = 4096 if kind == "olmoe" else 2048
    hf = {"rms_norm_eps": 1e-5, "sliding_window": 4096, "max_position_embeddings": context, **hf}
    plain = llama.config({**hf, "rope_parameters": None} if nested else hf, rope_base=5e5 if kind == "olmo3" else 1e4)
    plain = replace(plain, mlp_bias=False, qkv_clip=hf.get("clip_qkv"))
    if kind == "olmo":
        return replace(plain, norm=NormConfig("layer", 1e-5, weight=False))
    plain = replace(plain, qk_norm=plain.norm, qk_norm_over="all")
    if kind == "olmoe":
        experts = ExpertsConfig(
            hf.get("num_experts", 64),
            hf.get("num_experts_per_tok", 8),
            plain.hidden_dim,
            renormalize=hf.get("norm_topk_prob", False),
        )
        return replace(plain, layers=tuple(replace(layer, experts=experts) for layer in plain.layers))
    plain = replace(plain, norm_position="after", qkv_clip=None)
    if kind == "olmo2":
        return plain
    windows = llama.windows(hf, lambda index: (index + 1) % 4 != 0)
    return replace(plain, layers=tuple(_olmo3_layer(plain, hf, nested, window) for window in windows))


def _olmo3_layer(plain: Config, hf: dict[str, Any], nested: dict[str, Any], window: int | None) -> Any:
    """Only layers with full attention have their rotation scaled."""
    layer = plain.layers[0]
    if nested:
        own = nested.get("full_attention" if window is None else "sliding_attention")
        rope = RopeConfig.from_hf({**hf, "rope_parameters": own}, plain.head_dim, 5e5)
    else:
        rope = layer.rope if window is None else RopeConfig.from_hf({**hf, "rope_scaling": None}, plain.head_dim, 5e5)
    return replace(layer, window=window, rope=rope)


def rules(config: Config) -> list[Rule]:
    """Llama's names; the norms of OLMo 2 and 3 stand behind attention and MLP."""
    norms = llama.NORMS
    if config.norm_position == "after":
        norms = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
    plain = [*llama.ends(config), *llama.named(llama.ATTENTION | llama.QK_NORMS | llama.MLP | norms)]
    if config.model_type != "olmoe":
        return plain
    stored = {name: f"{name}_proj" for name in ("gate", "up", "down")}
    router = Rename("model.layers.{}.mlp.gate.weight", "blocks.{}.mlp.router.weight")
    return [*plain, router, *mixtral.stacked(config, "model.layers.{}.mlp.experts.{}.", stored)]


def peft_rules(config: Config) -> list[Rule]:
    """How PEFT names OLMoE's experts."""
    return mixtral.peft_rules(config) if config.model_type == "olmoe" else []
