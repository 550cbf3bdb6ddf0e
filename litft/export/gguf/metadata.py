"""Translation of architectures between a GGUF file's metadata and config.json."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from litft.export.gguf.families import (
    gguf_config,
    gguf_fields,
    gguf_tensors,
)
from litft.export.gguf.files import GgufFile
from litft.export.gguf.tensor_types import ModelSizes
from litft.model.config import Config
from litft.model.rope import inverse_frequencies
from litft.model.rope_config import RopeConfig

# GGUF keys, without the architecture's name in front, and their fields in config.json
CONFIG_FIELD_OF_KEY = {
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
# OTHER_KEYS: further keys that are checked. FLOAT_KEYS: keys whose values may be floats; all others
# must be integers
OTHER_KEYS = (
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.original_context_length",
)
OTHER_KEYS += ("nextn_predict_layers",)
FLOAT_KEYS = (
    "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon",
    "rope.freq_base",
    "rope.freq_base_swa",
)
FLOAT_KEYS += (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
)
FLOAT_KEYS += ("rope.scale_linear",)
YARN_BETAS = ("beta_fast", "beta_slow")
# keys that change what some architectures compute, with the values that change nothing
SCALES = {
    "logit_scale": (1.0, 0.0),
    "residual_scale": (1.0, 0.0),
    "embedding_scale": (1.0, 0.0),
    "attention.scale": (0.0,),
    "attention.causal": (True,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
}
REQUIRED_KEYS = (
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
)
FREQS = "rope_freqs.weight"
LONG = "rope_factors_long.weight"
SHORT = "rope_factors_short.weight"
# of all models so far
LLAMA3 = dict(
    low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
# architectures for which llama.cpp reads these tensors
READS_FACTORS = (
    "llama",
    "phi3",
    "exaone",
    "exaone4",
    "gemma4",
    "llama4",
    "arcee",
    "granite_swa",
)
# llama.cpp ignores the sliding window of all others
SUPPORTS_WINDOWS = (
    "gemma2",
    "gemma3",
    "gemma4",
    "gpt-oss",
    "cohere2",
    "llama4",
    "exaone-moe",
    "olmo2",
    "mellum",
    "cohere2moe",
    "afmoe",
    "granite_swa",
)
# architectures without a tensor for the head, which is that of the embedding, and those that need
# one in any case
HAS_NO_HEAD = ("command-r", "cohere2", "gemma", "gemma2")
NEEDS_HEAD = (
    "dots1 exaone-moe gpt-oss kimi-linear mellum minimax-m2 nemotron olmo2 olmoe phi2 qwen2moe "
    "stablelm".split()
)
# a divisor that leaves entries where they are (Gemma 4)
UNROTATED = 1e30
# of Gemma 3's sliding-window layers, unless the file has another value
DEFAULT_LOCAL_THETA = 1e4


@dataclass(frozen=True)
class GgufArchitecture:
    """Architecture of a model as a GGUF file describes it."""

    name: str
    # by key, without the architecture's name in front
    metadata: dict[str, Any]
    tensor_names: frozenset[str]
    vocab_size: int
    tied: bool
    # FREQS, LONG and SHORT: divisors of the rotary embedding's frequencies
    factors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def sizes(self) -> ModelSizes:
        """The sizes by which the types of a quantized file's tensors are chosen."""
        return ModelSizes(
            self.name,
            num_layers=self.metadata["block_count"],
            num_experts=self.metadata.get("expert_count", 0),
            grouped=self.metadata.get("attention.head_count")
            != self.metadata.get("attention.head_count_kv"),
        )

    def to_hf(self) -> dict[str, Any]:
        """Return the content of config.json; raise ValueError for architectures that litft does not
        support."""
        self._check()
        fields = CONFIG_FIELD_OF_KEY | gguf_fields(self.name)
        for key, neutral in SCALES.items():
            value = self.metadata.get(key, neutral[0])
            if key not in fields and value not in neutral:
                raise ValueError(
                    f"{self.name}.{key} {value} is not supported: models of this architecture have "
                    "no such setting; use the model's folder of safetensors"
                )
        hf = {}
        for key, name in fields.items():
            if key in self.metadata:
                hf[name] = self.metadata[key]
        if self.metadata.get("expert_count") and "expert_count" not in fields:
            raise ValueError(
                f"{self.name} with experts is not supported; use a dense model"
            )
        hf |= {"vocab_size": self.vocab_size, "tie_word_embeddings": self.tied}
        # layers for multi-token prediction are the last ones
        if self.extra_layers:
            hf["num_hidden_layers"] -= self.extra_layers
            hf |= {
                name: value[: -self.extra_layers]
                for name, value in hf.items()
                if isinstance(value, list)
            }
        # a tensor of the first block tells whether the network has such a part
        hf |= {
            field: f"blk.0.{name}" in self.tensor_names
            for field, name in gguf_tensors(self.name).items()
        }
        config = gguf_config(self.name, hf | self._rope_fields(hf))
        # they are in the settings of RoPE
        for name in YARN_BETAS:
            config.pop(name, None)
        return config

    @property
    def extra_layers(self) -> int:
        """The number of layers for multi-token prediction, which litft does not have."""
        return self.metadata.get("nextn_predict_layers", 0)

    def _check(self) -> None:
        """Raise ValueError for missing or invalid values."""
        metadata = self.metadata
        name = self.name
        missing = [key for key in REQUIRED_KEYS if key not in metadata]
        if not any(key in metadata for key in FLOAT_KEYS[:2]):
            missing.append(FLOAT_KEYS[0])
        if missing:
            raise ValueError(
                f"{name}.{', '.join(missing)}: missing from the metadata; download the file again"
            )

        # values: integers in general, floats and lists where the key allows it
        own_keys = gguf_fields(name)  # whose values may be floats
        for key in (*CONFIG_FIELD_OF_KEY, *OTHER_KEYS, *FLOAT_KEYS, *own_keys):
            value = metadata.get(key, 1)
            if (
                isinstance(value, list)
                and key in own_keys
                and all(isinstance(item, int) for item in value)
            ):
                continue  # one value a layer
            if isinstance(value, list):
                raise ValueError(
                    f"{name}.{key} differs between layers, which is not supported; use another "
                    "model"
                )
            is_count = (
                isinstance(value, int)
                and (not isinstance(value, bool) or key in own_keys)
                and 0 <= value < 2**31
            )
            is_valid = is_count or (
                key in (*FLOAT_KEYS, *own_keys)
                and isinstance(value, float)
                and math.isfinite(value)
            )
            if not is_valid or (value == 0 and key in REQUIRED_KEYS):
                raise ValueError(
                    f"{name}.{key} has the invalid value {value!r}; download the file again"
                )

        # values that must agree with each other
        lengths = [metadata.get(f"attention.{kind}_length") for kind in ("key", "value")]
        if (
            None not in lengths
            and lengths[0] != lengths[1]
            and "attention.key_length_mla" not in metadata
        ):
            raise ValueError(
                f"{name}: head dims {lengths[0]} of keys and {lengths[1]} of values differ, which "
                "is not supported"
            )
        if (LONG in self.factors) != (SHORT in self.factors):
            raise ValueError(
                f"only one of the tensors {LONG} and {SHORT} exists; download the file again"
            )
        # frequencies are divided by them
        for tensor, divisors in self.factors.items():
            if not (divisors.isfinite() & (divisors > 0)).all():
                raise ValueError(
                    f"{tensor} must have finite numbers above 0; download the file again"
                )

    def _rope_fields(self, hf: dict[str, Any]) -> dict[str, Any]:
        """Return config.json's fields of the rotary embedding."""
        # learned positions, without a rotation
        if "position_embd.weight" in self.tensor_names:
            return {}
        # of files of 2023
        factor = self.metadata.get("rope.scaling.factor") or self.metadata.get(
            "rope.scale_linear"
        )
        kind = self.metadata.get("rope.scaling.type", "linear" if factor else "none")
        original_length = self.metadata.get("rope.scaling.original_context_length")
        rope: dict[str, Any] = {}

        # by the tensors if there are any, as they say more than the type
        if LONG in self.factors:
            divisors = {"short_factor": SHORT, "long_factor": LONG}
            scaling = {name: self._factor_list(tensor) for name, tensor in divisors.items()}
            rope["original_max_position_embeddings"] = original_length
            rope["rope_scaling"] = {"rope_type": "longrope", "type": "longrope", **scaling}
            rope["rope_scaling"] |= self._attention_factor(hf, original_length)
        elif FREQS in self.factors:
            rope["rope_scaling"] = self._scaling_of_divisors(hf.get("rope_theta", 1e4))
        elif kind in ("linear", "yarn"):
            scaling = {"rope_type": kind, "factor": factor or 1.0} | self._yarn_factor(kind)
            if kind == "yarn":
                scaling |= self._yarn_betas()
            rope["rope_scaling"] = scaling | (
                {"original_max_position_embeddings": original_length}
                if kind == "yarn"
                else {}
            )
        elif kind not in ("none", "longrope"):
            raise ValueError(f"{self.name}.rope.scaling.type {kind!r} is not supported")

        # the part of each head that is rotated
        head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
        rotary_dim = self.metadata.get("rope.dimension_count", head_dim)
        if rotary_dim != head_dim:
            rope["partial_rotary_factor"] = rotary_dim / head_dim
        return rope

    def _yarn_factor(self, kind: str) -> dict[str, float]:
        """Return the factor of cos and sin under YaRN, if the file multiplies its default by a
        number."""
        stated = self.metadata.get("rope.scaling.attn_factor", 1.0)
        if kind != "yarn" or stated == 1:
            return {}
        if self.metadata.get("rope.scaling.yarn_log_multiplier"):
            raise ValueError(
                f"{self.name}.rope.scaling.attn_factor {stated} is not supported together with "
                "yarn_log_multiplier"
            )
        # YaRN's default is 1 + 0.1 ln(factor), which the stated number multiplies
        return {
            "attention_factor": stated
            * (1 + 0.1 * math.log(self.metadata.get("rope.scaling.factor", 1.0)))
        }

    def _yarn_betas(self) -> dict[str, float]:
        """Return the numbers of rotations between which YaRN blends, if the file has them."""
        betas = {}
        for name in YARN_BETAS:
            value = self.metadata.get(f"rope.scaling.yarn_{name}")
            if value is not None:
                betas[name] = value
        return betas

    def _factor_list(self, name: str) -> list[float]:
        # the shortest decimal of each fp32 number, as config.json would have it
        return [float(str(number)) for number in self.factors[name].float().numpy()]

    def _attention_factor(
        self, hf: dict[str, Any], original_length: int | None
    ) -> dict[str, float]:
        """Return the factor of cos and sin, if it differs from longrope's default."""
        stated = self.metadata.get("rope.scaling.attn_factor")
        ratio = hf["max_position_embeddings"] / (
            original_length or hf["max_position_embeddings"]
        )
        if original_length and ratio > 1:
            default = math.sqrt(1 + math.log(ratio) / math.log(original_length))
        else:
            default = 1.0
        if stated is None or math.isclose(stated, default, rel_tol=1e-5):
            return {}
        return {"attention_factor": stated}

    def _scaling_of_divisors(self, theta: float) -> dict[str, Any]:
        """Return the scaling with these divisors: Llama 3.1's, Gemma 4's, or an equivalent longrope
        scaling."""
        divisors = self.factors[FREQS].float()
        # Gemma 4's divisors are 1 for entries that are rotated, and huge for the others
        if (is_rotated := divisors < UNROTATED / 10).sum() < len(divisors) and (
            divisors[is_rotated] == 1
        ).all():
            return {
                "rope_type": "proportional",
                "partial_rotary_factor": int(is_rotated.sum()) / len(divisors),
            }
        # Llama 3.1's divisors, if its formula gives the same ones
        scaling = {"rope_type": "llama3", "factor": float(divisors.max()), **LLAMA3}
        head_dim = 2 * len(divisors)  # one divisor for a pair of entries
        rope = RopeConfig.from_hf({"rope_theta": theta, "rope_scaling": scaling}, head_dim)
        if torch.allclose(rope_divisors(rope), divisors, rtol=1e-4):
            return scaling
        # any others: longrope with the same list for short and long texts
        factors = self._factor_list(FREQS)
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
        }

    def check_rotation(self, config: Config) -> None:
        """Raise ValueError if the network would rotate other dimensions of the heads than the file
        states."""
        stated_dim = self.metadata.get("rope.dimension_count")
        rotary_dims = set()
        for layer in config.layers:
            if layer.rope and layer.rope.dim:
                rotary_dims.add(layer.rope.dim)
        # sliding-window layers may rotate other dimensions
        stated_dims = {stated_dim, self.metadata.get("rope.dimension_count_swa")}
        unstated = rotary_dims - stated_dims
        if stated_dim is not None and unstated:
            raise ValueError(
                f"{self.name}.rope.dimension_count {stated_dim}: this family rotates "
                f"{max(unstated)}"
            )
        # one divisor for each pair of rotated entries
        for tensor, divisors in self.factors.items():
            if tuple(divisors.shape) not in {(dim // 2,) for dim in rotary_dims}:
                raise ValueError(
                    f"{tensor} has the shape {tuple(divisors.shape)} for "
                    f"{max(rotary_dims, default=0) // 2} frequencies"
                )

    def ignored_window(self) -> int | None:
        """Return the model's sliding window if llama.cpp ignores it for this architecture, else
        None."""
        if self.name in SUPPORTS_WINDOWS:
            return None
        return self.metadata.get("attention.sliding_window")


def read_architecture(file: GgufFile) -> GgufArchitecture:
    """Return the architecture of a GGUF file; raise ValueError if the file does not contain a
    language model."""
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise ValueError(f"{file.folder} contains no model but {kind!r}; pass a model file")
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ValueError(
            f"{file.folder} has no general.architecture: it is incomplete; use another file"
        )
    embedding = "token_embd.weight"
    head = "output.weight"
    if embedding not in file.names:
        raise ValueError(
            f"{file.folder} has no token_embd.weight: not a language model, or incomplete; use "
            "another file"
        )

    metadata = {key.removeprefix(f"{name}."): value for key, value in file.metadata.items()}
    # a head that repeats the embedding is a tied one
    tied = head not in file.names or file.same_data(head, embedding)
    divisors = {}
    for tensor in (FREQS, LONG, SHORT):
        if tensor in file.names:
            divisors[tensor] = file.read(tensor)
    return GgufArchitecture(
        name, metadata, frozenset(file.names), file.meta(embedding).size(0), tied, divisors
    )


def rope_divisors(rope: RopeConfig) -> Tensor:
    """Return the divisors of the unscaled frequencies."""
    return (
        inverse_frequencies(replace(rope, rope_type="default"))[0]
        / inverse_frequencies(rope)[0]
    )
