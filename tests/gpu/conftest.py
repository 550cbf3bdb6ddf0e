"""Tests that need a GPU: without one they skip.

On the pretended GPU (README.md), those marked `numbers` skip too.
"""

import sys

import pytest
import torch

from gpu.comparisons import PRETENDED
from litft.distributed.devices import pick_accelerator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name != "gpu":
            continue
        # a compiled network that falls back to the uncompiled one is a failure here
        item.add_marker(pytest.mark.filterwarnings("error:.*run.? uncompiled"))
        count = next((mark.args[0] for mark in item.iter_markers("devices")), 1)
        if not torch.cuda.is_available():
            item.add_marker(
                pytest.mark.skip(
                    reason="needs a GPU; tests/gpu/README.md says how to pretend one"
                )
            )
        elif torch.cuda.device_count() < count:
            item.add_marker(pytest.mark.skip(reason=f"needs {count} GPUs"))
        elif PRETENDED and item.get_closest_marker("numbers"):
            item.add_marker(pytest.mark.skip(reason="the pretended GPU computes nothing"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print why a test failed at once: on a lent GPU, pytest may be stopped before its summary."""
    if report.failed:
        print(
            f"\n== {report.nodeid}\n{report.longreprtext}", file=sys.__stderr__, flush=True
        )


@pytest.fixture(autouse=True)
def prepared_gpu():
    """Prepare the GPU as litft's commands do, and free its memory after each test."""
    pick_accelerator("cuda")
    yield
    torch._dynamo.reset()
    torch.cuda.empty_cache()
