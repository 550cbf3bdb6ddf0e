"""Training steps on fake CUDA tensors: devices, dtypes, shapes and waits of a GPU, without one (see
tests/gpu/README.md)."""

import re
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ENV, ROOT

STEPS = ROOT / "tests" / "gpu" / "fake_cuda" / "steps.py"
pytestmark = [
    pytest.mark.skipif(torch.version.cuda is not None, reason="fake CUDA is for torch's CPU build"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="fake CUDA is built with g++"),
]


def take_steps(*flags):
    """Return the report of the steps; in a process of its own, since torch looks for CUDA once."""
    done = subprocess.run([sys.executable, STEPS, *flags], env=ENV, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_steps_of_every_family_and_every_way():
    """No step waits for the GPU, mixes devices, or leaves a trained parameter without a
    gradient."""
    assert int(re.search(r"(\d+) steps:", take_steps("--covering"))[1]) >= 40


@pytest.mark.slow
def test_a_gpu_without_bf16_computes_in_fp32_and_says_so():
    report = take_steps(
        "--only", "auto precision", "llama: grouped: LoRA, packed", "--capability", "7.5"
    )
    assert (
        "Tesla T4 has no bf16 arithmetic (compute capability 7.5): precision auto is fp32" in report
    )
    assert "5 steps: 5 passed" in report
