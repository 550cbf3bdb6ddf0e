"""An architecture in llama.cpp's words and in transformers': a GGUF file's metadata, and config.json."""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from litft.checkpoints.conversion import mappings_to_hf
from litft.export.gguf.files import GgufFile
from litft.families import gguf_architectures, gguf_config, gguf_rules, read_config
from litft.model.config import Config, RopeConfig
from litft.model.rope import inverse_frequencies
from litft.model.transformer import GPT

# llama.cpp's keys behind the architecture's name, and config.json's fields
FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}
# what else is read; of all keys those that hold numbers which need not be whole
OTHERS = ("attention.value_length", "rope.dimension_count", "rope.scaling.original_context_length")
FRACTIONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "rope.freq_base", "rope.freq_base_swa")
FRACTIONS += ("attn_logit_softcapping", "final_logit_softcapping", "rope.scaling.factor", "rope.scaling.attn_factor")
REQUIRED = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
LLAMA3 = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)  # of every one so far
TURNS_BY_TENSORS = ("llama", "phi3")  # the architectures whose rotation llama.cpp reads those tensors for
HEEDS_WINDOWS = ("gemma2", "gemma3")  # the others attend to everything
LOCAL_BASE = 1e4  # of the rotation of Gemma 3's layers with a window, unless the file says otherwise


@dataclass(frozen=True)
class Description:
    """What a GGUF file says of its architecture."""

    architecture: str
    metadata: dict[str, Any]  # by the keys behind the architecture's name
    names: frozenset[str]  # of its tensors
    vocab_size: int
    tied: bool
    factors: dict[str, Tensor] = field(
        default_factory=dict
    )  # FREQS, LONG, SHORT: what the rotation's frequencies are divided by

    def hf(self) -> dict[str, Any]:
        """The same as config.json; ValueError for what litft's network does not compute."""
        self._check()
        found = {name: self.metadata[key] for key, name in FIELDS.items() if key in self.metadata}
        if self.metadata.get("expert_count"):
            raise ValueError(f"{self.architecture} with experts is not supported; name a dense model")
        found |= {"vocab_size": self.vocab_size, "tie_word_embeddings": self.tied}
        if self.architecture == "llama":
            found["attention_bias"] = "blk.0.attn_output.bias" in self.names
            found["mlp_bias"] = "blk.0.ffn_up.bias" in self.names
        return gguf_config(self.architecture, found | self._rotation(found))

    def _check(self) -> None:
        """ValueError for values that are missing, or none that a model has."""
        given, who = self.metadata, self.architecture
        missing = [key for key in REQUIRED if key not in given]
        if not any(key in given for key in FRACTIONS[:2]):
            missing.append(FRACTIONS[0])
        if missing:
            raise ValueError(f"{who}.{', '.join(missing)}: not in the metadata; download the file again")
        for key in (*FIELDS, *OTHERS, *FRACTIONS):
            value = given.get(key, 1)
            if isinstance(value, list):
                raise ValueError(f"{who}.{key} differs from layer to layer, which is not supported")
            whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
            fits = whole or (key in FRACTIONS and isinstance(value, float) and math.isfinite(value))
            if not fits or (value == 0 and key in REQUIRED):
                raise ValueError(f"{who}.{key} {value!r} cannot be; download the file again")
        lengths = [given.get(f"attention.{name}_length") for name in ("key", "value")]
        if None not in lengths and lengths[0] != lengths[1]:
            raise ValueError(f"{who}: keys of {lengths[0]} and values of {lengths[1]} numbers are not supported")
        if (LONG in self.factors) != (SHORT in self.factors):
            raise ValueError(f"{LONG} and {SHORT} belong together, and one is missing; download the file again")

    def _rotation(self, found: dict[str, Any]) -> dict[str, Any]:
        """config.json's fields of the rotation."""
        if "position_embd.weight" in self.names:
            return {}
        kind = self.metadata.get("rope.scaling.type", "linear" if "rope.scaling.factor" in self.metadata else "none")
        original = self.metadata.get("rope.scaling.original_context_length")
        rotation: dict[str, Any] = {}
        if LONG in self.factors:
            divisors = {"short_factor": SHORT, "long_factor": LONG}
            scaling = {name: self._listed(tensor) for name, tensor in divisors.items()}
            rotation["original_max_position_embeddings"] = original
            rotation["rope_scaling"] = {"rope_type": "longrope", "type": "longrope", **scaling}
            rotation["rope_scaling"] |= self._attention_factor(found, original)
        elif FREQS in self.factors:
            rotation["rope_scaling"] = self._llama3(found.get("rope_theta", 1e4))
        elif kind in ("linear", "yarn"):
            scaling = {"rope_type": kind, "factor": self.metadata.get("rope.scaling.factor", 1.0)}
            rotation["rope_scaling"] = scaling | ({"original_max_position_embeddings": original} if kind == "yarn" else {})
        elif kind not in ("none", "longrope"):
            raise ValueError(f"{self.architecture}.rope.scaling.type {kind!r} is not supported")
        width = found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"]
        if (part := self.metadata.get("rope.dimension_count", width)) != width:
            rotation["partial_rotary_factor"] = part / width
        return rotation

    def _listed(self, name: str) -> list[float]:
        return [float(str(number)) for number in self.factors[name].float().numpy()]

    def _attention_factor(self, found: dict[str, Any], original: int | None) -> dict[str, float]:
        """What cos and sin are multiplied by, where that is another number than longrope's own."""
        stated = self.metadata.get("rope.scaling.attn_factor")
        ratio = found["max_position_embeddings"] / (original or found["max_position_embeddings"])
        own = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
        return {} if stated is None or math.isclose(stated, own, rel_tol=1e-5) else {"attention_factor": stated}

    def _llama3(self, theta: float) -> dict[str, Any]:
        """The scaling of Llama 3.1 that these divisors come from; what else they may be, as longrope with them."""
        divisors = self.factors[FREQS].float()
        guess = {"rope_type": "llama3", "factor": float(divisors.max()), **LLAMA3}
        rope = RopeConfig.from_hf({"rope_theta": theta, "rope_scaling": guess}, 2 * len(divisors))
        if torch.allclose(_divisors(rope), divisors, rtol=1e-4):
            return guess
        listed = self._listed(FREQS)
        return {"rope_type": "longrope", "short_factor": listed, "long_factor": listed, "attention_factor": 1.0}

    def check_rotation(self, config: Config) -> None:
        """ValueError where the network would turn another part of the heads than the file says."""
        stated = self.metadata.get("rope.dimension_count")
        found = {layer.rope.dim for layer in config.layers if layer.rope}
        if stated is not None and found - {stated}:
            raise ValueError(f"{self.architecture}.rope.dimension_count {stated}: this family rotates {max(found)}")
        for name, divisors in self.factors.items():
            if tuple(divisors.shape) not in {(dim // 2,) for dim in found}:
                raise ValueError(
                    f"{name} has the shape {tuple(divisors.shape)} for {max(found, default=0) // 2} frequencies"
                )

    def unheeded_window(self) -> int | None:
        """The config's sliding window, where llama.cpp does not know it."""
        return None if self.architecture in HEEDS_WINDOWS else self.metadata.get("attention.sliding_window")


def described(file: GgufFile) -> Description:
    """What a file says."""
    architecture = file.metadata.get("general.architecture")
    if file.metadata.get("general.type", "model") != "model" or not isinstance(architecture, str):
        raise ValueError(f"{file.folder} holds no model but {file.metadata.get('general.type')!r}; name a model's file")
    embedding, head = "token_embd.weight", "output.weight"
    if embedding not in file.names:
        raise ValueError(f"{file.folder} holds no token_embd.weight; it is no language model, or not whole")
    own = {key.removeprefix(f"{architecture}."): value for key, value in file.metadata.items()}
    tied = head not in file.names or file.same(head, embedding)
    factors = {name: file.read(name) for name in (FREQS, LONG, SHORT) if name in file.names}
    return Description(architecture, own, frozenset(file.names), file.meta(embedding).size(0), tied, factors)


def describe(config: Config) -> Description:
    """What a file is to say of an architecture; ValueError where llama.cpp would compute something else."""
    rules = gguf_rules(config)
    with torch.device("meta"):
        parameters = [name for name, _ in GPT(config).named_parameters()]
    names = frozenset(name for mapping in mappings_to_hf(rules, parameters) for name in mapping.targets)
    architecture = gguf_architectures()[config.model_type]
    rope = next((layer.rope for layer in config.layers if layer.window is None), config.layers[0].rope)
    metadata, factors = _metadata(config, rope), _factors(rope)
    found = Description(architecture, metadata, names, config.vocab_size, config.tied, factors)
    lost = _differences(config, read_config(found.hf()), architecture in HEEDS_WINDOWS)
    if lost := lost + ["rope"] * (bool(factors) and architecture not in TURNS_BY_TENSORS):
        reason = f"llama.cpp's {architecture} has no place for this model's {', '.join(lost)}"
        raise ValueError(f"{reason}, and would compute something else; keep it in Hugging Face's format")
    return found


def _metadata(config: Config, rope: RopeConfig | None) -> dict[str, Any]:
    windows = {layer.window for layer in config.layers} - {None}
    epsilon = "attention.layer_norm_rms_epsilon" if config.norm.kind == "rms" else "attention.layer_norm_epsilon"
    found = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_positions,
        "embedding_length": config.dim,
        "block_count": len(config.layers),
        "feed_forward_length": config.hidden_dim,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        epsilon: config.norm.eps,
    }
    if windows:
        found["attention.sliding_window"] = max(windows)
    for name, cap in (("attn", config.attention_softcap), ("final", config.logit_softcap)):
        found |= {f"{name}_logit_softcapping": cap} if cap else {}
    if rope is None:
        return found
    lengths = dict.fromkeys(("attention.key_length", "attention.value_length"), config.head_dim)
    found |= lengths | {"rope.dimension_count": rope.dim, "rope.freq_base": rope.theta}
    local = next((layer.rope for layer in config.layers if layer.rope and layer.rope.theta != rope.theta), None)
    if local and local.theta != LOCAL_BASE:
        found["rope.freq_base_swa"] = local.theta
    if rope.rope_type in ("linear", "yarn", "longrope"):
        found["rope.scaling.type"] = rope.rope_type
    if rope.rope_type in ("linear", "yarn"):
        found["rope.scaling.factor"] = rope.factor
    if rope.rope_type in ("yarn", "longrope"):
        found["rope.scaling.original_context_length"] = rope.original_max_positions
    if rope.rope_type == "longrope":
        found["rope.scaling.attn_factor"] = rope.attention_factor
    return found


def _factors(rope: RopeConfig | None) -> dict[str, Tensor]:
    """The tensors that say more of a rotation than the metadata."""
    if rope is None or rope.rope_type not in ("llama3", "longrope"):
        return {}
    if rope.rope_type == "llama3":
        return {FREQS: _divisors(rope)}
    return {LONG: torch.tensor(rope.long_factor), SHORT: torch.tensor(rope.short_factor)}


def _divisors(rope: RopeConfig) -> Tensor:
    """What the plain frequencies are divided by."""
    return inverse_frequencies(replace(rope, rope_type="default"))[0] / inverse_frequencies(rope)[0]


def _differences(config: Config, again: Config, windows: bool) -> list[str]:
    """What another architecture is to be the same as `config`, and is not; windows: whether those count."""
    skipped = {"model_type", "layers"}
    found = [f.name for f in fields(config) if f.name not in skipped and getattr(config, f.name) != getattr(again, f.name)]
    pairs = list(zip(config.layers, again.layers, strict=True))
    if any(_scale(config, one.attention_scale) != _scale(again, two.attention_scale) for one, two in pairs):
        found.append("attention_scale")
    if any(not _same_rotation(one.rope, two.rope) for one, two in pairs):
        found.append("rope")
    if windows and any(one.window != two.window for one, two in pairs):
        found.append("sliding windows")
    return found + ["experts"] * any(one.experts != two.experts for one, two in pairs)


def _scale(config: Config, stated: float | None) -> float:
    return round(config.head_dim**-0.5 if stated is None else stated, 6)


def _same_rotation(one: RopeConfig | None, two: RopeConfig | None) -> bool:
    """Whether they turn by the same angles, whatever they are called."""
    if one is None or two is None:
        return one is two
    if (one.dim, one.rope_type == "dynamic", one.query_beta) != (two.dim, two.rope_type == "dynamic", two.query_beta):
        return False
    if (
        "longrope" in (one.rope_type, two.rope_type)
        and one.short_factor != one.long_factor
        and one.original_max_positions != two.original_max_positions
    ):
        return False
    tables = zip(inverse_frequencies(one), inverse_frequencies(two), strict=True)
    close = all(torch.allclose(ours, theirs, rtol=1e-4, atol=0) for ours, theirs in tables)
    return close and math.isclose(one.attention_factor, two.attention_factor, rel_tol=1e-5)
