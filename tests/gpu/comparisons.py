"""Shared by the tests on a GPU: comparisons that also hold, for shapes and dtypes, on a GPU that
computes nothing."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import ENV, ROOT
from torch import Tensor

PRETENDED = "LITFT_PRETENDED_GPU" in os.environ
CUDA = torch.device("cuda")


def skip_host_counts(is_fp32_mixture: bool) -> None:
    """Skip a test of experts in fp32 on the pretended GPU: there the host reads the experts' row
    counts from the GPU."""
    if PRETENDED and is_fp32_mixture:
        pytest.skip("the host reads counts that the pretended GPU has not computed")


def published_config(name: str, **values: Any) -> dict[str, Any]:
    """Return a config.json of the transformers class `name`; skip the test if this release lacks
    it."""
    config_class = getattr(transformers, name, None)
    if config_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return config_class(**values).to_dict()


def script(*arguments: object, cwd: Path) -> str:
    """Run a script in an interpreter of its own, since CUDA does not survive a fork; return what it
    printed."""
    command = [sys.executable, ROOT / str(arguments[0]), *map(str, arguments[1:])]
    done = subprocess.run(
        command, cwd=cwd, env=ENV, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, (
        f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    )
    assert "uncompiled" not in done.stdout + done.stderr
    return done.stdout


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, relative to the norm of the expected values; both on any
    device."""
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-12))


def check(actual: Tensor, expected: Tensor, limit: float, what: str = "") -> None:
    """Check that a tensor on the GPU equals the expected one up to a relative error; on the
    pretended GPU, its shape."""
    assert actual.is_cuda and actual.shape == expected.shape, what
    if not PRETENDED:
        assert error(actual, expected) < limit, f"{what}: {error(actual, expected):.2e}"
