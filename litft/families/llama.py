"""Llama 1 to 3.3 and models with the same architecture (arXiv 2302.13971, 2407.21783); other
families build on this file."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from litft.checkpoints.rules import Drop, Rename, Rule
from litft.families.family import Family
from litft.model.config import Config, LayerConfig, NormConfig
from litft.model.rope_config import RopeConfig

# what a family calls the kind of a layer, such as whether its window slides
Kind = TypeVar("Kind")


def config(
    hf: dict[str, Any], rope_theta: float = 10000.0, rope_fraction: float | None = None
) -> Config:
    """Read config.json; missing fields have the defaults of transformers' LlamaConfig.

    A family with other defaults puts them into `hf`; one with another architecture replaces fields
    of the result.
    rope_theta, rope_fraction: default base of RoPE, and default share of a head that is rotated
    (None: all of it).
    """
    num_heads = hf["num_attention_heads"]
    if not hf.get("head_dim") and hf["hidden_size"] % num_heads:
        raise ValueError(
            f"config.json: hidden_size {hf['hidden_size']} is not divisible by num_attention_heads "
            f"{num_heads}"
        )
    head_dim = hf.get("head_dim") or hf["hidden_size"] // num_heads
    layer = LayerConfig(rope=RopeConfig.from_hf(hf, head_dim, rope_theta, rope_fraction))
    return Config(
        model_type=hf["model_type"],
        vocab_size=hf["vocab_size"],
        max_positions=hf.get("max_position_embeddings", 2048),
        dim=hf["hidden_size"],
        hidden_dim=one_size(hf, "intermediate_size"),
        n_heads=num_heads,
        n_kv_heads=hf.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        layers=(layer,) * hf["num_hidden_layers"],
        norm=NormConfig("rms", hf.get("rms_norm_eps") or 1e-6),
        activation=hf.get("hidden_act", "silu"),
        qkv_bias=hf.get("attention_bias", False),
        o_bias=hf.get("attention_bias", False),
        mlp_bias=hf.get("mlp_bias", False),
        tied=hf.get("tie_word_embeddings", False),
    )


def one_size(hf: dict[str, Any], name: str) -> int:
    """Return a field that some families list by layer.

    Raises ValueError if it is a list, and KeyError if it is missing or null.
    """
    size = hf[name]
    if size is None:
        raise KeyError(name)
    if isinstance(size, list):
        raise ValueError(
            f"config.json: {name} must be one number for all layers of this model_type, found a "
            "list"
        )
    return size


def sliding_layers(hf: dict[str, Any], is_sliding: Callable[[int], bool]) -> list[bool]:
    """Return which layers have a sliding window: from `layer_types`, or without it from the
    family's rule `is_sliding`."""
    return layer_kinds(hf, {"full_attention": False, "sliding_attention": True}, is_sliding)


def linear_layers(hf: dict[str, Any], is_linear: Callable[[int], bool]) -> list[bool]:
    """Return which layers have a recurrent mixer: from `layer_types`, or without it from the
    family's rule `is_linear`."""
    return layer_kinds(hf, {"full_attention": False, "linear_attention": True}, is_linear)


def layer_kinds(
    hf: dict[str, Any], supported: dict[str, Kind], default: Callable[[int], Kind]
) -> list[Kind]:
    """Return the kind of each layer: from `layer_types` by the values in `supported`, or without it
    from `default`."""
    # the second name is that of Nemotron-H and of older files of other hybrids
    types = hf.get("layer_types") or hf.get("layers_block_type")
    num_layers = hf["num_hidden_layers"]
    if types is None:
        return [default(index) for index in range(num_layers)]
    if len(types) != num_layers or any(
        layer_type not in tuple(supported) for layer_type in types
    ):
        raise ValueError(
            f"config.json: layer_types must list {num_layers} values from {', '.join(supported)}, "
            f"found {types!r:.300}"
        )
    return [supported[layer_type] for layer_type in types]


def check_rope_type(hf: dict[str, Any]) -> None:
    """Raise ValueError for a `rope_scaling` whose kind has the name that it had before
    transformers 4.45, for a model type of which transformers does not read that name."""
    scaling = hf.get("rope_scaling") or {}
    kind = scaling.get("type", "default")
    if kind != "default" and "rope_type" not in scaling:
        raise ValueError(
            f"config.json: rope_scaling has type {kind!r}, which transformers does not read for "
            f"{hf['model_type']}; name it rope_type"
        )


def layers_with(
    config: Config, has: Callable[[LayerConfig], Any], prefix: str = "model.layers."
) -> str:
    """Return the prefix of names in the layers for which `has` is true, as a pattern of
    `litft.checkpoints.conversion`."""
    numbers = []
    for index, layer in enumerate(config.layers):
        if has(layer):
            numbers.append(str(index))
    # an empty list of numbers would match any layer, so it gets a word that matches none
    return f"{prefix}{{{','.join(numbers or ['none'])}}}."


def layer_windows(
    hf: dict[str, Any], is_sliding: Callable[[int], bool]
) -> list[int | None]:
    """Return the sliding window of each layer, None for full attention. is_sliding: as in
    `sliding_layers`."""
    window = hf.get("sliding_window") or None
    return [window if slides else None for slides in sliding_layers(hf, is_sliding)]


def changed_layers(base: Config, **changes: Any) -> tuple[LayerConfig, ...]:
    """Return the layers of a config, all with the same changes."""
    return tuple(replace(layer, **changes) for layer in base.layers)


def windowed_layers(base: Config, windows: list[int | None]) -> tuple[LayerConfig, ...]:
    """Return a layer like the first for each window."""
    return tuple(replace(base.layers[0], window=window) for window in windows)


def local_rope_layers(base: Config, windows: list[int | None]) -> tuple[LayerConfig, ...]:
    """Return a layer like the first for each window; only layers with a window have RoPE."""
    layers = []
    for layer in windowed_layers(base, windows):
        if layer.window is None:
            layer = replace(layer, rope=None)
        layers.append(layer)
    return tuple(layers)


def names_rope(hf: dict[str, Any]) -> bool:
    """Return whether a file says what its RoPE is; empty `rope_parameters` are the plain one."""
    return hf.get("rope_parameters") is not None or bool(hf.get("rope_scaling"))


def ropes_by_type(hf: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return transformers 5's `rope_parameters` by layer type; empty if the file has one set for
    all layers."""
    parameters = hf.get("rope_parameters") or {}
    kinds = ("full_attention", "sliding_attention")
    return {kind: parameters[kind] for kind in kinds if kind in parameters}


# the parts of a gated MLP
PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def mlp_names(mlp: str, hf_mlp: str) -> dict[str, str]:
    """Return the names of a gated MLP's modules: litft's -> the checkpoint's."""
    return {f"{mlp}.{name}": f"{hf_mlp}.{name}" for name in PROJECTIONS.values()}


# litft's module names -> the checkpoint's, within a layer
ATTENTION = {f"attention.{n}_proj": f"self_attn.{n}_proj" for n in "qkvo"}
QK_NORMS = {f"attention.{n}_norm": f"self_attn.{n}_norm" for n in "qk"}
MLP = mlp_names("mlp", "mlp")
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def rename_modules(
    names: dict[str, str], hf_prefix: str = "model.layers.{}.", prefix: str = "blocks.{}."
) -> list[Rule]:
    """Return rules for modules that differ only in name; names maps litft's to the checkpoint's.

    Biases may be missing.
    """
    rules: list[Rule] = []
    for name, hf_name in names.items():
        rules.append(Rename(f"{hf_prefix}{hf_name}.weight", f"{prefix}{name}.weight"))
        rules.append(Rename(f"{hf_prefix}{hf_name}.bias", f"{prefix}{name}.bias"))
    return rules


def embedding_and_head(
    config: Config,
    model: str = "model.",
    embed: str = "embed_tokens",
    norm: str = "norm",
    head: str = "lm_head",
) -> list[Rule]:
    """Return the rules outside of layers: embedding, final norm and head.

    A tied checkpoint may store the weight twice.
    """
    tied = [Drop(f"{head}.weight")] if config.tied else []
    return [
        # what most files call layers for multi-token prediction
        Drop("mtp.{*}"),
        *rename_modules({"embed": model + embed, "norm": model + norm}, "", ""),
        *tied,
        *rename_modules({"lm_head": head}, "", ""),
    ]


def rules(
    config: Config,
    model: str = "model.",
    head: str = "lm_head",
    norms: dict[str, str] = NORMS,
) -> list[Rule]:
    """Return the rules for Llama's names. model: prefix of all names except the head's; norms: as
    in NORMS."""
    layers = f"{model}layers.{{}}."
    # old files have this buffer, which follows from config.json
    drop = Drop(f"{layers}self_attn.rotary_emb.inv_freq")
    return [
        *embedding_and_head(config, model, head=head),
        *rename_modules(ATTENTION | QK_NORMS | MLP | norms, layers),
        drop,
    ]


def drop_mtp(config: Config, prefix: str = "model.layers.", count: int = 3) -> list[Rule]:
    """Return rules that ignore the layers for multi-token prediction, which follow the last layer
    in published files.

    They must come first: the rules of the other layers match these names, too. count: the most that
    a file has.
    """
    first = len(config.layers)
    return [Drop(f"{prefix}{number}.{{*}}") for number in range(first, first + count)]


def text_model_config(
    hf: dict[str, Any], model_type: str, architecture: str
) -> dict[str, Any]:
    """Return the config.json of the language model, given that of the multimodal model around
    it."""
    shared = (
        "eos_token_id bos_token_id pad_token_id torch_dtype dtype quantization_config "
        "tie_word_embeddings".split()
    )
    # these fields are outside of `text_config`, or have priority there
    outer = {}
    for name in shared:
        if name in hf:
            outer[name] = hf[name]
    return {
        "model_type": model_type,
        **hf["text_config"],
        **outer,
        "architectures": [architecture],
    }


FAMILY = Family(
    model_types=("llama",),
    config=config,
    rules=rules,
)
