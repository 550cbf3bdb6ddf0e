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
    pytest.mark.skipif(
        torch.version.cuda is not None, reason="fake CUDA is for torch's CPU build"
    ),
    pytest.mark.skipif(shutil.which("g++") is None, reason="fake CUDA is built with g++"),
]


@pytest.fixture(scope="module")
def report():
    """The report of all steps; of a process of its own, since torch looks for CUDA once."""
    done = subprocess.run(
        [sys.executable, STEPS, "--covering"], env=ENV, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_steps_of_every_family_and_every_way(report):
    """No step waits for the GPU, mixes devices, or leaves a trained parameter without a
    gradient."""
    assert int(re.search(r"(\d+) steps:", report)[1]) >= 40


@pytest.mark.slow
def test_a_gpu_without_bf16_computes_in_fp16_and_says_so(report):
    assert (
        "Tesla T4 has no bf16 arithmetic (compute capability 7.5): precision auto is fp16"
        in report
    )
    assert len(re.findall(r"^passed in .* on an old GPU$", report, re.MULTILINE)) == 5
