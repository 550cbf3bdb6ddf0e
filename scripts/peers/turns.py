"""Shared by the contenders of scripts/benchmark.py: load the model, report ready, then run one
training step per turn.

Contenders run in different environments, so this file imports only torch. The command-line argument
is the benchmark's setup, a JSON file. Each turn is a line with the indices of the step's samples;
the answer is a line with the measurements of the step.
"""

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# token ids, their targets (-100: no loss), and the lengths of a pair's answers (empty: it is no
# pair)
Sample = tuple
BETAS = (0.9, 0.95)


class Contender:
    """A model and how it computes the gradients of a step. Subclasses define `accumulate`."""

    model: torch.nn.Module
    parameters: list[torch.nn.Parameter]  # the trained ones
    flops = None  # a function from the samples of a step to their FLOPs, or None

    def accumulate(self, samples: list[Any], count: int) -> Tensor:
        """Accumulate the gradients of the mean loss over the step's `count` targets, and return
        that loss."""
        raise AssertionError("overridden by each contender")

    def samples(self, samples: list[Sample]) -> list[Any]:
        """Return the samples in the format that `accumulate` takes."""
        return samples

    def step(self, samples: list[Any], count: int) -> float:
        """Run one complete training step and return its loss.

        Reading the loss waits for the device.
        """
        loss = self.accumulate(samples, count)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss)


def memory(device: str, kind: str = "VmHWM") -> float:
    """Return the peak memory in GiB: allocated on the GPU, or resident on a CPU. kind VmRSS: the
    current resident memory."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return (
        int(re.search(kind + r":\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
        / 2**20
    )


def run_contender(contender_class: type[Contender]) -> None:
    """Load the contender and answer turns until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr, not into the answers
    setup = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(setup["threads"])
    torch.manual_seed(0)
    if setup["device"] == "cuda":
        initial_memory = 0.0
    else:
        initial_memory = memory(setup["device"], "VmRSS")
    contender = contender_class(setup)
    if not hasattr(contender, "optimizer"):
        contender.optimizer = torch.optim.AdamW(
            contender.parameters, lr=1e-3, betas=BETAS, weight_decay=0.0, fused=True
        )
    raw_samples = json.loads(Path(setup["samples"]).read_text())
    samples = contender.samples(raw_samples)

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    answer(ready=True)
    for line in sys.stdin:
        sample_ids = json.loads(line)
        start = time.perf_counter()
        loss = contender.step(
            [samples[n] for n in sample_ids],
            sum(t >= 0 for n in sample_ids for t in raw_samples[n][1]),
        )
        seconds = time.perf_counter() - start
        row = {
            "seconds": seconds,
            "loss": loss,
            "tokens": sum(len(raw_samples[n][0]) for n in sample_ids),
        }
        if contender.flops:
            flops = contender.flops([samples[n] for n in sample_ids])
        else:
            flops = None
        if "torch._dynamo.utils" in sys.modules:
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        else:
            graphs = 0
        answer(
            **row,
            flops=flops,
            graphs=graphs,
            memory_gib=memory(setup["device"]) - initial_memory,
        )
