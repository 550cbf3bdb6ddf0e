"""Quantized weights as others publish them: FP8 in blocks, GPTQ, AWQ and integers of
compressed-tensors. They are only read, and dequantized."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

# O output features, I input features, G groups of input features

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# column of each group of 8 that the i-th lowest 4 bits of a number hold
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_AGAIN = "download the folder again"
# compressed-tensors' format of integers
PACKED = "pack-quantized"
QUANTIZED_FORMATS = ("fp8", "gptq", "awq", "compressed-tensors")


@dataclass(frozen=True)
class StoredWeight:
    """A weight that is stored as several tensors."""

    # names of the stored tensors, by their suffix
    parts: dict[str, str]
    shape: tuple[int, int]  # (O, I)
    dtype: torch.dtype
    dequantize: Callable[[dict[str, Tensor]], Tensor]  # stored tensors by suffix -> weight


# compressed-tensors' transforms of weights, whose results are stored
OFFLINE_TRANSFORMS = ("weight_input", "weight_output")


def check_method(settings: dict[str, Any]) -> None:
    """Raise ValueError if weights with this quantization_config cannot be read."""
    method = settings.get("quant_method")
    remedy = "download the unquantized model"
    if method == "compressed-tensors":
        # each group of modules may have a format of its own
        formats = set()
        for group in _groups(settings):
            formats.add(_format_of(group, settings))
        # None: no format is named, so that the tensors that are found decide
        unsupported = formats - {"float-quantized", "naive-quantized", PACKED, None}
        if unsupported:
            raise ValueError(
                f"its weights are quantized ({method}, {min(unsupported)}), which is not "
                f"supported; {remedy}"
            )
        # for its ValueError alone
        if PACKED in formats:
            _packed_bits(settings)
        online = _online_transforms(settings)
        if online:
            raise ValueError(
                f"its weights are quantized ({method}) and rotated (transform_config), and the "
                f"model rotates activations, too ({', '.join(online)}), which is not supported; "
                f"{remedy}"
            )
    if method == "gptq" and settings.get("bits") not in (2, 4, 8):
        raise ValueError(
            f"its weights are quantized (gptq, {settings.get('bits')} bits), litft reads 2, 4 and "
            f"8; {remedy}"
        )
    if method == "gptq" and _gptq_format(settings) not in ("gptq", "gptq_v2"):
        raise ValueError(
            f"its weights are quantized (gptq, format {_gptq_format(settings)}), litft reads gptq "
            f"and gptq_v2; {remedy}"
        )
    if method == "awq" and (
        settings.get("bits", 4) != 4
        or str(settings.get("version", "gemm")).lower() != "gemm"
    ):
        reason = (
            f"its weights are quantized (awq, {settings.get('bits', 4)} bits, "
            f"{settings.get('version')})"
        )
        raise ValueError(f"{reason}, litft reads 4 bits in the gemm layout; {remedy}")


def _online_transforms(settings: dict[str, Any]) -> list[str]:
    """Return where compressed-tensors transforms activations: those of weights are in the stored
    weights already."""
    transforms = settings.get("transform_config")
    if not transforms:
        return []
    locations = set()
    try:
        for scheme in transforms["config_groups"].values():
            for place in scheme["apply"]:
                locations.add(str(place["location"]))
    except (AttributeError, KeyError, TypeError):
        raise ValueError(
            "config.json: transform_config of quantization_config is damaged, found "
            f"{transforms!r:.200}; {_AGAIN}"
        ) from None
    return sorted(locations.difference(OFFLINE_TRANSFORMS))


def _groups(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return compressed-tensors' groups of modules; raise ValueError if they are damaged."""
    groups = settings.get("config_groups") or {}
    damaged = ValueError(
        f"config.json: config_groups of quantization_config is damaged, found {groups!r:.200}; "
        f"{_AGAIN}"
    )
    if not isinstance(groups, dict):
        raise damaged
    for group in groups.values():
        if not isinstance(group, dict) or not isinstance(group.get("weights") or {}, dict):
            raise damaged
    return list(groups.values())


def _format_of(group: dict[str, Any], settings: dict[str, Any]) -> str | None:
    """Return the format of a group of modules; None if the settings do not name it."""
    found = group.get("format") or settings.get("format")
    return None if found is None else str(found)


def find_stored_weights(
    metas: dict[str, Tensor | str], settings: dict[str, Any]
) -> dict[str, StoredWeight]:
    """Return the weights of a folder that are stored as several tensors; metas: all stored tensors
    on the meta device.

    settings: quantization_config of config.json.
    """
    method = settings.get("quant_method")
    if method == "compressed-tensors":
        packed = dict(_packed_weights(metas, settings))
        return packed | dict(_fp8_weights(metas, _fp8_block(settings)))
    if method == "fp8":
        return dict(_fp8_weights(metas, _fp8_block(settings)))
    if method in ("gptq", "awq"):
        return dict(_integer_weights(metas, method, settings))
    return {}


def _fp8_block(settings: dict[str, Any]) -> Iterable[int]:
    """Return the rows and columns of one scale, by the settings of a folder in FP8."""
    if settings.get("weight_block_size"):
        return settings["weight_block_size"]
    # compressed-tensors has it in each group of modules
    for group in _groups(settings):
        structure = (group.get("weights") or {}).get("block_structure")
        if isinstance(structure, list):
            return structure
    return (128, 128)


def _fp8_weights(
    metas: dict[str, Tensor | str], block: Iterable[int]
) -> Iterable[tuple[str, StoredWeight]]:
    """Yield the weights that are stored in FP8, with their names. block: the rows and columns of
    one scale."""
    for name, meta in metas.items():
        if isinstance(meta, Tensor) and meta.dtype in FP8 and name.endswith(".weight"):
            stem = name.removesuffix("weight")
            dtype = torch.bfloat16
            # DeepSeek's name (a factor, despite "inv"), or that of compressed-tensors
            if f"{stem}weight_scale_inv" in metas:
                scale = f"{stem}weight_scale_inv"
            elif f"{stem}weight_scale" in metas:
                scale = f"{stem}weight_scale"
                # compressed-tensors has scales in the dtype of the weight
                scale_meta = metas[scale]
                if isinstance(scale_meta, Tensor) and scale_meta.dtype == torch.float32:
                    dtype = torch.float32
            else:
                raise ValueError(
                    f"{name} is stored in FP8, but its scale is missing; {_AGAIN}"
                )
            # scales of activations, which the dequantized weight does not need
            unused = {}
            for suffix in ("input_scale", "activation_scale"):
                if f"{stem}{suffix}" in metas:
                    unused[suffix] = f"{stem}{suffix}"
            parts = {"weight": name, "scale": scale, **unused}
            _check_fp8_scale(parts["scale"], metas[parts["scale"]], meta, block)
            dequantize = partial(_call, dequantize_fp8, block=tuple(block), dtype=dtype)
            rows, columns = meta.shape
            yield name, StoredWeight(parts, (rows, columns), dtype, dequantize)


def _check_fp8_scale(name: str, scale: Any, weight: Tensor, block: Iterable[int]) -> None:
    """Raise ValueError if a scale is not one number, one a row, or one for each block."""
    if weight.dim() != 2:
        raise ValueError(
            f"{name}: a weight in FP8 must be a matrix, found {tuple(weight.shape)}; {_AGAIN}"
        )
    sizes = tuple(block)
    if len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError(
            "config.json: weight_block_size, or block_structure, must be two positive numbers, "
            f"found {sizes!r:.100}"
        )
    rows, columns = weight.shape
    # blocks at the edges may be smaller
    blocks = (-(-rows // sizes[0]), -(-columns // sizes[1]))
    shapes = ((), (1,), (1, 1), (rows, 1), blocks)
    if not isinstance(scale, Tensor) or not scale.is_floating_point():
        raise ValueError(
            f"{name}: expected floating-point numbers, found {_dtype_of(scale)}; {_AGAIN}"
        )
    if tuple(scale.shape) not in shapes:
        expected = f"one number, {(rows, 1)} or {blocks}"
        raise ValueError(
            f"{name}: expected shape {expected}, found {tuple(scale.shape)}; {_AGAIN}"
        )


def _check_part(
    name: str, meta: Tensor | str, dtype: torch.dtype | None, shape: tuple[int, ...]
) -> Tensor:
    """Return a stored tensor; raise ValueError if it has another shape or type. dtype: None for any
    floating-point type."""
    if not isinstance(meta, Tensor) or (
        meta.dtype != dtype if dtype else not meta.is_floating_point()
    ):
        raise ValueError(
            f"{name}: expected {dtype or 'floating-point numbers'}, found {_dtype_of(meta)}; "
            f"{_AGAIN}"
        )
    if tuple(meta.shape) != shape:
        raise ValueError(
            f"{name}: expected shape {shape}, found {tuple(meta.shape)}; {_AGAIN}"
        )
    return meta


def _dtype_of(meta: Any) -> str:
    if isinstance(meta, Tensor):
        return str(meta.dtype)
    return str(meta)


def _call(
    function: Callable[..., Tensor], tensors: dict[str, Tensor], **settings: Any
) -> Tensor:
    return function(**tensors, **settings)


def dequantize_fp8(
    weight: Tensor,
    scale: Tensor,
    block: tuple[int, ...],
    dtype: torch.dtype = torch.bfloat16,
    **unused: Tensor,
) -> Tensor:
    """Return weight (O, I) in `dtype`. scale: one number, one a row (O, 1), or one for each block
    of (block[0], block[1])."""
    scale = scale.float()
    # one number or one a row broadcasts as it is; one a block is repeated over its block
    if scale.dim() == 2 and (
        scale.shape[1] > 1 or scale.shape[0] not in (1, weight.size(0))
    ):
        rows, columns = weight.shape
        scale = scale.repeat_interleave(block[0], 0)[:rows]
        scale = scale.repeat_interleave(block[1], 1)[:, :columns]
    return (weight.float() * scale).to(dtype)


def _packed_bits(settings: dict[str, Any]) -> int:
    """Return the bits of compressed-tensors' packed integers; raise ValueError if litft does not
    read them."""
    bits = set()
    for group in _groups(settings):
        if _format_of(group, settings) == PACKED:
            bits.add(str((group.get("weights") or {}).get("num_bits")))
    if len(bits) != 1 or not bits <= {"4", "8"}:
        found = ", ".join(sorted(bits))
        raise ValueError(
            f"its weights are quantized (compressed-tensors, {PACKED}, {found} bits), litft reads "
            "4 or 8 bits of all; download the unquantized model"
        )
    return int(bits.pop())


def _packed_weights(
    metas: dict[str, Tensor | str], settings: dict[str, Any]
) -> Iterable[tuple[str, StoredWeight]]:
    """Yield the weights that compressed-tensors packs into int32, with their names."""
    packed = [name for name in metas if name.endswith(".weight_packed")]
    if not packed:
        return
    bits = _packed_bits(settings)
    for name in packed:
        meta = metas[name]
        stem = name.removesuffix("packed")
        if not isinstance(meta, Tensor) or meta.dtype != torch.int32 or meta.dim() != 2:
            raise ValueError(
                f"{name}: expected a matrix of torch.int32, found {_dtype_of(meta)}; {_AGAIN}"
            )
        shape = (meta.shape[0], meta.shape[1] * 32 // bits)
        parts = {"packed": name, "scale": f"{stem}scale"}
        if parts["scale"] not in metas:
            raise ValueError(f"{parts['scale']} is missing; {_AGAIN}")
        for suffix in ("zero_point", "g_idx", "shape"):
            if f"{stem}{suffix}" in metas:
                parts[suffix] = f"{stem}{suffix}"
        dtype = _check_packed_parts(parts, metas, shape, bits)
        index_name = parts.get("g_idx", "")
        dequantize = partial(_call, dequantize_packed, bits=bits, name=index_name)
        yield stem.removesuffix("_"), StoredWeight(parts, shape, dtype, dequantize)


def _check_packed_parts(
    parts: dict[str, str], metas: dict[str, Tensor | str], shape: tuple[int, int], bits: int
) -> torch.dtype:
    """Return the dtype of the scales; raise ValueError if a part has another shape than follows
    from that of the packed numbers. shape: of the weight."""
    outputs, inputs = shape
    scale = metas[parts["scale"]]
    groups = scale.shape[1] if isinstance(scale, Tensor) and scale.dim() == 2 else 1
    scale = _check_part(parts["scale"], scale, None, (outputs, groups))
    if "g_idx" in parts:
        _check_part(parts["g_idx"], metas[parts["g_idx"]], torch.int32, (inputs,))
    elif groups == 0 or inputs % groups:
        reason = f"{groups} groups do not divide the {inputs} input features"
        raise ValueError(f"{parts['scale']}: {reason}; {_AGAIN}")
    if "shape" in parts:
        found = metas[parts["shape"]]
        whole_numbers = (torch.int32, torch.int64)
        if not isinstance(found, Tensor) or found.dtype not in whole_numbers:
            raise ValueError(f"{parts['shape']}: expected whole numbers; {_AGAIN}")
        if tuple(found.shape) != (2,):
            raise ValueError(f"{parts['shape']}: expected two whole numbers; {_AGAIN}")
    if "zero_point" in parts:
        packed_zeros = (-(-outputs * bits // 32), groups)
        _check_part(
            parts["zero_point"], metas[parts["zero_point"]], torch.int32, packed_zeros
        )
    return scale.dtype


def dequantize_packed(
    packed: Tensor,
    scale: Tensor,
    bits: int,
    zero_point: Tensor | None = None,
    g_idx: Tensor | None = None,
    shape: Tensor | None = None,
    name: str = "weight_g_idx",
) -> Tensor:
    """Return the weight (O, I) of compressed-tensors: scale * (value - zero) for each group of
    input features.

    packed: (O, I * bits / 32) int32, of values plus 2^(bits - 1). scale: (O, G). zero_point:
    (O * bits / 32, G), packed along O; None: 0. g_idx: (I,), the group of each input feature; None:
    consecutive groups of equal size. shape: of the weight, which is checked. name: of g_idx, for
    the ValueError if it names a group that does not exist.
    """
    values = _unpack(packed, bits)
    if shape is not None and shape.tolist() != list(values.shape):
        raise ValueError(
            f"a packed weight is {tuple(values.shape)}, its weight_shape {tuple(shape.tolist())}; "
            f"{_AGAIN}"
        )
    if zero_point is None:
        zeros = torch.full_like(scale, 2 ** (bits - 1), dtype=torch.int32)
    else:
        zeros = _unpack(zero_point.mT, bits).mT[: scale.size(0)]
    features = values.size(1)
    if g_idx is None:
        groups = torch.arange(features) // (features // scale.size(1))
    else:
        groups = g_idx.long()
        if not (int(groups.min()) >= 0 and int(groups.max()) < scale.size(1)):
            raise ValueError(
                f"{name}: expected groups from 0 to {scale.size(1) - 1}, found others; {_AGAIN}"
            )
    return (scale.float()[:, groups] * (values - zeros[:, groups])).to(scale.dtype)


def _integer_parts(stem: str, metas: dict[str, Tensor | str]) -> dict[str, str]:
    """Return the names of the tensors that a weight is stored as; raise ValueError if one is
    missing."""
    suffixes = ["qweight", "qzeros", "scales"]
    if f"{stem}g_idx" in metas:
        suffixes.append("g_idx")
    parts = {suffix: f"{stem}{suffix}" for suffix in suffixes}
    for part in parts.values():
        if part not in metas:
            raise ValueError(f"{part} is missing; {_AGAIN}")
    return parts


def _gptq_format(settings: dict[str, Any]) -> str:
    """Return how GPTQ's zeros are stored: "gptq", less one, or "gptq_v2", as they are. The newer
    field is `format`."""
    found = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    return str(found).lower()


def _integer_weights(
    metas: dict[str, Tensor | str], method: str, settings: dict[str, Any]
) -> Iterable[tuple[str, StoredWeight]]:
    bits = settings.get("bits", 4)
    is_first_version = _gptq_format(settings) == "gptq"
    for name, meta in metas.items():
        if not name.endswith(".qweight"):
            continue

        stem = name.removesuffix("qweight")
        parts = _integer_parts(stem, metas)
        if not isinstance(meta, Tensor) or meta.dtype != torch.int32 or meta.dim() != 2:
            raise ValueError(
                f"{name}: expected a matrix of torch.int32, found {_dtype_of(meta)}; {_AGAIN}"
            )

        # the shape of the weight follows from that of its packed numbers
        packed = 32 // bits  # numbers in each int32
        if method == "gptq":
            outputs = meta.shape[1]
            inputs = meta.shape[0] * packed
            dequantize = partial(
                _call,
                dequantize_gptq,
                bits=bits,
                v1=is_first_version,
                name=parts.get("g_idx", ""),
            )
        else:
            outputs = meta.shape[1] * packed
            inputs = meta.shape[0]
            dequantize = partial(_call, dequantize_awq)

        # every part must have the shape that follows from it
        scales = metas[parts["scales"]]
        if isinstance(scales, Tensor) and scales.dim() == 2:
            groups = scales.shape[0]
        else:
            groups = 1
        scales = _check_part(parts["scales"], scales, None, (groups, outputs))
        _check_part(
            parts["qzeros"],
            metas[parts["qzeros"]],
            torch.int32,
            (groups, outputs // packed),
        )

        # with g_idx, groups may have any size and order; otherwise all have the same size
        if "g_idx" in parts and method == "gptq":
            _check_part(parts["g_idx"], metas[parts["g_idx"]], torch.int32, (inputs,))
        elif groups == 0 or inputs % groups:
            reason = f"{groups} groups do not divide the {inputs} input features"
            raise ValueError(f"{parts['scales']}: {reason}; {_AGAIN}")
        yield (
            f"{stem}weight",
            StoredWeight(parts, (outputs, inputs), scales.dtype, dequantize),
        )


def dequantize_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    bits: int,
    v1: bool,
    g_idx: Tensor | None = None,
    name: str = "g_idx",
) -> Tensor:
    """Return the weight (O, I) of GPTQ (arXiv 2210.17323): scale * (value - zero) for each group of
    input features.

    qweight: (I * bits / 32, O) int32. qzeros: (G, O * bits / 32) int32; the first version stores
    zeros minus 1.
    scales: (G, O). g_idx: (I,), the group of each input feature; None: consecutive groups of equal
    size. name: of g_idx, for the ValueError if it names a group that does not exist.
    """
    if g_idx is not None and not (
        int(g_idx.min()) >= 0 and int(g_idx.max()) < scales.size(0)
    ):
        raise ValueError(
            f"{name}: expected groups from 0 to {scales.size(0) - 1}, found others; {_AGAIN}"
        )

    # values are packed along the inputs, zeros along the outputs
    values = _unpack(qweight.mT, bits)  # (O, I)
    if v1:
        # 1 was subtracted from every number, with a borrow from the next one for 0
        ones = sum(1 << shift for shift in range(0, 32, bits))
        qzeros = (qzeros.long() + ones).to(torch.int32)
    zeros = _unpack(qzeros, bits)  # (G, O)
    features = values.size(1)
    if g_idx is None:
        groups = torch.arange(features) // (features // scales.size(0))
    else:
        groups = g_idx.long()
    return (scales.float()[groups] * (values.mT - zeros[groups])).mT.to(scales.dtype)


def dequantize_awq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, **unused: Tensor
) -> Tensor:
    """Return the weight (O, I) of AWQ (arXiv 2306.00978). qweight: (I, O / 8) int32; qzeros: (G, O
    / 8); scales: (G, O)."""
    # from the order of the bits to the order of the columns
    order = torch.tensor(AWQ_ORDER).argsort()
    values = _unpack(qweight, 4).unflatten(1, (-1, 8))[..., order].flatten(1)
    zeros = _unpack(qzeros, 4).unflatten(1, (-1, 8))[..., order].flatten(1)
    size = values.size(0) // scales.size(0)
    scales = scales.repeat_interleave(size, 0)
    zeros = zeros.repeat_interleave(size, 0)
    return (scales.float() * (values - zeros)).mT.to(scales.dtype)


def _unpack(x: Tensor, bits: int) -> Tensor:
    """Return the numbers of `bits` bits in x (rows, columns) int32, the lowest bits first: (rows,
    columns * 32 / bits)."""
    # the shift copies the sign bit, which the mask removes again
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((x[..., None] >> shifts) & (2**bits - 1)).flatten(-2)
