"""Llama 1 to 3.3 and the many models of its shape (arXiv 2302.13971, 2407.21783); most other families start from it."""

from collections.abc import Callable
from typing import Any

from litft.checkpoints.conversion import Drop, Interleave, Rename, Rule
from litft.model.config import Config, LayerConfig, NormConfig, RopeConfig

MODEL_TYPES = ("llama",)
GGUF = {"llama": ("llama", "LlamaForCausalLM")}


def config(hf: dict[str, Any], rope_base: float = 10000.0, rope_fraction: float | None = None) -> Config:
    """Defaults are those of transformers' LlamaConfig; a family with others puts them into `hf` first."""
    heads = hf["num_attention_heads"]
    if not hf.get("head_dim") and hf["hidden_size"] % heads:
        raise ValueError(f"config.json: a width of {hf['hidden_size']} cannot be shared evenly by {heads} attention heads")
    head_dim = hf.get("head_dim") or hf["hidden_size"] // heads
    layer = LayerConfig(rope=RopeConfig.from_hf(hf, head_dim, rope_base, rope_fraction))
    return Config(
        model_type=hf["model_type"],
        vocab_size=hf["vocab_size"],
        max_positions=hf.get("max_position_embeddings", 2048),
        dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"],
        n_heads=heads,
        n_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        layers=(layer,) * hf["num_hidden_layers"],
        norm=NormConfig("rms", hf.get("rms_norm_eps", 1e-6)),
        activation=hf.get("hidden_act", "silu"),
        qkv_bias=hf.get("attention_bias", False),
        o_bias=hf.get("attention_bias", False),
        mlp_bias=hf.get("mlp_bias", False),
        tied=hf.get("tie_word_embeddings", False),
    )


def sliding(hf: dict[str, Any], slides: Callable[[int], bool]) -> list[bool]:
    """Which layers have a window: as `layer_types` says, or by `slides`, the family's rule for files without it."""
    count = hf["num_hidden_layers"]
    known = {"full_attention": False, "sliding_attention": True}
    types = hf.get("layer_types")
    if types is not None and (len(types) != count or any(kind not in tuple(known) for kind in types)):
        raise ValueError(f"config.json: layer_types must be {count} times one of {', '.join(known)}, found {types!r:.300}")
    return [slides(index) for index in range(count)] if types is None else [known[kind] for kind in types]


def windows(hf: dict[str, Any], slides: Callable[[int], bool]) -> list[int | None]:
    """Each layer's window, where it has one."""
    return [(hf.get("sliding_window") or None) if slide else None for slide in sliding(hf, slides)]


def ropes_by_type(hf: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """transformers 5's `rope_parameters` by layer type; empty where the file has one rotation for all."""
    nested = {k: v for k, v in (hf.get("rope_parameters") or {}).items() if k in ("full_attention", "sliding_attention")}
    if odd := [value for value in nested.values() if not isinstance(value, dict | None)]:
        raise ValueError(f"config.json: rope_parameters of a layer type must be an object, found {odd[0]!r:.200}")
    return nested


# ours -> theirs, within a layer
ATTENTION = {f"attention.{n}_proj": f"self_attn.{n}_proj" for n in "qkvo"}
QK_NORMS = {f"attention.{n}_norm": f"self_attn.{n}_norm" for n in "qk"}
MLP = {f"mlp.{n}_proj": f"mlp.{n}_proj" for n in ("gate", "up", "down")}
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def named(names: dict[str, str], hf_name: str = "model.layers.{}.", ours: str = "blocks.{}.") -> list[Rule]:
    """Renames of modules, each with its weight and, where there is one, its bias."""
    return [Rename(f"{hf_name}{t}.{leaf}", f"{ours}{o}.{leaf}") for o, t in names.items() for leaf in ("weight", "bias")]


def ends(
    config: Config, model: str = "model.", embed: str = "embed_tokens", norm: str = "norm", head: str = "lm_head"
) -> list[Rule]:
    """The embedding, the last norm and the head, whose weight a tied checkpoint may store a second time."""
    tied = [Drop(f"{head}.weight")] if config.tied else []
    return [*named({"embed": model + embed, "norm": model + norm}, "", ""), *tied, *named({"lm_head": head}, "", "")]


def rules(config: Config, model: str = "model.", head: str = "lm_head", norms: dict[str, str] = NORMS) -> list[Rule]:
    """Plain renames; biases are there or not, as the config says."""
    layers = f"{model}layers.{{}}."
    drop = Drop(f"{layers}self_attn.rotary_emb.inv_freq")
    return [*ends(config, model, head=head), *named(ATTENTION | QK_NORMS | MLP | norms, layers), drop]


# ours -> llama.cpp's, within a layer
GGUF_ATTENTION = {f"attention.{n}_proj": f"attn_{n}" for n in "qkv"} | {"attention.o_proj": "attn_output"}
GGUF_QK_NORMS = {f"attention.{n}_norm": f"attn_{n}_norm" for n in "qk"}
GGUF_MLP = {f"mlp.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")}
GGUF_NORMS = {"attention_norm": "attn_norm", "mlp_norm": "ffn_norm"}


def gguf_names(config: Config, layer: dict[str, str] = GGUF_ATTENTION | GGUF_QK_NORMS | GGUF_MLP | GGUF_NORMS) -> list[Rule]:
    """llama.cpp's plain renames; what it stores of the rotation is read with the metadata."""
    return [*ends(config, "", "token_embd", "output_norm", "output"), *named(layer, "blk.{}."), Drop("rope_{*}.weight")]


def gguf_rules(config: Config) -> list[Rule]:
    """llama.cpp rotates neighbours here, so that q and k are stored in another order."""
    heads = {"q": config.n_heads, "k": config.n_kv_heads}
    turned = [
        Interleave(f"blk.{{}}.attn_{n}.{leaf}", f"blocks.{{}}.attention.{n}_proj.{leaf}", count)
        for n, count in heads.items()
        for leaf in ("weight", "bias")
    ]
    return [*turned, *gguf_names(config)]


def language_model(hf: dict[str, Any], model_type: str, architecture: str) -> dict[str, Any]:
    """The language model's own config.json, where `hf` is that of the multimodal model around it."""
    shared = "eos_token_id bos_token_id pad_token_id torch_dtype dtype quantization_config tie_word_embeddings".split()
    outer = {name: hf[name] for name in shared if name in hf}
    return {"model_type": model_type, **hf["text_config"], **outer, "architectures": [architecture]}


def wrapped_rules(config: Config, norms: dict[str, str] = NORMS) -> list[Rule]:
    """As `rules`, also where a multimodal folder wraps the language model; what sees is left out."""
    model, head = "{model.|language_model.model.|model.language_model.}", "{|language_model.}lm_head"
    return [*rules(config, model, head, norms), Drop("{model.|}{vision_tower|multi_modal_projector}.{*}")]
