"""What an architecture is, as plain frozen values read from a checkpoint's own config.json. Imports no torch."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al., arXiv 2104.09864) and its scaling beyond the original context.

    `kind` is one of ROPE_KINDS: linear (arXiv 2306.15595), dynamic NTK, llama3 (Llama 3.1), yarn (arXiv 2309.00071),
    longrope (arXiv 2402.13753). Fields that a kind does not use keep their defaults.
    """

    theta: float
    dim: int  # how many entries of a head are rotated
    rope_type: str = "default"
    factor: float = 1.0
    original_max_positions: int = 2048  # tokens the unscaled frequencies were trained on
    attention_factor: float = 1.0  # multiplies cos and sin
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whole dimensions bound the ramp
    query_beta: float = 0.0  # Ministral 3: queries at position p are scaled by 1 + beta log(1 + floor(p / context))
    short_factor: tuple[float, ...] = ()  # longrope, one a frequency
    long_factor: tuple[float, ...] = ()

    @classmethod
    def from_hf(
        cls, hf: dict[str, Any], head_dim: int, theta: float = 10000.0, fraction: float | None = None
    ) -> "RopeConfig":
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before it).

        base, fraction: the family's defaults where the file states none; None: its heads are rotated whole. Raises
        ValueError for a rope type that litft does not know or a scaling that lacks a field.
        """
        scaling = {k: v for k, v in (hf.get("rope_parameters") or hf.get("rope_scaling") or {}).items() if v is not None}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if fraction is not None or kind != "default":
            fraction = scaling.get("partial_rotary_factor", hf.get("partial_rotary_factor") or fraction)
        fraction = 1.0 if fraction is None else fraction
        if not (is_positive(fraction) and fraction <= 1):
            raise ValueError(f"config.json: partial_rotary_factor must lie in (0, 1], found {fraction!r}")
        dim = int(head_dim * fraction)
        if kind not in ROPE_KINDS:
            raise ValueError(f"config.json: rope type {kind!r} is not supported; known: {', '.join(ROPE_KINDS)}")
        needs = {"linear": ["factor"], "dynamic": ["factor"], "longrope": ["short_factor", "long_factor"]}.get(kind, [])
        if kind in ("llama3", "yarn"):
            needs = ["factor"] + ["original_max_position_embeddings"] * (kind == "llama3")
        if missing := [name for name in needs if name not in scaling]:
            raise ValueError(f"config.json: rope type {kind!r} needs {', '.join(missing)} in its rope parameters")
        _check_rope(scaling, dim)
        limit = hf.get("max_position_embeddings", 2048)
        trained = hf.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
        # transformers lets the two contexts' ratio stand in for a factor that is not given; for longrope it wins
        ratio = limit / (trained or limit)
        factor = scaling.get("factor", ratio if trained else 1.0)
        if kind == "longrope" and hf.get("original_max_position_embeddings"):
            factor = ratio
        own = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate")
        return cls(
            theta=float(scaling.get("rope_theta", hf.get("rope_theta") or theta)),
            dim=dim,
            rope_type=kind,
            factor=float(factor),
            original_max_positions=int(limit if kind in ("default", "linear", "dynamic") else trained or limit),
            attention_factor=_attention_factor(kind, scaling, float(factor), trained or limit),
            short_factor=tuple(scaling.get("short_factor", ())),
            long_factor=tuple(scaling.get("long_factor", ())),
            query_beta=float(scaling.get("llama_4_scaling_beta", 0.0)),
            **{name: scaling[name] for name in own if name in scaling},
        )


def _check_rope(scaling: dict[str, Any], dim: int) -> None:
    """ValueError listing every rope parameter that would make an angle undefined."""
    numbers = "factor rope_theta low_freq_factor high_freq_factor beta_fast beta_slow attention_factor mscale mscale_all_dim"
    numbers += " llama_4_scaling_beta"
    odd = [f"{n} {scaling[n]!r}" for n in numbers.split() if n in scaling and not is_positive(scaling[n])]
    trained = scaling.get("original_max_position_embeddings", 2)
    if not (isinstance(trained, int) and trained >= 2):
        odd.append(f"original_max_position_embeddings {trained!r}")
    if not isinstance(scaling.get("truncate", True), bool):
        odd.append(f"truncate {scaling['truncate']!r}")
    if scaling.get("rope_theta", 2) == 1 or scaling.get("low_freq_factor", 1) == scaling.get("high_freq_factor", 4):
        odd.append("rope_theta 1, or low_freq_factor equal to high_freq_factor")
    for name in ("short_factor", "long_factor"):
        factors = scaling.get(name, [1] * (dim // 2))
        if not (isinstance(factors, list) and len(factors) == dim // 2 and all(map(is_positive, factors))):
            odd.append(f"{name} (needs {dim // 2} numbers above 0)")
    if dim % 2:
        odd.append(f"an odd number {dim} of rotated entries")
    if dim < 4 and "dynamic" in (scaling.get("rope_type"), scaling.get("type")):
        odd.append(f"dynamic for {dim} rotated entries")
    if odd:
        raise ValueError(f"config.json: rope parameters cannot be {', '.join(odd)}; download the file again")


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file's object; ValueError where it is none."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no valid JSON ({str(error)[:200]}); get it again from where it came") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object but {type(content).__name__}; get it again from where it came")
    return content


def is_positive(value: Any) -> bool:
    """Whether a value from a file is a finite number above 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _attention_factor(kind: str, scaling: dict[str, Any], factor: float, context: int) -> float:
    """What yarn (its section 3.4) and longrope multiply cos and sin by; 1 for the others."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(context))
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return (0.1 * mscale * math.log(factor) + 1) / (0.1 * all_dim * math.log(factor) + 1)
    return 0.1 * math.log(factor) + 1


@dataclass(frozen=True)
class NormConfig:
    """A normalisation over the last dimension: root mean square (arXiv 1910.07467) or LayerNorm (arXiv 1607.06450)."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    offset: float = 0.0  # added to the stored weight; 1 for Gemma, which stores weight - 1
    weight: bool = True
    bias: bool = False  # of a LayerNorm


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of gated feed-forward layers, of which each token goes through the `top_k` with the highest scores."""

    count: int
    top_k: int
    hidden_dim: int  # of one expert
    renormalize: bool  # the chosen experts' probabilities sum to 1
    router_bias: bool = False
    bias: bool = False  # of the experts' Linears
    shared_dim: int = 0  # hidden size of the expert that every token goes through; 0: there is none
    shared_gate: bool = False  # a sigmoid scales the shared expert's output

    def __post_init__(self) -> None:
        if self.top_k > self.count:
            raise ValueError(
                f"config.json: num_experts_per_tok {self.top_k} is more than the {self.count} experts there are"
            )


@dataclass(frozen=True)
class LayerConfig:
    """What may differ from one depth to the next."""

    rope: RopeConfig | None = None  # None: no rotation in this layer (NoPE, arXiv 2305.19466, or learned positions)
    window: int | None = None  # a query sees this many keys at most, itself included
    experts: ExpertsConfig | None = None  # None: one dense MLP
    attention_scale: float | None = None  # multiplies q k^T; None: 1 / sqrt(head_dim)


@dataclass(frozen=True)
class Config:
    """An architecture: every value that the network is built from, and nothing else."""

    model_type: str
    vocab_size: int
    max_positions: int  # tokens, as config.json states them
    dim: int
    hidden_dim: int  # of a dense MLP
    n_heads: int
    n_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    activation: str = "silu"
    gated: bool = True  # activation(gate) * up, rather than activation(up)
    activation_limit: float | None = None  # gpt-oss clamps gate and up
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    tied: bool = False  # the head's weight is the embedding's
    norm_position: Literal["before", "after", "both"] = "before"  # of attention and MLP
    parallel: bool = False  # attention and MLP read the same input and are added together
    shared_norm: bool = False  # ... and share one norm
    qk_norm: NormConfig | None = None
    qk_norm_over: Literal["head", "heads", "all"] = "head"  # one weight for all heads, one a head, or one norm over all
    qkv_clip: float | None = None
    rope_interleaved: bool = False  # entry 2 i pairs with 2 i + 1, rather than i with i + dim / 2
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    sinks: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    learned_positions: bool = False  # a table of `context` rows is added to the embedding

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"config.json: {self.n_heads} query heads cannot share {self.n_kv_heads} key/value heads evenly; "
                "num_attention_heads must be a multiple of num_key_value_heads"
            )
