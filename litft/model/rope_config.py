"""`RopeConfig`: a rotary position embedding, read from a checkpoint's config.json.

Does not import torch.
"""

import math
from dataclasses import dataclass
from typing import Any

# of a context; a larger one is a broken file
LARGEST_FACTOR = 1e6
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
# the parameters that a type cannot do without
REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al., arXiv 2104.09864) and its scaling beyond the original
    context.

    `rope_type` is one of ROPE_TYPES: default, linear (arXiv 2306.15595), dynamic NTK, llama3 (Llama
    3.1), yarn (arXiv 2309.00071), longrope (arXiv 2402.13753). Fields that a type does not use keep
    their defaults.
    """

    theta: float
    # number of entries of a head that are rotated
    dim: int
    # proportional: the share of them whose frequencies are not zero
    fraction: float = 1.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_positions: int = 2048  # context length in tokens before scaling
    attention_factor: float = 1.0  # multiplies cos and sin
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    # yarn: round the bounds of the ramp to whole dimensions
    truncate: bool = True
    reversed: bool = False  # nanochat rotates by the negative angles
    # Ministral 3 and Llama 4: queries at position p are multiplied by 1 + beta log(1 + floor((p +
    # offset) / context))
    query_beta: float = 0.0
    query_offset: int = 0
    short_factor: tuple[float, ...] = ()  # longrope: one factor per frequency
    long_factor: tuple[float, ...] = ()

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies depend on the length of the text."""
        return self.rope_type in ("dynamic", "longrope")

    @classmethod
    def from_hf(
        cls,
        hf: dict[str, Any],
        head_dim: int,
        theta: float = 10000.0,
        fraction: float | None = None,
    ) -> "RopeConfig":
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (older
        versions).

        theta, fraction: the family's defaults for what the file does not specify. fraction is the
        share of a head that is rotated; None means all of it. Raises ValueError for an unsupported
        rope type or missing or invalid parameters.
        """
        scaling = _stated(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
        rope_type = scaling.get("rope_type", scaling.get("type", "default"))
        rotated_share = _rotated_share(hf, scaling, rope_type, fraction)
        if rope_type == "proportional":
            # all pairs are there; those beyond the share have a frequency of 0
            dim = head_dim
            fraction = rotated_share
        else:
            dim = int(head_dim * rotated_share)
            fraction = 1.0
        if rope_type not in ROPE_TYPES:
            raise ValueError(
                f"config.json: rope type {rope_type!r} is not supported; known: "
                f"{', '.join(ROPE_TYPES)}"
            )
        _check_complete(rope_type, scaling)
        theta = float(scaling.get("rope_theta", hf.get("rope_theta") or theta))
        _check_rope(scaling, dim, theta)

        max_positions = hf.get("max_position_embeddings", 2048)
        original_max_positions = hf.get("original_max_position_embeddings") or scaling.get(
            "original_max_position_embeddings"
        )
        # as in transformers, the ratio of the two context lengths replaces a missing factor
        trained_positions = original_max_positions or max_positions
        ratio = max_positions / trained_positions
        default_factor = ratio if original_max_positions else 1.0
        factor = scaling.get("factor", default_factor)
        specific = {name: scaling[name] for name in _TYPE_SPECIFIC if name in scaling}
        return cls(
            theta=theta,
            dim=dim,
            fraction=float(fraction),
            rope_type=rope_type,
            factor=float(factor),
            original_max_positions=_turning_point(
                rope_type, scaling, trained_positions, max_positions
            ),
            attention_factor=_attention_factor(
                rope_type, scaling, float(factor), trained_positions
            ),
            short_factor=tuple(scaling.get("short_factor", ())),
            long_factor=tuple(scaling.get("long_factor", ())),
            query_beta=float(scaling.get("llama_4_scaling_beta", 0.0)),
            **specific,
        )


# named as in the file; what it leaves out keeps the default of the dataclass
_TYPE_SPECIFIC = (
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
)


def _turning_point(
    rope_type: str, scaling: dict[str, Any], trained_positions: int, max_positions: int
) -> int:
    """Return the length from which on a type, or the scale of queries, changes what it computes:
    max_positions where the file's original length has no meaning."""
    if rope_type == "dynamic":
        return max_positions
    if rope_type in ("default", "linear") and not scaling.get("llama_4_scaling_beta"):
        return max_positions
    return trained_positions


def _stated(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters that are not null."""
    return {name: value for name, value in parameters.items() if value is not None}


def _rotated_share(
    hf: dict[str, Any], scaling: dict[str, Any], rope_type: str, default: float | None
) -> float:
    """Return the share of a head that is rotated; raise ValueError if the file's is not in (0, 1].

    default: the family's; None means all of it.
    """
    share = default
    # otherwise the family rotates whole heads, and partial_rotary_factor is ignored
    if default is not None or rope_type != "default":
        share = scaling.get(
            "partial_rotary_factor", hf.get("partial_rotary_factor") or default
        )
    if share is None:
        share = 1.0
    if not 0 < share <= 1:  # rotary_dim divided by head_dim
        raise ValueError(
            f"config.json: the rotated share of a head must be in (0, 1], found {share!r}"
        )
    return share


def _check_complete(rope_type: str, scaling: dict[str, Any]) -> None:
    """Raise ValueError if the rope parameters lack one that their type needs."""
    missing = []
    for name in REQUIRED.get(rope_type, ()):
        if name not in scaling:
            missing.append(name)
    if missing:
        raise ValueError(
            f"config.json: rope type {rope_type!r} needs {', '.join(missing)} in its rope "
            "parameters"
        )


def scaled_context(hf: dict[str, Any], max_positions: int) -> int:
    """Return the context length that the scaling of config.json gives, as vLLM computes it.

    yarn multiplies the original context; linear and dynamic multiply max_position_embeddings. For
    longrope and llama3 the file has the scaled length, and for Gemma 3, too.
    """
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    of_full_layers = scaling.get("full_attention")  # parameters by layer type
    if isinstance(of_full_layers, dict):
        scaling = of_full_layers
    rope_type = scaling.get("rope_type") or scaling.get("type")
    factor = scaling.get("factor")

    if "gemma3" in str(hf.get("model_type")) or rope_type not in (
        "linear",
        "dynamic",
        "yarn",
    ):
        return max_positions
    if factor is None or not 1 <= factor <= LARGEST_FACTOR:
        return max_positions
    if rope_type != "yarn":
        return round(max_positions * factor)
    original = scaling.get("original_max_position_embeddings") or hf.get(
        "original_max_position_embeddings"
    )
    if not original:
        return max_positions
    return max(max_positions, round(original * factor))


def _check_rope(scaling: dict[str, Any], dim: int, theta: float) -> None:
    """Raise ValueError with every rope parameter that makes an angle undefined, or does not fit the
    rotated entries."""
    problems = []
    # yarn divides by the logarithm of theta, llama3 by the difference of the two factors
    if theta <= 1:
        problems.append(f"rope_theta {theta:g} (must be above 1)")
    low = scaling.get("low_freq_factor", 1)
    high = scaling.get("high_freq_factor", 4)
    if low >= high:
        problems.append(f"low_freq_factor {low} (must be below high_freq_factor, {high})")
    for name in ("short_factor", "long_factor"):
        if name in scaling and len(scaling[name]) != dim // 2:
            problems.append(f"{name} has {len(scaling[name])} numbers (must be {dim // 2})")
    if dim % 2:
        problems.append(f"{dim} rotated entries (must be even)")
    # its exponent is dim / (dim - 2)
    if dim < 4 and "dynamic" in (scaling.get("rope_type"), scaling.get("type")):
        problems.append(f"rope type dynamic with {dim} rotated entries (needs at least 4)")
    if problems:
        raise ValueError(
            f"config.json: invalid rope parameters: {', '.join(problems)}; download the file again"
        )


def _attention_factor(
    rope_type: str, scaling: dict[str, Any], factor: float, original_max_positions: int
) -> float:
    """Return the factor by which yarn (section 3.4 of the paper) and longrope multiply cos and sin;
    1 for other types."""
    if rope_type not in ("yarn", "longrope"):
        return 1.0
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    if factor <= 1:
        return 1.0
    if rope_type == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original_max_positions))

    # DeepSeek's form: the attention scale contains the factor of mscale_all_dim already
    mscale = scaling.get("mscale")
    all_dim = scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return (0.1 * mscale * math.log(factor) + 1) / (
            0.1 * all_dim * math.log(factor) + 1
        )
    return 0.1 * math.log(factor) + 1
