"""Which tensor of a GGUF file is stored in which type: the mixtures of llama.cpp's llama-quantize.

As its src/llama-quant.cpp has them, without an importance matrix.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from litft.export.gguf.files import gguf

_TYPES = gguf.GGMLQuantizationType
_FILE_TYPES = gguf.LlamaFileType

# value of --outtype -> (type of most matrices, type of the file)
OUTTYPES = {
    "f32": (_TYPES.F32, _FILE_TYPES.ALL_F32),
    "f16": (_TYPES.F16, _FILE_TYPES.MOSTLY_F16),
    "bf16": (_TYPES.BF16, _FILE_TYPES.MOSTLY_BF16),
    "q8_0": (_TYPES.Q8_0, _FILE_TYPES.MOSTLY_Q8_0),
    "q6_k": (_TYPES.Q6_K, _FILE_TYPES.MOSTLY_Q6_K),
    "q5_k_m": (_TYPES.Q5_K, _FILE_TYPES.MOSTLY_Q5_K_M),
    "q4_k_m": (_TYPES.Q4_K, _FILE_TYPES.MOSTLY_Q4_K_M),
    "q4_0": (_TYPES.Q4_0, _FILE_TYPES.MOSTLY_Q4_0),
    "mxfp4": (_TYPES.MXFP4, _FILE_TYPES.MOSTLY_MXFP4_MOE),
}
PLAIN = (_TYPES.F32, _TYPES.F16, _TYPES.BF16)
# of rows that are no whole blocks of the type
FALLBACKS = {_TYPES.Q4_K: _TYPES.Q5_0, _TYPES.Q5_K: _TYPES.Q5_1, _TYPES.Q6_K: _TYPES.Q8_0}

# norms, positions, convolutions and routers, and tensors with other leaves than weight: llama.cpp
# computes with them in fp32 alone (conversion/base.py)
FP32 = re.compile(
    r"_norm\.weight$|^position_embd|^rope_|ssm_conv1d|shortconv\.conv|ffn_gate_inp"
)
# matrices that are too small to be quantized
UNQUANTIZED = re.compile(r"altup|laurel|per_layer_model_proj")
LEAVES = (".weight", ".lora_a", ".lora_b")
VALUES = re.compile(r"attn_v\.weight|attn_qkv\.weight|attn_kv_b\.weight")
EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
# numbers of layers in which llama.cpp recognizes a model of 70 billion parameters
LAYERS_OF_70B = {"llama": 80, "qwen2": 80, "olmo": 80, "deci": 80, "jais2": 68}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a GGUF file before it is encoded."""

    name: str  # llama.cpp's
    shape: tuple[int, ...]

    @property
    def layer(self) -> int:
        """The number of its layer; -1 outside of the layers."""
        number = re.match(r"blk\.(\d+)\.", self.name)
        return int(number[1]) if number else -1


@dataclass(frozen=True)
class ModelSizes:
    """What the mixtures depend on."""

    architecture: str  # llama.cpp's
    num_layers: int
    num_experts: int = 0
    # whether several query heads share a key/value head
    grouped: bool = False

    @property
    def is_70b(self) -> bool:
        """Whether values are stored in five bits instead of four."""
        if self.architecture == "llama" and not self.grouped:
            return False
        return LAYERS_OF_70B.get(self.architecture) == self.num_layers


@dataclass
class _Counts:
    """How many tensors of a kind were met so far; llama.cpp gives more bits to the first, the last,
    and every third one between."""

    values: int = 0
    downs: int = 0
    # number of all tensors with values
    all_values: int = 0


def tensor_types(
    tensors: Sequence[StoredTensor], sizes: ModelSizes, outtype: str
) -> dict[str, gguf.GGMLQuantizationType]:
    """Return the type of each tensor by name. outtype: a key of OUTTYPES."""
    default = OUTTYPES[outtype][0]
    if default in PLAIN:
        return {tensor.name: plain_type(tensor, default) for tensor in tensors}
    is_tied = all(tensor.name != "output.weight" for tensor in tensors)
    counts = _Counts()
    for tensor in tensors:
        counts.all_values += bool(VALUES.search(tensor.name))
    types = {}
    # llama.cpp counts in this order
    for tensor in sorted(tensors, key=lambda tensor: (tensor.layer, tensor.name)):
        stored = plain_type(tensor, _TYPES.F16)
        if stored == _TYPES.F16 and not UNQUANTIZED.search(tensor.name):
            stored = _mixed_type(tensor, sizes, outtype, is_tied, counts)
            stored = _fitting_type(stored, tensor.shape[-1])
        types[tensor.name] = stored
    return types


def plain_type(
    tensor: StoredTensor, default: gguf.GGMLQuantizationType
) -> gguf.GGMLQuantizationType:
    """Return a tensor's type in a file of `default`: fp32 for what llama.cpp computes with in fp32
    alone."""
    is_matrix = len(tensor.shape) >= 2 and tensor.name.endswith(LEAVES)
    if not is_matrix or FP32.search(tensor.name):
        return _TYPES.F32
    return default


def _mixed_type(
    tensor: StoredTensor, sizes: ModelSizes, outtype: str, is_tied: bool, counts: _Counts
) -> gguf.GGMLQuantizationType:
    """Return a matrix's type in a mixture, before its rows are looked at; counts it."""
    default = OUTTYPES[outtype][0]
    name = tensor.name
    # the head, and the embedding that also is the head
    if name == "output.weight" or (is_tied and name in EMBEDDINGS):
        return _head_type(tensor, sizes, default)
    if outtype == "mxfp4":
        # the experts of a mixture are stacked
        return _TYPES.MXFP4 if len(tensor.shape) > 2 else _TYPES.Q8_0
    if name in EMBEDDINGS:
        return default
    if VALUES.search(name):
        stored = _type_of_values(sizes, outtype, counts)
        counts.values += 1
        return stored
    # eight experts are those of Mixtral, where more bits for the attention cost little
    if "attn_k.weight" in name and sizes.num_experts == 8:
        return _TYPES.Q8_0
    if "ffn_down" in name:
        # experts of a layer need not follow each other
        position = tensor.layer if sizes.num_experts > 1 else counts.downs
        counts.downs += 1
        return _type_of_downs(position, sizes, outtype)
    is_attention_output = "attn_output.weight" in name and sizes.architecture != "falcon"
    if is_attention_output and sizes.num_experts == 8 and outtype == "q4_k_m":
        return _TYPES.Q5_K
    return default


def _head_type(
    tensor: StoredTensor, sizes: ModelSizes, default: gguf.GGMLQuantizationType
) -> gguf.GGMLQuantizationType:
    """Return the type of the head."""
    is_ragged = tensor.shape[-1] % gguf.GGML_QUANT_SIZES[default][0] != 0
    if (
        default in (_TYPES.MXFP4, _TYPES.Q8_0)
        or is_ragged
        or sizes.architecture == "falcon"
    ):
        return _TYPES.Q8_0
    return _TYPES.Q6_K


def _has_more_bits(position: int, count: int) -> bool:
    """Return whether a tensor is among the first and last eighths, or is every third between."""
    first = count // 8
    return position < first or position >= 7 * count // 8 or (position - first) % 3 == 2


def _type_of_values(
    sizes: ModelSizes, outtype: str, counts: _Counts
) -> gguf.GGMLQuantizationType:
    """Return the type of the values' projection in the attention."""
    stored = OUTTYPES[outtype][0]
    is_mixture = outtype in ("q4_k_m", "q5_k_m")
    if is_mixture and _has_more_bits(counts.values, counts.all_values):
        stored = _TYPES.Q6_K
    if sizes.is_70b and stored == _TYPES.Q4_K:
        stored = _TYPES.Q5_K
    if sizes.num_experts == 8:
        stored = _TYPES.Q8_0
    return stored


def _type_of_downs(
    position: int, sizes: ModelSizes, outtype: str
) -> gguf.GGMLQuantizationType:
    """Return the type of an MLP's last projection."""
    count = sizes.num_layers
    more = _has_more_bits(position, count)
    if outtype == "q4_k_m" and sizes.architecture == "falcon":
        if position < count // 16:
            return _TYPES.Q6_K
        return _TYPES.Q5_K if more else _TYPES.Q4_K
    if outtype in ("q4_k_m", "q5_k_m") and more:
        return _TYPES.Q6_K
    return OUTTYPES[outtype][0]


def _fitting_type(
    stored: gguf.GGMLQuantizationType, columns: int
) -> gguf.GGMLQuantizationType:
    """Return a type whose blocks divide the rows."""
    if columns % gguf.GGML_QUANT_SIZES[stored][0] == 0:
        return stored
    fallback = FALLBACKS.get(stored, stored)
    if columns % gguf.GGML_QUANT_SIZES[fallback][0] == 0:
        return fallback
    return _TYPES.F16
