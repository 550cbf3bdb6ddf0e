"""Folders with FP8, GPTQ, AWQ and packed weights: what litft reads is what the formats define."""

import json
import random
import shutil

import pytest
import torch
import transformers
from parity import draw, relative
from safetensors.torch import load_file, save_file

import litft
from litft.args import ConvertArgs
from litft.checkpoints.stored_formats import AWQ_ORDER, dequantize_gptq, dequantize_packed
from litft.commands.convert_hf_checkpoint import convert
from litft.pretrained.folder import resolve

SIZES = dict(
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
GROUP = 32


@pytest.fixture(scope="module")
def base(make_model):
    """A Llama whose sizes are multiples of the groups, and its folder."""
    return make_model(transformers.LlamaConfig, **SIZES)


def to_fp8(weight, block):
    """Return stored tensors of a weight with one scale for each block."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % block[1], 0, -rows % block[0]))
    # (R, block[0], C, block[1])
    blocks = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    scale = blocks.abs().amax((1, 3)) / 448
    quantized = (blocks / scale[:, None, :, None]).flatten(0, 1).flatten(1)[:rows, :columns]
    return {"weight": quantized.to(torch.float8_e4m3fn), "weight_scale_inv": scale.float()}


def integers(weight):
    """Return values (O, I), zeros and scales (O, G) of a weight in 4 bits."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(1, 15)
    values = (groups / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    return values.flatten(1).int(), zero.int(), scale


def pack(numbers, order=range(8)):
    """Pack groups of 8 numbers along the last dimension; the i-th lowest 4 bits hold the number
    order[i]."""
    packed = torch.zeros(*numbers.shape[:-1], numbers.size(-1) // 8, dtype=torch.int64)
    for position, column in enumerate(order):
        packed |= numbers[..., column::8].long() << 4 * position
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def to_gptq(weight, permuted, offset=1):
    """Return stored tensors; with a permutation, groups are those of the features that `g_idx`
    names. offset: what is subtracted from the zeros, 0 in the second version of the format."""
    order = (
        torch.randperm(weight.size(1), generator=torch.Generator().manual_seed(0))
        if permuted
        else slice(None)
    )
    values, zeros, scales = integers(weight[:, order])
    groups = torch.arange(weight.size(1)) // GROUP
    inverse = order.argsort() if permuted else slice(None)
    stored = {
        "qweight": pack(values[:, inverse]).mT,
        "qzeros": pack((zeros - offset).mT),
        "scales": scales.mT.half(),
    }
    return stored | {"g_idx": groups[inverse].int()}, (
        scales[:, groups] * (values - zeros[:, groups])
    )[:, inverse]


def to_awq(weight):
    """Return stored tensors, and the weight that they mean."""
    values, zeros, scales = integers(weight)
    groups = torch.arange(weight.size(1)) // GROUP
    stored = {
        "qweight": pack(values.mT, AWQ_ORDER),
        "qzeros": pack(zeros.mT, AWQ_ORDER),
        "scales": scales.mT.half(),
    }
    return stored, scales[:, groups] * (values - zeros[:, groups])


def to_packed(weight, symmetric=True, permuted=False, bits=4):
    """Return stored tensors of compressed-tensors, and the weight that they mean."""
    order = torch.arange(weight.size(1))
    if permuted:
        order = torch.randperm(weight.size(1), generator=torch.Generator().manual_seed(0))
    inverse = order.argsort()
    values, zeros, scales = integers(weight[:, order])
    groups = torch.arange(weight.size(1)) // GROUP
    if symmetric:
        middle = 2 ** (bits - 1)
        zeros = torch.full_like(zeros, middle)
        scales = weight[:, order].unflatten(1, (-1, GROUP)).abs().amax(-1) / (middle - 1)
        scales = scales.bfloat16().float()
        ratios = weight[:, order] / scales[:, groups]
        values = (ratios.round() + middle).clamp(0, 2 * middle - 1).int()
    if bits == 8:
        packed = values[:, inverse].to(torch.uint8).contiguous().view(torch.int32)
    else:
        packed = pack(values[:, inverse])
    stored = {
        "weight_packed": packed,
        "weight_scale": scales.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        stored["weight_zero_point"] = pack(zeros.mT).mT
    if permuted:
        stored["weight_g_idx"] = groups[inverse].int()
    meant = scales.bfloat16().float()[:, groups] * (values - zeros[:, groups])
    return stored, meant[:, inverse].bfloat16().float()


def packed_settings(symmetric=True, bits=4):
    """The quantization_config of `to_packed`."""
    weights = dict(num_bits=bits, type="int", strategy="group", group_size=GROUP)
    group = dict(targets=["Linear"], weights=weights | dict(symmetric=symmetric))
    return dict(
        quant_method="compressed-tensors",
        format="pack-quantized",
        quantization_status="compressed",
        ignore=["lm_head"],
        config_groups={"group_0": group},
    )


def write(folder, base, out, quantize, settings):
    """Write the base's folder with quantized Linears; return the weights that they mean, by
    name."""
    shutil.copytree(folder, out, dirs_exist_ok=True)
    tensors, meant = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            stored, value = quantize(tensor)
            tensors |= {
                name.removesuffix("weight") + part: x.contiguous()
                for part, x in stored.items()
            }
            meant[name] = value
        else:
            tensors[name] = meant[name] = tensor
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return meant


FORMATS = {
    "gptq": (
        lambda w: to_gptq(w, False),
        dict(quant_method="gptq", bits=4, group_size=GROUP, desc_act=False, sym=False),
    ),
    "gptq, act order": (
        lambda w: to_gptq(w, True),
        dict(quant_method="gptq", bits=4, group_size=GROUP, desc_act=True),
    ),
    # both fields, in any case; null is the same as none
    "gptq, second version": (
        lambda w: to_gptq(w, False, offset=0),
        dict(quant_method="gptq", bits=4, checkpoint_format=None, format="GPTQ_v2"),
    ),
    "gptq, named": (
        lambda w: to_gptq(w, False),
        dict(quant_method="gptq", bits=4, checkpoint_format="GPTQ"),
    ),
    "awq": (
        to_awq,
        dict(quant_method="awq", bits=4, group_size=GROUP, zero_point=True, version="gemm"),
    ),
}
PACKED = {
    "symmetric": (to_packed, packed_settings()),
    "asymmetric": (
        lambda w: to_packed(w, symmetric=False),
        packed_settings(symmetric=False),
    ),
    "8 bits": (lambda w: to_packed(w, bits=8), packed_settings(bits=8)),
    "act order": (lambda w: to_packed(w, permuted=True), packed_settings()),
}


@pytest.mark.parametrize("name", PACKED)
@torch.no_grad()
def test_packed_integers_are_read_as_they_are_meant(base, tmp_path, name):
    """The format of compressed-tensors, in which Kimi K2.5 is published."""
    reference, folder = base
    quantize, settings = PACKED[name]
    meant = write(folder, reference, tmp_path / "model", quantize, settings)
    model, _ = litft.load(tmp_path / "model", precision="fp32")
    reference.load_state_dict(meant, strict=False)
    tokens = draw(1, 20, seed=1)
    assert relative(model(tokens), reference(tokens).logits) <= 1e-5


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_integers_equal_those_of_compressed_tensors(bits, symmetric):
    helpers = pytest.importorskip(
        "compressed_tensors.compressors.pack_quantized.helpers",
        reason="pip install compressed-tensors",
    )
    generator = torch.Generator().manual_seed(0)
    limit = 2 ** (bits - 1)
    values = torch.randint(-limit, limit, (48, 64), generator=generator).to(torch.int8)
    zeros = torch.randint(-limit, limit, (48, 2), generator=generator).to(torch.int8)
    scale = torch.rand(48, 2, generator=generator).bfloat16()
    packed = helpers.pack_to_int32(values, bits)
    packed_zeros = helpers.pack_to_int32(zeros, bits, packed_dim=0).contiguous()
    if symmetric:
        zeros = torch.zeros_like(zeros)
        packed_zeros = None
    weight = dequantize_packed(packed, scale, bits, packed_zeros)
    difference = values.int() - zeros.int().repeat_interleave(32, 1)
    assert torch.equal(weight, difference.bfloat16() * scale.repeat_interleave(32, 1))


@pytest.mark.parametrize("name", FORMATS)
@torch.no_grad()
def test_integers_are_read_as_they_are_meant(base, tmp_path, name):
    reference, folder = base
    quantize, settings = FORMATS[name]
    meant = write(folder, reference, tmp_path / "model", quantize, settings)
    weights = {
        n: x.half().float() if n.endswith("_proj.weight") else x for n, x in meant.items()
    }
    reference.load_state_dict(weights, strict=False)
    model, _ = litft.load(tmp_path / "model", precision="fp32")
    tokens = draw(1, 20, seed=1)
    assert relative(model(tokens), reference(tokens).logits) <= 1e-5
    out = convert(
        ConvertArgs(
            checkpoint_dir=str(tmp_path / "model"),
            out_dir=str(tmp_path / "out"),
            precision="fp32",
        )
    )
    written = load_file(out / "model.safetensors")
    assert all(
        torch.equal(written[n], meant[n].half().float())
        for n in meant
        if n.endswith("_proj.weight")
    )
    assert "quantization_config" not in json.loads((out / "config.json").read_text("utf-8"))


@pytest.mark.parametrize("block", [(128, 128), (32, 16)])
def test_fp8_blocks_equal_transformers(base, tmp_path, block):
    reference, folder = base
    settings = dict(
        quant_method="fp8",
        activation_scheme="dynamic",
        weight_block_size=list(block),
        fmt="e4m3",
    )
    write(folder, reference, tmp_path, lambda w: (to_fp8(w, block), w), settings)
    config = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=block)
    expected = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, dtype=torch.bfloat16
    )
    model, _ = litft.load(tmp_path, precision="bf16")
    for index, layer in enumerate(expected.model.layers):
        assert torch.equal(
            model.blocks[index].mlp.down_proj.weight, layer.mlp.down_proj.weight
        )
        assert torch.equal(
            model.blocks[index].attention.q_proj.weight, layer.self_attn.q_proj.weight
        )

    # compressed-tensors has the size of the blocks in each group
    def as_compressed(weight):
        parts = to_fp8(weight, block)
        return dict(weight=parts["weight"], weight_scale=parts["weight_scale_inv"]), weight

    weights = dict(num_bits=8, type="float", strategy="block", block_structure=list(block))
    settings = dict(
        quant_method="compressed-tensors",
        format="float-quantized",
        config_groups={"group_0": {"targets": ["Linear"], "weights": weights}},
    )
    write(folder, reference, tmp_path / "compressed", as_compressed, settings)
    same, _ = litft.load(tmp_path / "compressed", precision="bf16")
    for name, weight in model.named_parameters():
        assert torch.equal(same.get_parameter(name), weight), name


def rotations(*locations):
    """The transform_config of compressed-tensors with a Hadamard matrix in these places."""
    places = []
    for location in locations:
        places.append({"location": location, "targets": ["Linear"]})
    return {"config_groups": {"R1": {"type": "hadamard", "apply": places}}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(quant_method="gptq", bits=3), "3 bits"),
        (dict(quant_method="awq", bits=4, version="gemv"), "gemv"),
        (dict(quant_method="gptq", bits=4, checkpoint_format="marlin"), "format marlin"),
        (dict(quant_method="hqq"), "hqq"),
        (
            dict(
                quant_method="compressed-tensors",
                format="pack-quantized",
                config_groups={"group_0": {"weights": {"num_bits": 3}}},
            ),
            "pack-quantized, 3 bits",
        ),
        (
            dict(
                quant_method="compressed-tensors",
                format="nvfp4-pack-quantized",
                config_groups={"group_0": {}},
            ),
            "nvfp4-pack-quantized",
        ),
        # SpinQuant's rotation of the input of down_proj
        (
            packed_settings() | {"transform_config": rotations("weight_input", "input")},
            r"rotates activations, too \(input\)",
        ),
    ],
)
def test_other_formats_are_refused(base, tmp_path, settings, message):
    reference, folder = base
    write(folder, reference, tmp_path, lambda w: ({"weight": w}, w), settings)
    with pytest.raises(ValueError, match=f"{message}.*unquantized"):
        litft.load(tmp_path)


def test_rotations_of_weights_alone_are_in_the_stored_weights(base, tmp_path):
    reference, folder = base
    settings = packed_settings()
    settings["transform_config"] = rotations("weight_input", "weight_output")
    write(folder, reference, tmp_path, to_packed, settings)
    litft.load(tmp_path)
    settings["transform_config"] = {"config_groups": ["R1"]}
    write(folder, reference, tmp_path, to_packed, settings)
    with pytest.raises(ValueError, match=r"transform_config .* is damaged"):
        litft.load(tmp_path)


def test_tensors_without_effect_are_no_error(base, tmp_path):
    """Older programs wrote a bias of zeros for every Linear, and newer ones the scales of a cache
    in 8 bits."""
    reference, folder = base
    quantize, settings = FORMATS["gptq"]
    write(folder, reference, tmp_path, quantize, settings)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    added = {}
    for name in tensors:
        if name.endswith("o_proj.qweight"):
            stem = name.removesuffix("o_proj.qweight")
            added[f"{stem}o_proj.bias"] = torch.zeros(tensors[name].size(1))
            added[f"{stem}k_scale"] = torch.tensor(0.5)
    save_file(tensors | added, path, metadata={"format": "pt"})
    litft.load(tmp_path)
    biases = [name for name in added if name.endswith("bias")]
    save_file(tensors | {biases[0]: torch.ones(1)}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected .*o_proj.bias"):
        litft.load(tmp_path)


def test_a_switched_off_quantization_is_none(base, tmp_path):
    reference, folder = base
    settings = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": False,
        "load_in_8bit": False,
    }
    write(folder, reference, tmp_path, lambda w: ({"weight": w}, w), settings)
    assert resolve(tmp_path).quantization() is None
    model, _ = litft.load(tmp_path, precision="fp32")
    tokens = draw(1, 20, seed=1)
    assert relative(model(tokens), litft.load(folder, precision="fp32")[0](tokens)) == 0


def test_a_missing_scale_is_reported(base, tmp_path):
    reference, folder = base
    write(
        folder,
        reference,
        tmp_path,
        lambda w: ({"weight": w.to(torch.float8_e4m3fn)}, w),
        dict(quant_method="fp8"),
    )
    with pytest.raises(ValueError, match="its scale is missing"):
        litft.load(tmp_path)


FP8_BLOCKS = dict(
    quant_method="fp8", weight_block_size=[32, 16], activation_scheme="dynamic", fmt="e4m3"
)
STORED = {
    name: (lambda weight, to=quantize: to(weight)[0], settings)
    for name, (quantize, settings) in FORMATS.items()
}
STORED["packed"] = (
    lambda weight: to_packed(weight, symmetric=False)[0],
    packed_settings(False),
)
STORED["fp8"] = (lambda weight: to_fp8(weight, (32, 16)), FP8_BLOCKS)


def damaged(tensor, generator):
    """Return a stored tensor of another shape or type, or with numbers that mean nothing; and what
    was done."""
    kinds = {
        "a row less": lambda: tensor[:-1],
        "a row more": lambda: torch.cat([tensor, tensor[:1]]),
        "flat": lambda: tensor.flatten()[: tensor.numel() // 2],
        "one number": lambda: tensor.flatten()[:1].view(1, 1, 1),
        "a batch": lambda: tensor[None],
    }
    if tensor.dim() == 2:
        kinds["a column less"] = lambda: tensor[:, :-1]
        if tensor.size(0) != tensor.size(1):
            kinds["transposed"] = lambda: tensor.mT
    if tensor.dtype == torch.int64:
        # a shape; published in either width of whole numbers
        kinds["floats"] = lambda: tensor.float()
    elif tensor.dtype == torch.int32:
        kinds["bytes"] = lambda: tensor.to(torch.int8)
        kinds["floats"] = lambda: tensor.float()
    elif tensor.dtype not in (torch.float8_e4m3fn,):
        kinds["integers"] = lambda: tensor.to(torch.int32)
    kind = generator.choice(sorted(kinds))
    return kinds[kind]().contiguous(), kind


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_damaged_parts_are_refused(base, tmp_path, count):
    """Nothing is used as it comes, and nothing ends in a traceback."""
    reference, folder = base
    generator = random.Random(count)
    for name, (quantize, settings) in STORED.items():
        write(folder, reference, tmp_path / name, lambda w, q=quantize: (q(w), w), settings)
    for _ in range(count):
        name = generator.choice(sorted(STORED))
        path = tmp_path / name / "model.safetensors"
        whole = load_file(path)
        part = generator.choice([part for part in whole if "_proj." in part])
        tensor, kind = damaged(whole[part], generator)
        save_file(whole | {part: tensor}, path, metadata={"format": "pt"})
        with pytest.raises(
            ValueError, match=r"download (the folder|it) (again|in bf16)|expected shape"
        ):
            pytest.fail(f"{name}, {part}, {kind}: {litft.load(tmp_path / name)}")
        save_file(whole, path, metadata={"format": "pt"})
    for name in STORED:
        litft.load(tmp_path / name)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points_of_gptqs_first_version_are_stored_with_a_borrow(bits):
    """1 is subtracted from each field of a whole number, so that a 0 borrows from the next."""
    fields = 32 // bits
    draw = torch.Generator().manual_seed(0)
    zeros = torch.randint(0, 2, (1, 8 * fields), generator=draw)
    shifts = torch.arange(fields) * bits
    packed = (zeros.unflatten(1, (-1, fields)) << shifts).sum(-1)
    ones = int((1 << shifts).sum())
    stored = packed - ones
    as_int32 = (stored + 2**31) % 2**32 - 2**31
    values = torch.zeros(1, 8 * fields, dtype=torch.int32)
    weight = dequantize_gptq(
        values, as_int32.int(), torch.ones(1, 8 * fields), bits=bits, v1=True
    )
    assert torch.equal(weight, -zeros.mT.expand(-1, fields).float())


@pytest.mark.parametrize("shift", [-1, 1])
def test_groups_that_do_not_exist_are_refused(base, tmp_path, shift):
    """Of -1, torch would take the last group."""
    reference, folder = base
    quantize, settings = STORED["gptq, act order"]

    def shifted(weight):
        stored = quantize(weight)
        return stored | {"g_idx": stored["g_idx"] + shift}, weight

    write(folder, reference, tmp_path, shifted, settings)
    with pytest.raises(
        ValueError, match=r"g_idx: expected groups from 0 to [12], found others"
    ):
        litft.load(tmp_path)
