"""Frozen dataclasses that describe an architecture, read from a checkpoint's config.json.

Does not import torch.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from litft.model.rope_config import RopeConfig

# entries that ALiBi adds to each query and key
ALIBI_DIMS = 2


@dataclass(frozen=True)
class NormConfig:
    """RMSNorm (arXiv 1910.07467) or LayerNorm (arXiv 1607.06450)."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    # added to the stored weight; 1 for Gemma, which stores weight - 1
    offset: float = 0.0
    weight: bool = True
    bias: bool = False


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of feed-forward experts; each token uses the `top_k` experts with the highest
    scores.

    scoring: how router logits become scores: softmax over all experts, sigmoid, or SparseMixer
    (arXiv 2310.00811) for two experts, where logits that are lower than the highest by more than 2
    `jitter` of it take no part in the softmax.
    """

    count: int
    top_k: int
    hidden_dim: int  # of one expert
    # scale the selected experts' probabilities to sum to 1
    renormalize: bool
    router_bias: bool = False
    bias: bool = False  # of the experts' Linears
    # hidden dim of the shared expert, which every token uses; 0: no shared expert
    shared_dim: int = 0
    # multiply the shared expert's output by a sigmoid gate
    shared_gate: bool = False
    scoring: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    jitter: float = 0.01  # sparsemixer
    # added to the scores for the selection only (arXiv 2408.15664)
    correction_bias: bool = False
    # experts are only selected from the `top_groups`
    # groups with the highest scores (arXiv 2412.19437)
    groups: int = 1
    top_groups: int = 1
    # of a group: the sum of its two highest scores, or the highest
    group_score: Literal["top2", "max"] = "top2"
    # multiplies the selected experts' weights
    weight_scale: float = 1.0
    # multiplies the sum of routed and shared experts
    output_scale: float = 1.0
    # the weights multiply the experts' inputs rather than their outputs (Llama 4)
    weighted_input: bool = False
    # experts and the dense MLP side by side, with norms of their own (Gemma 4)
    beside_dense: bool = False

    def __post_init__(self) -> None:
        for number in (self.count, self.top_k, self.hidden_dim):
            if not isinstance(number, int):
                raise ValueError(
                    "config.json: the numbers and sizes of experts must be one whole number for "
                    f"all layers of this model_type, found {number!r:.200}"
                )
        if not 1 <= self.top_k <= self.count:
            if self.top_k > self.count:
                problem = f"is more than the {self.count} experts"
            else:
                problem = "selects no expert"
            raise ValueError(
                f"config.json: num_experts_per_tok {self.top_k} {problem}; download the file again"
            )
        if (
            self.count % self.groups
            or self.top_groups > self.groups
            or (self.groups > 1 and self.count < 2 * self.groups)
        ):
            raise ValueError(
                f"config.json: n_group {self.groups} and topk_group {self.top_groups} do not "
                f"divide {self.count} experts; download the file again"
            )


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (arXiv 2405.04434): sizes of the latent vectors and of a head's
    parts."""

    # of the vector from which keys and values are expanded
    dim: int
    # of the vector from which queries are expanded; None: they are projected directly
    query_dim: int | None
    nope_dim: int  # entries of a head that are not rotated
    # entries of a head that are rotated; the rotated key is shared by all heads
    rope_dim: int
    value_dim: int
    norm: NormConfig = NormConfig()  # of both vectors

    @property
    def head_dim(self) -> int:
        """The size of a query and of an expanded key."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True)
class DeltaNetConfig:
    """Gated DeltaNet (arXiv 2412.06464); with `row_decay`, Kimi Delta Attention (arXiv
    2510.26692)."""

    # of values; each has a state of key_dim x value_dim
    n_heads: int
    n_key_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float
    # one decay for each row of the state, rather than one a head
    row_decay: bool = False
    # write strengths up to 2 (arXiv 2411.12537)
    negative_eigenvalues: bool = False

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a text's state: inputs of the convolutions of queries, keys and values, and
        the matrices."""
        widths = [self.n_key_heads * self.key_dim] * 2 + [self.n_heads * self.value_dim]
        return *((self.conv_width - 1, width) for width in widths), (
            self.n_heads,
            self.key_dim,
            self.value_dim,
        )

    def __post_init__(self) -> None:
        if self.n_heads % self.n_key_heads:
            raise ValueError(
                f"config.json: {self.n_heads} linear value heads cannot share {self.n_key_heads} "
                "key heads evenly; linear_num_value_heads must be a multiple of "
                "linear_num_key_heads"
            )


@dataclass(frozen=True)
class Mamba2Config:
    """Mamba-2 (arXiv 2405.21060)."""

    n_heads: int
    head_dim: int
    n_groups: int  # heads of a group share keys and queries
    state_dim: int
    conv_width: int
    norm_eps: float
    bias: bool = False  # of the projections
    conv_bias: bool = True
    # of the output, with the gate; False: only the gate
    norm: bool = True
    # the gate multiplies the output before the norm
    gate_first: bool = True
    step_limits: tuple[float, float] = (0.0, math.inf)
    out_bias: bool = False
    # Falcon-H1's muP scales: of the input, the output, and gate, values, keys, queries and steps
    input_scale: float = 1.0
    output_scale: float = 1.0
    scales: tuple[float, ...] = ()

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a text's state: inputs of the convolution, and the matrices."""
        channels = self.n_heads * self.head_dim + 2 * self.n_groups * self.state_dim
        return (self.conv_width - 1, channels), (
            self.n_heads,
            self.state_dim,
            self.head_dim,
        )

    def __post_init__(self) -> None:
        if self.n_heads % self.n_groups:
            raise ValueError(
                f"config.json: {self.n_heads} Mamba heads do not divide into {self.n_groups} "
                "groups; the number of heads must be a multiple of the number of groups"
            )


@dataclass(frozen=True)
class ShortConvConfig:
    """The gated short convolution of LFM2 (arXiv 2511.23404)."""

    dim: int
    width: int
    bias: bool = False

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of a text's state: inputs of the convolution."""
        return ((self.width - 1, self.dim),)


@dataclass(frozen=True)
class Chunk:
    """Chunked attention (Llama 4): a document is divided into chunks, and a query sees only keys of
    its own chunk."""

    size: int  # in tokens


@dataclass(frozen=True)
class AltUpConfig:
    """Alternating Updates (arXiv 2301.13310) and LAuReL (arXiv 2411.07501), as in Gemma 3n."""

    # number of residual streams; a block computes one and predicts the others
    streams: int
    active: int  # the stream that blocks compute
    laurel_rank: int


MixerConfig = DeltaNetConfig | Mamba2Config | ShortConvConfig
# later layers reuse the keys and values of the last layer before them with the same window
KVSharing = Literal["none", "store", "reuse"]


@dataclass(frozen=True)
class LayerConfig:
    """The values that may differ between layers."""

    # None: no rotation in this layer (NoPE, arXiv 2305.19466, or learned positions)
    rope: RopeConfig | None = None
    # sliding window: a query sees at most this many keys, including its own; or chunks; None: all
    # keys before it
    window: int | Chunk | None = None
    experts: ExpertsConfig | None = None  # None: one dense MLP
    # multiplies q k^T; None: 1 / sqrt(head_dim)
    attention_scale: float | None = None
    hidden_dim: int | None = None  # of the dense MLP; None: the config's
    # None: keys and values are projected directly
    latent: LatentConfig | None = None
    # of the MLP: the share of gate values that are set to zero, if they are distributed normally
    sparsity: float = 0.0
    mixer: MixerConfig | None = None  # a recurrent mixer
    # False: the layer has only the mixer, or only the MLP
    attention: bool = True
    mlp: bool = True
    norm_position: str | None = None  # None: the config's
    # whether queries and keys have the config's norm
    qk_norm: bool = True
    head_dim: int | None = None  # None: the config's
    n_kv_heads: int | None = None  # None: the config's
    # values are the keys before norm and rotation
    key_is_value: bool = False
    kv_sharing: KVSharing = "none"

    def with_mixer(self, mixer: MixerConfig) -> "LayerConfig":
        """Return this layer with a recurrent mixer in place of its attention."""
        return replace(self, mixer=mixer, attention=False, rope=None, latent=None)


@dataclass(frozen=True)
class Config:
    """An architecture: all values needed to build the network."""

    model_type: str
    vocab_size: int
    # context length in tokens, from config.json
    max_positions: int
    dim: int
    hidden_dim: int  # of a dense MLP
    n_heads: int
    n_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    activation: str = "silu"
    # activation(gate) * up, rather than activation(up)
    gated: bool = True
    activation_limit: float | None = None  # gpt-oss clamps gate and up
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    # the output head shares the embedding's weight
    tied: bool = False
    # of attention and MLP f: x + f(norm(x)), x + norm(f(x)), both of them, or norm(x + f(x))
    norm_position: Literal["before", "after", "both", "residual"] = "before"
    # attention and MLP read the same input, and their outputs are added
    parallel: bool = False
    # with parallel: attention and MLP share one norm
    shared_norm: bool = False
    qk_norm: NormConfig | None = None
    # one weight for all heads, one per head, one norm over all
    qk_norm_over: Literal["head", "heads", "all"] = "head"
    qk_norm_after_rope: bool = False  # rather than before it
    qkv_clip: float | None = None
    # Falcon-H1's muP scales of the outputs of attention and MLP, and of the MLP's gate
    attention_out_scale: float = 1.0
    mlp_out_scale: float = 1.0
    mlp_gate_scale: float = 1.0
    # multiply the attention's output by the sigmoid of a projection of its input; "head": one
    # number for each head
    attention_gate: bool | Literal["head"] = False
    # slope of each query head, by which scores fall with the distance (arXiv 2108.12409)
    alibi: tuple[float, ...] = ()
    # entry 2 i pairs with 2 i + 1, rather than i with i + dim / 2
    rope_interleaved: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    sinks: bool = False
    embed_scale: float = 1.0
    # NEFTune adds noise to what transformers' embedding module returns: Gemma's has the scale in
    # it, Granite's has not, and Muse Glimmer's also has the norm
    noise_after: Literal["lookup", "scale", "norm"] = "scale"
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    # a table of `max_positions` rows is added to the embedding
    learned_positions: bool = False
    # sine and cosine of the position are added to the embedding (arXiv 1706.03762)
    sinusoidal_positions: bool = False
    # added to positions before they are looked up; the table has as many more rows
    position_offset: int = 0
    # sines of this position, after the offset, are 0
    zero_position: int | None = None
    value_norm: NormConfig | None = None
    per_layer_dim: int = 0  # of the per-layer embeddings; 0: none
    per_layer_vocab_size: int = 0
    # a constant multiplies each block's output
    layer_scale: bool = False
    altup: AltUpConfig | None = None
    embed_norm: NormConfig | None = None  # of the embedding
    # of the outputs of attention and MLP; None: as `norm`
    post_norm: NormConfig | None = None
    # before the head; True: as `norm`, False: none
    final_norm: NormConfig | bool = True

    @property
    def stream_dim(self) -> int:
        """The size of a token's vector between blocks: that of all residual streams."""
        return self.dim * (self.altup.streams if self.altup else 1)

    def cache_shape(self, layer: LayerConfig) -> tuple[int, int, int]:
        """Return what the cache of a layer holds for a token: the number of heads, and the sizes of
        a key and a value."""
        if not layer.attention:
            return 0, 0, 0
        if layer.latent:  # values are a part of the keys
            return 1, layer.latent.dim + layer.latent.rope_dim, 0
        head_dim = layer.head_dim or self.head_dim
        if layer.kv_sharing == "reuse":
            heads = 0
        else:
            heads = layer.n_kv_heads or self.n_kv_heads
        return heads, head_dim + (ALIBI_DIMS if self.alibi else 0), head_dim

    @property
    def can_share_prompts(self) -> bool:
        """Whether documents may share the computation of their common beginning: with attention
        whose rotation depends on positions alone, and no recurrent mixers, chunks or ALiBi, which
        counts places in a row."""
        if self.alibi:
            return False
        for layer in self.layers:
            if layer.mixer is not None or isinstance(layer.window, Chunk):
                return False
            if layer.rope is not None and layer.rope.depends_on_length:
                return False
        return True

    def kv_source(self, index: int) -> int:
        """Return the layer whose keys and values a layer attends to."""
        layer = self.layers[index]
        if layer.kv_sharing != "reuse":
            return index
        # the latest earlier layer with the same window that keeps its keys and values for others
        stores = []
        for n in range(index):
            if (
                self.layers[n].kv_sharing == "store"
                and self.layers[n].window == layer.window
            ):
                stores.append(n)
        return stores[-1]

    def pair_dims(self, layer: LayerConfig) -> int:
        """Return the multiplications for each pair of a query and a key: of the score, and of the
        weighted value."""
        if not layer.attention:
            return 0
        if layer.latent:
            return self.n_heads * (layer.latent.head_dim + layer.latent.value_dim)
        return self.n_heads * 2 * (layer.head_dim or self.head_dim)

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"config.json: {self.n_heads} query heads cannot share {self.n_kv_heads} key/value "
                "heads evenly; num_attention_heads must be a multiple of num_key_value_heads"
            )
