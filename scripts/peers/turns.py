"""What every contender of scripts/benchmark.py shares: it loads, says so, and takes a step whenever it is its turn.

A contender runs in an environment of its own, so nothing is imported here but torch. Its arguments are the benchmark's
setup as a JSON file; a turn is a line with the numbers of a step's samples, and its answer a line with what the step showed.
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

Sample = tuple[list[int], list[int]]  # tokens, and the target of each, -100 where there is none
BETAS = (0.9, 0.95)


class Contender:
    """A model, and how it turns a step's samples into gradients: each side has its own `accumulate`."""

    model: torch.nn.Module
    parameters: list[torch.nn.Parameter]  # those that are trained
    flops = None  # of a list of samples

    def accumulate(self, samples: list[Any], count: int) -> Tensor:
        """Gradients of the loss summed over `count` targets and divided by it, which is returned."""
        raise AssertionError("each side has its own")

    def samples(self, samples: list[Sample]) -> list[Any]:
        """As this side likes them."""
        return samples

    def step(self, samples: list[Any], count: int) -> float:
        """One whole training step; returns its loss, and waits for the device by that."""
        loss = self.accumulate(samples, count)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss)


def memory(device: str, kind: str = "VmHWM") -> float:
    """The most held so far in GiB, allocated on the GPU or resident on a CPU; VmRSS: what is resident now."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return int(re.search(kind + r":\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**20


def contend(make: type[Contender]) -> None:
    """Answer turns until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is not an answer
    setup = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(setup["threads"])
    torch.manual_seed(0)
    imported = 0.0 if setup["device"] == "cuda" else memory(setup["device"], "VmRSS")
    side = make(setup)
    if not hasattr(side, "optimizer"):
        side.optimizer = torch.optim.AdamW(side.parameters, lr=1e-3, betas=BETAS, weight_decay=0.0, fused=True)
    given = json.loads(Path(setup["samples"]).read_text())
    samples = side.samples(given)

    def say(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    say(ready=True)
    for line in sys.stdin:
        numbers = json.loads(line)
        start = time.perf_counter()
        loss = side.step([samples[n] for n in numbers], sum(t >= 0 for n in numbers for t in given[n][1]))
        seconds = time.perf_counter() - start
        row = {"seconds": seconds, "loss": loss, "tokens": sum(len(given[n][0]) for n in numbers)}
        flops = side.flops([samples[n] for n in numbers]) if side.flops else None
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] if "torch._dynamo.utils" in sys.modules else 0
        say(**row, flops=flops, graphs=graphs, memory_gib=memory(setup["device"]) - imported)
