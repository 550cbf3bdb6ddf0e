"""Compare the kernels of flash-linear-attention, run by Triton's interpreter on a CPU, with the
plain PyTorch forms.

`TRITON_INTERPRET=1 python triton_on_cpu.py` prints the largest relative difference of each pair of
forms, with gradients. The interpreter has no bf16 products, so all is in fp32.
"""

import builtins
import sys
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path

import torch
import triton
from torch._subclasses import FakeTensorMode
from torch.nn.functional import softplus

sys.path.insert(0, str(Path(__file__).parent.parent))

import fla.modules.causal_conv1d
import fla.ops

from litft.model.mixers import kernels, mixer
from litft.model.mixers.recurrence import recurrence
from litft.model.packed_sequences import PackedSequences
from litft.training.memory.allocations import AllocationTracker

B, T, G, K, V = 2, 70, 1, 16, 8  # more than one chunk
IDS = torch.tensor([[0] * 40 + [1] * 27 + [2] * 3, [3] * 70])


class InterpreterDriver:
    """Stands in for a GPU's driver when the autotuner chooses: any choice is as fast."""

    def get_benchmarker(self):
        """Return a function that returns the same times for each configuration."""
        return lambda call, quantiles: [1.0] * len(quantiles)


class Index(int):
    """A loop index, which kernels cast as if it were a scalar of Triton; in the interpreter it is
    an integer of Python."""

    def to(self, dtype):
        """Return the index."""
        return self


@contextmanager
def use_kernels(wanted):
    """Within the context, the kernels run on a CPU in any dtype, or not at all."""
    before, kernels.can_run = kernels.can_run, lambda *_: wanted
    yield
    kernels.can_run = before


def shapes(by_row):
    """Return the shapes of q, k, v, g and b; heads share queries and keys where they can."""
    heads = G if by_row else 2 * G
    return (
        (B, T, G, K),
        (B, T, G, K),
        (B, T, heads, V),
        (B, T, G, K) if by_row else (B, T, heads),
        (B, T, heads),
    )


def recurrence_results(by_row, delta, packed, pieces):
    """Return outputs, final states and gradients of q, k, v, g and b."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, g, b = (torch.randn(*shape, generator=generator) for shape in shapes(by_row))
    k = k / k.norm(dim=-1, keepdim=True)
    leaves = [
        x.requires_grad_()
        for x in (q, k, v, -softplus(g) / 20, *([b.sigmoid()] if delta else []))
    ]
    documents, state, outputs = PackedSequences.of(IDS) if packed else None, None, []
    for piece in zip(*(x.split(pieces, 1) for x in leaves), strict=True):
        y, state = recurrence(*piece, *([] if delta else [None]), documents, state)
        outputs.append(y)
    y = torch.cat(outputs, 1)
    loss = (y * torch.linspace(0, 1, y.numel()).view_as(y)).sum() + (
        0 if packed else state.sum() / 7
    )
    return [y, *([] if packed else [state]), *torch.autograd.grad(loss, leaves)]


def conv_results(bias, packed):
    """Return the output of a convolution and the gradients of its input, weight and bias."""
    torch.manual_seed(0)
    conv, x = mixer.CausalConv(24, 4, bias), torch.randn(B, T, 24, requires_grad=True)
    leaves = [x, *(torch.nn.init.normal_(parameter) for parameter in conv.parameters())]
    y = mixer.causal_conv(
        x, conv.weight, conv.bias, PackedSequences.of(IDS) if packed else None, None
    )
    return [
        y,
        *torch.autograd.grad(
            (y * torch.linspace(0, 1, y.numel()).view_as(y)).sum(), leaves
        ),
    ]


def compare(what, results, *arguments):
    """Print the largest difference between the results with kernels and without, relative to the
    largest value."""
    both = []
    for wanted in (False, True):
        with use_kernels(wanted):
            both.append(results(*arguments))
    worst = max(
        ((x - y).abs().max() / x.abs().max()).item() for x, y in zip(*both, strict=True)
    )
    print(f"{worst:.1e} {what}", flush=True)


def compare_memory(name, by_row, delta):
    """Print the difference between the peak of the kernels' forward pass as it is, and as a memory
    plan traces it."""
    peaks = []
    for planned in (False, True):
        with FakeTensorMode() if planned else nullcontext():
            q, k, v, g, b = (torch.zeros(shape) for shape in shapes(by_row))
            context = kernels.without_launches() if planned else nullcontext()
            with context, AllocationTracker() as tracker:
                kernels.fused_recurrence(q, k, v, g, b if delta else None, None, None)
            peaks.append(tracker.peak)
    print(f"{abs(peaks[1] / peaks[0] - 1):.1e} {name}, traced memory")


def main():
    """Compare all forms."""
    triton.runtime.driver.set_active(InterpreterDriver())
    for module in (fla.ops.common.chunk_delta_h, fla.ops.common.chunk_h):
        module.range = lambda *limits: map(Index, builtins.range(*limits))
    for bias, packed in product((False, True), repeat=2):
        compare(f"convolution, bias {bias}, packed {packed}", conv_results, bias, packed)
    for name, by_row, delta in (
        ("Mamba-2", False, False),
        ("gated delta net", False, True),
        ("KDA", True, True),
    ):
        for packed, pieces in ((False, [T]), (True, [T]), (False, [40, 30])):
            what = f"{name}, packed {packed}, {len(pieces)} pieces"
            compare(what, recurrence_results, by_row, delta, packed, pieces)
        compare_memory(name, by_row, delta)


if __name__ == "__main__":
    main()
