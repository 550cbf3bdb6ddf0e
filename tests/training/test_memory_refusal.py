"""A run that needs more memory than there is: refused before a weight is read, with what would
fit."""

import json
import shlex
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ENV, ROOT, STORIES, copy_tokenizer

from litft.pretrained.folder import resolve


@pytest.fixture(scope="module")
def large_model(tmp_path_factory) -> Path:
    """The folder of a Llama with 8 B parameters, whose file of weights takes no space on the disk:
    it is a hole."""
    folder = tmp_path_factory.mktemp("large")
    config = dict(
        model_type="llama", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32
    )
    config |= dict(
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
        max_position_embeddings=8192,
    )
    (folder / "config.json").write_text(json.dumps(config))
    copy_tokenizer(STORIES, folder)
    sizes = {
        "model.embed_tokens": (128256, 4096),
        "model.norm": (4096,),
        "lm_head": (128256, 4096),
    }
    for layer in range(32):
        prefix = f"model.layers.{layer}."
        for name in ("q", "o"):
            sizes[f"{prefix}self_attn.{name}_proj"] = (4096, 4096)
        for name in ("k", "v"):
            sizes[f"{prefix}self_attn.{name}_proj"] = (1024, 4096)
        for name in ("gate", "up"):
            sizes[f"{prefix}mlp.{name}_proj"] = (14336, 4096)
        sizes[f"{prefix}mlp.down_proj"] = (4096, 14336)
        for name in ("input_layernorm", "post_attention_layernorm"):
            sizes[prefix + name] = (4096,)
    header = {}
    end = 0
    for name, shape in sizes.items():
        start = end
        end += 2 * torch.Size(shape).numel()
        header[f"{name}.weight"] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


@pytest.mark.weekly
def test_full_fine_tuning_of_8b_without_a_gpu_is_refused(large_model, examples, tmp_path):
    assert resolve(large_model).config.dim == 4096
    command = [
        sys.executable,
        ROOT / "finetune" / "full.py",
        "--checkpoint_dir",
        large_model,
        "--data.path",
        examples,
    ]
    start = time.monotonic()
    done = subprocess.run(
        [*command, "--accelerator", "cpu"],
        cwd=tmp_path,
        env=ENV,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and time.monotonic() - start < 60, done.stderr
    assert (
        "the run needs 1" in done.stderr and "GiB, and this machine has" in done.stderr
    ), done.stderr
    assert "most of it is for" in done.stderr
    for remedy in (
        "finetune/lora.py saves about",
        "--train.ignore_memory_plan true",
        "a smaller model",
    ):
        assert remedy in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "command",
    [pytest.param("finetune/lora.py", marks=pytest.mark.slow), "generate/base.py"],
)
def test_a_limit_of_the_address_space_is_named(large_model, examples, tmp_path, command):
    """The weights cannot be mapped into memory."""
    flags = (
        ["--prompt", "hi"]
        if command.startswith("generate")
        else ["--data.path", examples, "--quantize", "nf4"]
    )
    if command.startswith("finetune"):
        flags += ["--data.max_seq_length", "16"]
    words = [
        sys.executable,
        ROOT / command,
        "--checkpoint_dir",
        large_model,
        "--accelerator",
        "cpu",
        *flags,
    ]
    line = shlex.join(map(str, words))
    done = subprocess.run(
        ["bash", "-c", f"ulimit -v 6000000; {line}"],
        cwd=tmp_path,
        env=ENV,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert (
        "error: not enough memory" in done.stderr and "5.7 GiB (ulimit -v)" in done.stderr
    ), done.stderr
    assert "Traceback" not in done.stderr
