"""What a step costs: FLOPs against a closed form, chips by name, memory of this process alone."""

import re
import subprocess
import sys

import pytest
import torch
from conftest import ENV
from transformers import Qwen3MoeConfig

from litft.args import LoRAArgs
from litft.data.samples import Sample
from litft.folder import resolve
from litft.peft import LoRA
from litft.plan import CHIPS, Flops, peak_flops


def test_flops_of_a_tiny_llama(tiny):
    """Two per weight and token forward, two for the input's gradient, two more where the weight's own is needed."""
    source = resolve(tiny)
    model, method = source.base_model(), LoRA(LoRAArgs(r=4))
    method.choose(model, source.adapter_rules)
    method.attach(model)
    tokens = torch.zeros(10, dtype=torch.int64)
    targets = torch.tensor([-100] * 7 + [1, 2, 3])
    linears = 3 * (32 * 32 * 2 + 32 * 16 * 2 + 32 * 56 * 3)
    factors = 3 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 56))
    pairs = 10 * 11 // 2 * 3  # of query and key, in three layers
    expected = 10 * (4 * linears + 6 * factors) + 3 * 4 * 32 * 512 + pairs * 12 * 32
    assert Flops(model)([Sample(tokens, targets, [])]) == expected


def test_flops_of_experts(make_model):
    """A token goes through two of five; what chooses them sees all."""
    values = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8, num_hidden_layers=1)
    source = resolve(make_model(Qwen3MoeConfig, **values)[1])
    model, method = source.base_model(), LoRA(LoRAArgs(r=4))
    method.choose(model, source.adapter_rules)
    method.attach(model)
    linears = 32 * 32 * 2 + 32 * 16 * 2 + 32 * 5 + 2 * 3 * 32 * 24
    factors = 4 * (2 * (32 + 32) + 2 * (32 + 16) + 2 * 3 * (32 + 24))
    expected = 4 * linears + 6 * factors + 4 * 32 * 96 + 12 * 32
    assert Flops(model)([Sample(torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), [])]) == expected


@pytest.mark.parametrize(
    "name, bf16",
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L4", 121.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_chips_by_the_names_torch_reports(name, bf16):
    assert next((row[1] for row in CHIPS if re.search(row[0], name)), None) == bf16


def test_a_cpu_is_measured():
    assert 1e9 < peak_flops(torch.device("cpu"), "fp32") < 1e14


def test_memory_is_that_of_the_process_alone():
    """A parent of 1 GiB starts a child that needs a fifth of it."""
    child = "import torch; from litft.plan import peak_memory; print(peak_memory(torch.device('cpu')))"
    parent = f"import subprocess, sys; held = bytearray(b'x') * 2**30; subprocess.run([sys.executable, '-c', {child!r}])"
    done = subprocess.run([sys.executable, "-c", parent], env=ENV, capture_output=True, text=True, check=True)
    assert 0.05 < float(done.stdout) < 0.7
